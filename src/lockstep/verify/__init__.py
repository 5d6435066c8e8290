"""`lockstep verify`: runs every proof on a user's own model, engine and settings, and tests the proofs with injected faults."""
