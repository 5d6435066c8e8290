"""The workers of vLLM in the trainer's process: one worker in this process, or several processes that share the model."""
