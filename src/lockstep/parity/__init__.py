"""The proof that trainer and engine agree, and the receipt of the proof.

The modules in the order of a run:

1. `handshake.py`: the settings of the engine.
2. `proven_push.py`: a push and its proofs, the probes in `weights/` and the canary in `logprobs/`.
3. `sampling/` and `user_settings.py`: how the engine sampled, and that everything has the settings of the user.
4. `logprobs/`: the gap between the log-probs of both sides, and its causes.
5. `step/` and `backward/`: the loss, its gradient and the optimizer step.
6. `receipt.py` and `resume/`: what stays on disk, and what a resumed run continues with.

`tolerances.py` has the limits of all proofs.
"""
