"""vLLM in the trainer's process, and the code that every process of vLLM needs, in the trainer and in servers.

- `in_process.py` is the engine. `start.py` starts vLLM in the environment that `environment.py` makes.
- vLLM calls `plugin.py` in each of its processes. `port/receive.py` and `worker.py` run in its workers: they receive
  weights, and answer a trainer's calls.
- `port/` has what depends on vLLM's release.

No other room imports vLLM.
"""
