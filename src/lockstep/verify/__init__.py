"""`lockstep verify`: every proof on a user's own model, engine and settings, and the proofs put to the test by injected faults."""
