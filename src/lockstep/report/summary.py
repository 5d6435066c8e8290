"""`summary.json`: a finished run in a few numbers, computed from the files that it wrote. Pure functions."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lockstep.report.alarms import LINE
from lockstep.report.page.run_record import closest_of_run

Line = dict[str, Any]


def summarise(
    metrics: list[Line], receipt: list[Line], before: Line | None, after: Line | None, wall_s: float
) -> Line:
    """The summary of a run.

    Args:
        metrics: lines of `metrics.jsonl`.
        receipt: lines of `receipt.jsonl`.
        before, after: evaluation metrics, or None if there was no evaluation set.
        wall_s: wall seconds of the process that finished the run.

    Returns:
        The summary; docs/reference/report.md explains every key.
    """
    steps = [line for line in metrics if "loss" in line]
    phases = [name for line in steps[:1] for name in line if name.startswith("time/") and name != "time/step"]
    time = {name.removeprefix("time/"): sum(line[name] for line in steps) for name in phases}
    unproven = [line for line in receipt if line["kind"] == "unproven"]
    alarms = [line["text"] for line in receipt if line["kind"] == LINE]
    receipt = [line for line in receipt if line["kind"] == "step"]
    tokens = sum(line["sampled_tokens"] for line in receipt)
    seconds = sum(line["time/step"] for line in steps)
    return {
        **_evaluations(before, after),
        "steps": steps[-1]["step"] if steps else 0,
        "wall_s": round(wall_s, 1),
        "tokens_per_s": round(tokens / seconds, 1) if seconds else 0.0,
        "time": {name: round(value, 2) for name, value in time.items()},
        "parity": _parity(receipt),
        **({"unproven": dict(Counter(line["proof"] for line in unproven))} if unproven else {}),
        **({"alarms": alarms} if alarms else {}),
    }


def _evaluations(before: Line | None, after: Line | None) -> Line:
    found: Line = {}
    for name, metrics in (("before", before), ("after", after)):
        for key in metrics or ():
            # One set is `eval`; of several, each has its name behind it.
            if not key.endswith("_reward_ci95"):
                continue
            assert metrics is not None
            prefix = key.removesuffix("_reward_ci95")
            found[f"{prefix}_reward_{name}"] = metrics[f"{prefix}_reward"]
            found[f"{prefix}_reward_{name}_ci95"] = metrics[key]
            found[f"{prefix}_samples"] = int(metrics[f"{prefix}_samples"])
            found[f"{prefix}_problems"] = int(metrics[f"{prefix}_problems"])
            # Runs that began with an earlier version, and environments that make the prompts, have no such figures.
            if f"{prefix}_parity/checked_share" in metrics:
                found[f"{prefix}_checked_share"] = metrics[f"{prefix}_parity/checked_share"]
            if f"{prefix}_seen_in_training" in metrics:
                found[f"{prefix}_seen_in_training"] = int(metrics[f"{prefix}_seen_in_training"])
    return found


def _parity(receipt: list[Line]) -> Line:
    checked = sum(line["checked_tokens"] for line in receipt)
    stale, aside = (sum(line.get(name, 0) for line in receipt) for name in ("stale_tokens", "aside_tokens"))
    return {
        "mean_abs_gap": sum(line["sum_abs_gap"] for line in receipt) / checked if checked else 0.0,
        "max_abs_gap": max((line["max_abs_gap"] for line in receipt), default=0.0),
        "k3": sum(line["sum_k3"] for line in receipt) / checked if checked else 0.0,
        "checked_tokens": checked,
        **_closest(receipt),
        **({"stale_tokens": stale} if stale else {}),
        **({"aside_tokens": aside} if aside else {}),
        "worst_module_error": max((line["worst_module"]["error"] for line in receipt), default=0.0),
        # A failed check stops the run before its optimizer step. So a run with a summary had no failed check.
        "failed": sum(
            line["checked_tokens"] + line.get("stale_tokens", 0) + line.get("aside_tokens", 0)
            != line["sampled_tokens"]
            for line in receipt
        ),
    }


def _closest(receipt: list[Line]) -> Line:
    """The figure of the gap that came closest to its limit, as it was judged, if the receipt has it."""
    found = closest_of_run(receipt)
    return {} if found is None else {"closest_to_limit": {"share": found.share, "text": found.text}}


def summary_lines(summary: Line) -> list[str]:
    """The summary as lines of text for the user."""
    parity = summary["parity"]
    lines = [f"ALARM            {text}" for text in summary.get("alarms", ())]
    if "eval_reward_after" in summary:
        # The first evaluation is missing if its file was lost when the run went on.
        first = "unknown"
        if "eval_reward_before" in summary:
            first = f"{summary['eval_reward_before']:.3f} ± {summary['eval_reward_before_ci95']:.3f}"
        last = f"{summary['eval_reward_after']:.3f} ± {summary['eval_reward_after_ci95']:.3f}"
        problems = summary["eval_problems"]
        count = f"{problems} problems, {summary['eval_samples']} samples, 95 % intervals"
        if "eval_checked_share" in summary:
            count += f"; gap proven on {summary['eval_checked_share']:.0%} of the tokens"
        lines.append(f"held-out reward  {first}  →  {last}   ({count})")
        if seen := summary.get("eval_seen_in_training"):
            lines.append(f"not held out     {seen} of {problems} evaluation prompts are training prompts too")
    others = [f"{parity['stale_tokens']} more are of older weights"] if "stale_tokens" in parity else []
    others += [f"{parity['aside_tokens']} more have no gradient"] if "aside_tokens" in parity else []
    not_checked = f" ({'; '.join(others)})" if others else ""
    lines.append(
        f"parity           {parity['checked_tokens']} tokens checked{not_checked}, {parity['failed']} failed; "
        f"gap mean {parity['mean_abs_gap']:.1e}, max {parity['max_abs_gap']:.1e}, k3 {parity['k3']:.1e}; "
        f"worst module {parity['worst_module_error']:.1e}"
    )
    if "closest_to_limit" in parity:
        found = parity["closest_to_limit"]
        lines.append(f"gap and limits   closest: {found['text']}, {found['share']:.0%} of the limit")
    for proof, count in summary.get("unproven", {}).items():
        why = "checks that were due could not be made; the receipt says why"
        lines.append(f"not proven       {proof}: {count} {why}")
    shares = "  ".join(f"{name} {seconds:.0f}s" for name, seconds in summary["time"].items())
    lines.append(f"time             {summary['steps']} steps, {summary['wall_s']:.0f} s in all: {shares}")
    return lines
