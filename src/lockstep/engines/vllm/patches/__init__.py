"""What Lockstep changes inside vLLM's processes: functions that replace or wrap functions of vLLM."""
