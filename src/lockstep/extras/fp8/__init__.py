"""Sampling with weights in 8 bits (`vllm_quantization`): the engine quantises what it gets, and proofs expect that.

`quantisation.py` has the formula of the scheme. `quantised_proof.py` measures what it changes, and `quantised_push.py`
adds this to the proofs of a push. `quantised_faults.py` has what the proofs must catch. What depends on vLLM's release
stands in `engines/vllm/port/quantised.py`.
"""
