"""vLLM in this process, and what every vLLM process of ours has in common."""
