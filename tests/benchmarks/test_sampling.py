"""The comparison of vLLM's settings: the requests to its engines, and the figures from their rounds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from benchmarks.against_trl.workloads import workload
from benchmarks.sampling.engine import _CONTEXT
from benchmarks.sampling.settings import PARTS, Setting, figures, in_turn
from lockstep.engines.vllm.arguments import engine_arguments, usual_sequences


class Spoken:
    """Replaces an engine: records its requests, and takes longer each time."""

    def __init__(self, name: str, asked: list[tuple[str, str, int]], *, runs: bool = True) -> None:
        self._name, self._asked, self.runs = name, asked, runs

    def sample(self, name: str, number: int) -> dict[str, Any]:
        self._asked.append((self._name, name, number))
        return {"seconds": float(number + 1), "cpu_seconds": 2.0, "sampled": 60, "prompt": 10, "cached": 4}


def turns(rounds: int, **runs: bool) -> tuple[dict[str, Any], list[tuple[str, str, int]]]:
    asked: list[tuple[str, str, int]] = []
    engines: Any = {name: Spoken(name, asked, runs=own) for name, own in runs.items()}
    return in_turn(engines, "short", rounds), asked


def test_the_first_round_is_left_out_and_no_other() -> None:
    found, _ = turns(3, a=True, b=True)
    assert {name: [taken["seconds"] for taken in rounds] for name, rounds in found.items()} == {
        "a": [2, 3, 4],
        "b": [2, 3, 4],
    }


def test_every_engine_has_every_round_and_each_goes_first_in_its_turn() -> None:
    _, asked = turns(2, a=True, b=True, c=True)
    assert [name for name, _, _ in asked] == [*"abc", *"bca", *"cab"]
    assert [number for _, _, number in asked] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_what_vllm_refused_to_start_is_asked_nothing() -> None:
    found, asked = turns(1, a=True, b=False)
    assert found.keys() == {"a"} == {name for name, _, _ in asked}
    assert turns(1, a=False) == ({}, [])


def test_figures_are_medians_with_the_slowest_and_the_fastest() -> None:
    rounds = [
        {"seconds": seconds, "cpu_seconds": 2 * seconds, "sampled": 60, "prompt": 100, "cached": cached}
        for seconds, cached in ((2.0, 64), (1.0, 64), (60.0, 0), (3.0, 64), (4.0, 64))
    ]
    found = figures(rounds)
    assert (found["tokens_per_s"], found["slowest"], found["fastest"]) == (20, 1, 60)
    assert found["cpu_seconds"] == 6
    assert (found["seconds"], found["prompt_tokens"], found["computed_prompt_tokens"]) == (3, 100, 36)


@pytest.mark.parametrize("part", PARTS)
def test_settings_can_be_said_to_a_process_and_workloads_fit_its_context(part: str) -> None:
    for setting in PARTS[part].settings.values():
        assert json.loads(json.dumps(asdict(setting))) == asdict(setting)
    for name in PARTS[part].workloads:
        work = workload(name)
        assert work.tokens + (work.prompt_tokens or 128) <= _CONTEXT


def test_what_lockstep_does_by_default_is_among_the_settings(untied_dir: str) -> None:
    default = usual_sequences()
    block = engine_arguments(untied_dir, torch.float32, _CONTEXT, default).get("block_size")
    assert Setting() == Setting(max_num_seqs=default)
    assert all(Setting() in PARTS[part].settings.values() for part in ("compile", "batch", "prefix"))
    assert (
        torch.cuda.is_available() or Setting(vllm={"block_size": block}) in PARTS["block"].settings.values()
    )
