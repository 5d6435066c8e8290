"""vLLM in the trainer's process, and the code that every process of vLLM needs, in the trainer and in servers."""
