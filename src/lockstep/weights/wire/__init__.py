"""Sends tensors to servers and workers: what a push is as a stream, and the ways that it can take."""
