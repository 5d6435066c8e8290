"""Compare two ways to learn with sampling filters: scored among the kept ids, and scored against the whole vocabulary.

    make filter-curve                              (two cores, no download; about two minutes)
    make filter-curve ARGS="--regex"               (a regular expression that forces one token in four)

The task is that of `methods.py`: repeat the letter that the prompt names. Here a completion has 32 tokens. The first
run is Lockstep without changes. The second run is a trainer that ignores the filters: this file patches Lockstep so
that it uses log-probs over the whole vocabulary and does not check the gap. With `--regex`, every fourth token of the
first run must be an `h`, and the second run has no expression. Prints one table per run.
(docs/internals/methods-measured.md)
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.learning.methods import GROUPS, logs, make_model

TOKENS = 32
REGEX = "([a-h]{3}h){8}"
_COLUMNS = {
    "reward": "reward",
    "ratio": "sampling/importance_sampling_ratio/mean",
    "gap, mean": "parity/mean_abs_gap",
    "gap, max": "parity/max_abs_gap",
    "entropy": "entropy",
    "forced": "sampling/forced_share",
    "clipped": "clip_ratio/region_mean",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--regex", action="store_true", help="learn with a regular expression in place of top-p"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument(
        "--correction", default="sequence_truncate", help="vllm_importance_sampling_mode of both runs"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")

        def run(name: str, **fields: Any) -> list[Mapping[str, float]]:
            print(f"\n{name}", flush=True)
            own = {**GROUPS, "max_completion_length": TOKENS, "learning_rate": args.learning_rate, **fields}
            found = logs("GRPO", model, Path(folder) / name, args.steps, own)
            print_table(found)
            return found

        if args.regex:
            run(f"with {REGEX}", vllm_structured_outputs_regex=REGEX)
            run("without the expression")
        else:
            fields = {"top_p": args.top_p, "vllm_importance_sampling_mode": args.correction}
            run(f"top_p {args.top_p}, scored as sampled", **fields)
            with whole_vocabulary():
                run(f"top_p {args.top_p}, scored against the whole vocabulary", **fields)


@contextmanager
def whole_vocabulary() -> Iterator[None]:
    """In this context, the trainer ignores the kept ids, and no gap stops it."""
    from lockstep.learn.scoring import _Head
    from lockstep.watch.engine import Proofs

    with ExitStack() as stack:
        stack.enter_context(patch.object(_Head, "among_kept", _Head.of_rows))
        stack.enter_context(patch.object(Proofs, "check_gap", lambda *arguments: None))
        yield


def print_table(found: Sequence[Mapping[str, float]]) -> None:
    """Print the means of ten parts of a run, one row per part."""
    shown = {title: name for title, name in _COLUMNS.items() if name in found[0]}
    print("steps".rjust(9) + "".join(title.rjust(11) for title in shown))
    size = max(len(found) // 10, 1)
    for start in range(0, len(found), size):
        part = found[start : start + size]
        values = [sum(entry[name] for entry in part) / len(part) for name in shown.values()]
        print(
            f"{start + 1}–{start + len(part)}".rjust(9) + "".join(f"{value:11.3g}" for value in values),
            flush=True,
        )


if __name__ == "__main__":
    main()
