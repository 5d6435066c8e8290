"""Programs that run beside the trainer, in any Python: each imports one other library, and nothing of Lockstep."""
