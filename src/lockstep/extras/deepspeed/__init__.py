"""DeepSpeed ZeRO-3 partitions, gathers and reduces. Lockstep's loop, optimizer step and proofs stay as they are.

`settings.py` reads the user's DeepSpeed configuration, `weights.py` shards a model, and `deepspeed_parts.py` has
every call into DeepSpeed. Nothing here imports DeepSpeed before a model is sharded with it.
"""
