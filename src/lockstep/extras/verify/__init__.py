"""`lockstep verify`: every proof, in turn, on a user's model, engine and settings."""
