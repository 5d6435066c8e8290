"""vLLM's own LoRA: engines get a run's adapter alone, beside a base model that stays as it is."""
