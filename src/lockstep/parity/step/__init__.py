"""Proves an optimizer step: what enters the loss, the gradient of the loss, the update, and what must stay as it is."""
