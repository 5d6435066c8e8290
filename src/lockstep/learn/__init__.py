"""Rollouts become gradients: packs, forwards, losses and the steps of a generation.

`events.py` is all that it knows of proofs.
"""
