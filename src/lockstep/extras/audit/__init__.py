"""`lockstep audit`: judges rollouts of other programs. It says whether tokens, weights, log-probs and draws agree with a model.

`dumps.py` reads the rollouts, `evidence.py` scores them with the model, `findings.py` gives the verdicts, `causes.py` explains a
gap, and `server.py` asks a running vLLM. The limits and the words are those of the proofs in `watch/`.
"""
