"""The proofs on an engine and on every generation: what was sampled, from which rows, and with which rewards."""
