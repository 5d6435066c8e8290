"""The engine of a run: its weights, its rollouts, their rewards, and the proofs on all of it."""
