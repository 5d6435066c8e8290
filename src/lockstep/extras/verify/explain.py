"""`lockstep verify --explain RUN_DIR`: explains a run's parity gap from the receipt and metrics of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.report.page import run_record
from lockstep.watch.receipt import RECEIPT, read_receipt

Line = dict[str, Any]
_PARTS = ("semantics", "numerics", "staleness", "defect")


def explain_run(folder: Path) -> str:
    """A page of text about a run's receipt and metrics."""
    receipt = folder / RECEIPT
    if not receipt.is_file():
        raise InputError(f"explain: {folder} has no {RECEIPT}: is it the output directory of a run?")
    entries = read_receipt(receipt)
    starts = [e for e in entries if e.get("kind") == "start"]
    steps = [e for e in entries if e.get("kind") == "step"]
    if not starts or not steps:
        raise InputError(f"{receipt} holds no step yet")
    about, gaps = [*_about(starts), *_servers(entries)], _gaps(steps, starts[-1])
    return "\n".join([*about, "", *gaps, "", *_parts(folder), *_weights(steps, starts)])


def _about(starts: list[Line]) -> list[str]:
    last = starts[-1]
    engine, canary = last["engine"], last["canary"]
    lines = [
        f"engine      {engine['engine']}, {engine['architecture']}, {engine['dtype']} (head {engine['head_dtype']}), "
        f"{engine['logprobs_mode']}; trainer computes in {last['trainer']['compute']}, temperature "
        f"{last['temperature']}",
        f"at start    canary gap mean {canary['mean_abs_gap']:.1e}, max {canary['max_abs_gap']:.1e}; "
        f"{last['modules']['probed']} modules probed, worst {last['worst_module']['name']} "
        f"{last['worst_module']['error']:.1e} (limit {last['limits']['module_probe']:.0e})",
    ]
    if len(starts) > 1:
        lines.append(f"starts      {len(starts)}: at steps {', '.join(str(s['step']) for s in starts)}")
    return lines


def _servers(entries: list[Line]) -> list[str]:
    """When servers joined, left or were refused."""
    lines = []
    for entry in (e for e in entries if e.get("kind") == "servers"):
        said = [f"{url} {what}" for what in ("joined", "left", "refused") for url in entry[what]]
        lines.append(f"servers     at step {entry['step']}: {', '.join(said)}; then {len(entry['servers'])}")
    return lines


def _gaps(steps: list[Line], start: Line) -> list[str]:
    checked = sum(s["checked_tokens"] for s in steps)
    if not checked:
        return ["gap         no token was sampled by the weights that learned from it", *_canaries(steps)]
    mean = _mean(steps)
    compared = [s for s in steps if s["checked_tokens"]]
    third = max(len(compared) // 3, 1)
    early, late = (_mean(part) for part in (compared[:third], compared[-third:]))
    worst = run_record.closest(run_record.largest_gaps(steps, start["limits"]["max"]))
    assert worst is not None
    trend = "grows" if late > 2 * early else "falls" if early > 2 * late else "is steady"
    return [
        f"gap         mean {mean:.1e}, max {worst.figure:.1e} (limit {worst.limit:.1e}) "
        f"at step {worst.lines[0]['step']}, request {worst.lines[0]['worst_request']}",
        f"            {checked} tokens checked in {len(steps)} steps; it {trend}: {early:.1e} in the first third, "
        f"{late:.1e} in the last",
        *_judged(steps),
        *_canaries(steps),
    ]


def _judged(steps: list[Line]) -> list[str]:
    """The means that were compared with their limits, and single steps above a limit, if the receipt has them."""
    lines = []
    for name in run_record.MEANS:
        judged = run_record.judged_means(steps, name)
        if (worst := run_record.closest(judged)) is not None:
            alone = run_record.steps_alone(run_record.alone_above(judged), name)
            lines.append(f"            judged: {'; '.join(filter(None, [worst.text, alone]))}")
    if waiting := run_record.waiting_tokens(steps):
        lines.append(
            f"            the means of the last {waiting} tokens are not judged yet: they are too few"
        )
    return lines


def _canaries(steps: list[Line]) -> list[str]:
    """The canary's result, which stands in for tokens that older weights sampled; empty if there are none."""
    with_canary = [s for s in steps if "canary" in s]
    if not with_canary:
        return []
    worst = max(with_canary, key=lambda s: s["canary"]["max_abs_gap"])
    tokens, largest = sum(s["stale_tokens"] for s in with_canary), worst["canary"]["max_abs_gap"]
    return [
        f"stale       {tokens} tokens were older than the weights that learned from them; the canary of "
        f"{len(with_canary)} steps: gap max {largest:.1e} at step {worst['step']}"
    ]


def _parts(folder: Path) -> list[str]:
    """Means of the gap's decomposition, from the columns in the metrics; empty if the run did not write them."""
    logged = [line for line in run_record.read_run(folder).metrics if f"parity/gap_{_PARTS[0]}" in line]
    if not logged:
        return []
    means = {part: sum(line[f"parity/gap_{part}"] for line in logged) / len(logged) for part in _PARTS}
    reasons = {
        "semantics": "settings: trainer and engine score different distributions",
        "numerics": "numerics: dtypes and the order of sums; nothing to fix",
        "staleness": "staleness: the policy was updated after the tokens were sampled",
        "defect": "a defect, which no setting explains",
    }
    largest = max(means, key=lambda part: means[part])
    return [
        "parts       " + ", ".join(f"{part} {value:.1e}" for part, value in means.items()),
        f"            mostly {reasons[largest]}",
    ]


def _weights(steps: list[Line], starts: list[Line]) -> list[str]:
    worst = max(steps, key=lambda s: s["worst_module"]["error"])
    stale = [s["step"] for s in steps if s["version"] != s["step"] - 1]
    module = worst["worst_module"]
    lines = [
        f"weights     {steps[-1]['tensors']} tensors per push; worst module of all probes: {module['name']} "
        f"{module['error']:.1e} at step {worst['step']}"
    ]
    if stale:
        why = "learned from rollouts of an earlier version (steps_per_generation, num_iterations)"
        lines.append(f"            {len(stale)} steps {why}")
    unreached = starts[-1]["modules"]["unreached"]
    if unreached:
        lines.append(f"            no probe reaches {', '.join(unreached[:4])}: only the gap covers them")
    return lines


def _mean(steps: list[Line]) -> float:
    return sum(s["sum_abs_gap"] for s in steps) / sum(s["checked_tokens"] for s in steps)
