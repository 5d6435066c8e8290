"""What Lockstep changes in vLLM: functions that replace, wrap or join functions of vLLM."""
