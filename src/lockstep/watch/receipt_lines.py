"""The lines of a run's receipt: what the proofs at its start and at each step have found, as JSON types.

They need the proofs, and so PyTorch. `watch/receipt.py` reads and writes receipts without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lockstep.contract.protocol import EngineSettings
from lockstep.watch.gap import GapStats, JudgedGap
from lockstep.watch.push import PushWatch
from lockstep.watch.tolerances import Tolerance


def start_line(
    step: int, pusher: PushWatch, settings: EngineSettings, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The line of a run's start, after the first push and its canary."""
    proof = pusher.proof
    assert proof is not None
    assert proof.canary is not None
    probed = proof.probe
    return {
        "kind": "start",
        "step": step,
        "version": step,
        "engine": {key: str(value) for key, value in asdict(settings).items()},
        "limits": {
            **asdict(pusher.limit),
            "max": pusher.limit.largest(proof.canary.tokens),
            "module_probe": probed.limit,
        },
        "modules": {
            "probed": probed.modules,
            "unreached": list(probed.unreached),
            "not_to_the_bit": list(pusher.held_weights.unreached),
        },
        "canary": figures(proof.canary, pusher.limit),
        **_of_push(pusher),
        **more,
    }


def step_line(
    step: int,
    version: int,
    pusher: PushWatch,
    gap: GapStats,
    limit: Tolerance,
    judged: JudgedGap,
    waiting: GapStats,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """The line of a step whose proofs have passed.

    Args:
        gap: over the tokens that the weights of `version` sampled, except the tokens that are left aside.
        limit: the limits that the largest gap was compared with.
        judged: the gap whose means were compared, over the tokens of this step, or of this and earlier ones; empty if
            they wait for more tokens.
        waiting: the tokens that wait.
    """
    assert pusher.proof is not None
    push = pusher.proof.push
    return {
        "kind": "step",
        "step": step,
        "version": version,
        "digest": push.digest,
        "tensors": push.tensors,
        "modules_probed": pusher.proof.probe.modules,
        **_of_push(pusher),
        "checked_tokens": gap.tokens,
        "sum_abs_gap": gap.sum_abs,
        "max_abs_gap": gap.max_abs,
        "max_allowed": limit.largest(gap.tokens),
        "sum_k3": gap.sum_k3,
        "sum_cubes": gap.sum_cubes,
        "sum_fourths": gap.sum_fourths,
        "worst_request": gap.worst,
        **({"judged": found} if (found := judged.figures()) else {}),
        **({"waiting": asdict(waiting)} if waiting.tokens else {}),
        **more,
    }


def figures(gap: GapStats, limit: Tolerance | None = None) -> dict[str, float]:
    """The figures of a gap, and the limit that its largest one was compared with."""
    found = {"tokens": gap.tokens, "mean_abs_gap": gap.mean_abs, "max_abs_gap": gap.max_abs, "k3": gap.k3}
    return found if limit is None else {**found, "max_allowed": limit.largest(gap.tokens)}


def _of_push(pusher: PushWatch) -> dict[str, Any]:
    """What the last probes have found, and what an extension of the push adds."""
    assert pusher.proof is not None
    (name, error), held = pusher.proof.probe.worst, pusher.proof.held
    return {
        "worst_module": {"name": name, "error": error},
        "held_weights": {"shares": held.shares, "of_shares": held.of_shares},
        **pusher.extension.receipt(),
    }
