"""From a data set to the gradients of an optimizer step: data, sampling, batches, forwards, losses. The loop is `run/loop.py`."""
