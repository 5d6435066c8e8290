"""Pictures of prompts: read once, processed once, and shown as the same tensors to the engine and to the trainer."""
