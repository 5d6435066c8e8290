"""vLLM in the trainer's process, and the code that every process of vLLM needs, in the trainer and in servers.

- `in_process.py` is the engine. `workers/` starts vLLM and calls its workers.
- `engines/vllm/port/` puts requests and answers into vLLM's form and back.
- `engines/vllm/port/` runs inside vLLM's workers, and so does `engines/vllm/port/`.
"""
