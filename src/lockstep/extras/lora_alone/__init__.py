"""Adapters alone (`vllm_enable_lora`): the engine gets the base weights once and then the adapter, for vLLM's own LoRA.

The trainer's half: `adapter_source.py` has the two parts of a model, `adapter_push.py` sends them, and
`adapter_proof.py` proves what the engine computes with them. `adapter_faults.py` has what the proofs must catch.

The engine's half: `adapter_arguments.py` has the arguments with which vLLM starts. `engine_adapters.py` takes the
adapters of vLLM beside the trainer, and `server_adapters.py` those of vLLM's servers. What runs inside vLLM's workers
is `engines/vllm/port/lora.py`.
"""
