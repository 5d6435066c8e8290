"""The proof that trainer and engine agree, and the receipt of the proof.

`run.py` says which proofs each event of a run makes, and `engine.py` those of its engine. A file that makes a proof
says what the proof shows; docs/reference/proofs.md has them in the order of a run. `tolerances.py` has the limits of
all proofs. `receipt.py` and `resume.py` have what stays on disk, and what a resumed run continues with.

A function whose name begins with `check` raises `ProofError` if what it compares differs.
"""
