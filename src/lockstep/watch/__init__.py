"""The proof that trainer and engine agree, and the receipt of the proof.

The modules in the order of a run:

1. `handshake.py`: the settings of the engine.
2. `push.py`: a push and its proofs, the probes of `modules.py` and the canary of `canary.py`.
3. `samples.py`, `ends.py`, `kept_sets.py`, `draws.py`: how the engine sampled. `settings.py`: the user's settings.
4. `gap.py`: the gap between the log-probs of both sides. `gap_parts.py`: its causes.
5. `custody.py`, `advantages.py`, `loss_gradient.py`, `finite_differences.py`, `update.py`: loss, gradient, step.
6. `receipt.py` and `resume.py`: what stays on disk, and what a resumed run continues with.

`tolerances.py` has the limits of all proofs.
"""
