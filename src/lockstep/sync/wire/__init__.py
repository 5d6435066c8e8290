"""How tensors travel to servers: what is laid out, what changed, and the transports."""
