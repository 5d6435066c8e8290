"""Compute the figures of recorded steps that `run.py` prints and writes to its JSON file.

Steps come from the programs of `play.py`, one dict per step. Figures are plain dicts of numbers. Every figure is a
median over steps, except the smallest and largest step, and peak memory, which is the maximum over all steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Step = dict[str, Any]
Steps = list[Step]


def measured(rounds: Sequence[Mapping[str, Step]]) -> dict[str, Steps]:
    """The steps of each program, from rounds in which every program took one; the first round is left out."""
    return {program: [taken[program] for taken in rounds[1:]] for program in (rounds[0] if rounds else ())}


def check_tokens(steps: Mapping[str, Steps], tokens: int) -> None:
    """Check that every step of every program sampled this many tokens.

    Raises:
        SystemExit: a step sampled another number: the programs did other work, and are not compared.
    """
    found = {program: {round(step["sampled_tokens"]) for step in taken} for program, taken in steps.items()}
    if any(own - {tokens} for own in found.values()):
        raise SystemExit(f"steps that sample {tokens} tokens are compared, and these sampled {found}")


def whole_steps(steps: Mapping[str, Steps], floors: Mapping[str, float]) -> dict[str, Any]:
    """A whole step of each program, the fastest rival's ratio to Lockstep, and Lockstep's phases over their floors.

    Args:
        floors: seconds by phase of Lockstep's step.
    """
    programs = {program: _program(taken) for program, taken in steps.items()}
    rivals = [program for program in programs if program != "lockstep"]
    figures: dict[str, Any] = {"programs": programs}
    if rivals:
        rival = min(rivals, key=lambda program: programs[program]["step_s"])
        figures |= {"rival": rival, "ratio": programs[rival]["step_s"] / programs["lockstep"]["step_s"]}
    return figures | {"phases": _over_floors(steps["lockstep"], floors)}


def learning_halves(steps: Mapping[str, Steps]) -> dict[str, Any]:
    """The part of a step without sampling, rewards and push, for both programs, and their peak memory."""
    programs = {
        program: {**_spread(taken, _rest, "rest_s"), "peak_bytes": max(step["peak_bytes"] for step in taken)}
        for program, taken in steps.items()
    }
    own, other = programs["lockstep"], programs["trl"]
    return {
        "programs": programs,
        "ratio": other["rest_s"] / own["rest_s"],
        "peak_bytes_ratio": own["peak_bytes"] / other["peak_bytes"],
    }


def growth(steps: Mapping[str, Steps]) -> dict[str, Any]:
    """For each size: the step, its milliseconds per sampled token, and the share of each phase."""
    return {
        name: {
            **_spread(taken, _whole, "step_s"),
            "tokens_per_s": _median(taken, _rate),
            "ms_per_token": 1000
            * _median(taken, _whole)
            / _median(taken, lambda step: step["sampled_tokens"]),
            "shares": {
                phase: _median(taken, lambda step, phase=phase: step["phases"][phase] / step["step"])
                for phase in taken[0]["phases"]
            },
        }
        for name, taken in steps.items()
    }


def _program(steps: Steps) -> dict[str, float]:
    return {
        **_spread(steps, _whole, "step_s"),
        "rollout_s": _median(steps, lambda step: step["rollout"]),
        "rest_s": _median(steps, _rest),
        "tokens_per_s": _median(steps, _rate),
    }


def _over_floors(steps: Steps, floors: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """For each phase: its seconds, its floor, and their ratio; None where there is no floor."""
    found: dict[str, dict[str, float | None]] = {}
    for phase, floor in floors.items():
        seconds = _median(steps, lambda step, phase=phase: step["phases"][phase])
        found[phase] = {"seconds": seconds, "floor_s": floor, "times": seconds / floor if floor else None}
    return found


def _spread(steps: Steps, of: Callable[[Step], float], name: str) -> dict[str, float]:
    values = [of(step) for step in steps]
    return {name: statistics.median(values), f"smallest_{name}": min(values), f"largest_{name}": max(values)}


def _median(steps: Steps, of: Callable[[Step], float]) -> float:
    return statistics.median(of(step) for step in steps)


def _whole(step: Step) -> float:
    return step["step"]


def _rest(step: Step) -> float:
    return step["step"] - step["rollout"]


def _rate(step: Step) -> float:
    """Sampled tokens divided by the seconds of the whole step."""
    return step["sampled_tokens"] / step["step"]
