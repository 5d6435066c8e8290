"""Adapters alone (`vllm_enable_lora`): the engine gets the base weights once and then the adapter, for vLLM's own LoRA.

`adapter_source.py` has the two parts of a model, `adapter_push.py` sends them, and `adapter_proof.py` proves what the
engine computes with them. `adapter_faults.py` has what the proofs must catch.
"""
