"""The proof that trainer and engine agree, and the receipt of the proof."""
