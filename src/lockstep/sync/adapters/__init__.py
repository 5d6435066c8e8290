"""Sends a model with an adapter: merged into one set of weights, or the adapter alone for vLLM's own LoRA."""
