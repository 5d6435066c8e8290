"""Programs of processes beside the trainer, with any Python: each imports one other library and nothing of ours."""
