"""Sends tensors to servers: the layout of chunks, the changed elements, and the transports."""
