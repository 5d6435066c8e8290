"""Lockstep's engines and proofs under TRL's own trainers."""
