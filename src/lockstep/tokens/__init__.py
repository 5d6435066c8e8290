"""Where text becomes token ids, once."""
