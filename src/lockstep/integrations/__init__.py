"""Lockstep's engines and proofs under the interfaces of other programs."""
