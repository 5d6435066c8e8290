"""Lockstep's engines and proofs behind the interfaces of other programs."""
