"""Sharded models: each rank holds a part of every weight, its gradient and its optimizer state.

`settings.py` reads the user's configuration. `model.py` shards a model, with `fsdp.py` (FSDP2) or with the weights of
another library (`SHARDINGS` of `lockstep.extensions`), and gives other code the part of a tensor that this rank holds.
`passes.py` makes all ranks do together what needs all of them. `files.py` writes and reads checkpoints.
"""
