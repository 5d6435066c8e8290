"""Sharded models: each rank holds a part of every weight, its gradient and its optimizer state (FSDP2, or DeepSpeed ZeRO-3).

`settings.py` reads the user's configuration. `model.py` shards a model, with `fsdp.py` or with the room `zero/`. `passes.py` makes all
ranks do together what needs all of them. `parts.py` gives other code the part of a tensor that this rank holds, and `files.py` writes
and reads checkpoints.
"""
