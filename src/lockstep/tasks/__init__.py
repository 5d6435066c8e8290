"""Data to learn from and functions that score answers: built in, from reasoning-gym, or the user's own."""
