"""`lockstep audit`: says whether tokens, weights, log-probs and draws of other programs' rollouts agree with a model.

`dumps.py` reads the rollouts, `rollout_logprobs.py` scores them with the model or asks a running vLLM, `findings.py`
gives the verdicts, and `causes.py` explains a gap. The limits and the words are those of the proofs in `watch/`.
"""
