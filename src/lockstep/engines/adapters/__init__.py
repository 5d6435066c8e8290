"""Training with vLLM's own LoRA: only the adapter of a run is pushed, and the engine's base model does not change."""
