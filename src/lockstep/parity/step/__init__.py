"""The proofs of what lies on either side of the seam: samples, ends, gradients and updates."""
