"""Generations ahead on an engine in this process: every token's age is known, a minimum of each is compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import methods
import pytest
from conftest import needs_vllm, start

from lockstep.contract.inbox import Inbox
from lockstep.contract.protocol import Completion, Engine, GenerationRequest
from lockstep.errors import ProofError
from lockstep.extras.selftest.seams import Between
from lockstep.watch.receipt import check_receipt

AHEAD: dict[str, Any] = {**methods.GROUPS, "max_staleness": 2, "max_steps": 6}


def steps_of(folder: Path) -> list[dict[str, Any]]:
    check_receipt(folder / "receipt.jsonl")
    lines = [json.loads(line) for line in (folder / "receipt.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def check_coverage(folder: Path, run: Any) -> None:
    """From the third step on, older weights have sampled every token. Still every generation was compared twice."""
    lines = steps_of(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["checked_tokens"] > 0 for line in lines] == [True, False, False, False, False, False]
    # All generations are smaller than the minimum, so all of their tokens are asked again.
    assert all(line["asked_again"]["tokens"] == line["sampled_tokens"] for line in lines)
    ahead = [line["sampled_ahead"]["tokens"] for line in lines]
    sampled = [line["sampled_tokens"] for line in lines]
    # At the first step three generations begin, and the first is used at once. The last two steps begin none.
    assert ahead == [sampled[1] + sampled[2], sampled[3], sampled[4], sampled[5], 0, 0]
    assert all(line["asked_again"]["max_abs_gap"] < 1e-3 for line in lines)
    logged = [log for log in run.state.log_history if "loss" in log]
    assert [log["staleness/max"] for log in logged] == [0, 1, 2, 2, 2, 2]
    assert [log["staleness/asked_again"] for log in logged] == sampled


@pytest.mark.parametrize("method", ["GRPO", "PPO"])
def test_a_minimum_of_every_generation_is_compared(
    method: str, untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    fields = AHEAD | methods.FIELDS[method] | {"temperature": 0.8}
    run = methods.make(method, untied_dir, tmp_path, hf_engine, fields)
    run.train()
    check_coverage(tmp_path, run)


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}], ids=["plain", "filtered"])
def test_a_minimum_is_compared_on_vllm(filters: dict[str, Any], untied_dir: str, tmp_path: Path) -> None:
    engine = start("vllm", untied_dir)
    try:
        run = methods.make("GRPO", untied_dir, tmp_path, engine, AHEAD | filters)
        run.train()
    finally:
        engine.close()
    check_coverage(tmp_path, run)


def test_completions_of_other_prompts_are_seen_although_no_later_step_has_fresh_tokens(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, AHEAD)
    real = hf_engine.serve

    def across(requests: Sequence[GenerationRequest], answers: list[Completion]) -> list[Completion]:
        if hf_engine.version != 3:
            return answers
        asked = {r.key: r.prompt_ids for r in requests}
        moved = [*answers[1:], answers[0]]
        return [_with_key(m, a, asked[a.key]) for a, m in zip(answers, moved, strict=True)]

    def serve(inbox: Inbox) -> None:
        real(Between(inbox, answers=across))  # type: ignore[arg-type]

    with patch.object(hf_engine, "serve", serve), pytest.raises(ProofError, match="gap") as caught:
        run.train()
    assert caught.value.check == "gap"
    # At version 3 the engine began the generation of step 5. The policy did not move any more.
    assert run.state.global_step == 3


def _with_key(moved: Completion, own: Completion, prompt: Any) -> Completion:
    return replace(moved, key=own.key, prompt_ids=prompt)


def test_an_engine_that_scores_the_tokens_otherwise_now_is_seen(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, AHEAD)
    real = hf_engine.score

    def score(sequences: dict[str, tuple[int, ...]]) -> dict[str, tuple[float, ...]]:
        found = real(sequences)
        if hf_engine.version == 4:
            found |= {
                name: tuple(1.01 * v for v in own) for name, own in found.items() if name.startswith("again/")
            }
        return found

    with (
        patch.object(hf_engine, "score", score),
        pytest.raises(ProofError, match="asked again without its caches"),
    ):
        run.train()
    assert run.state.global_step == 4


def test_several_steps_per_generation_and_staleness_go_together(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    fields = AHEAD | {"steps_per_generation": 2, "num_iterations": 2, "max_staleness": 4, "max_steps": 12}
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    run.train()
    lines = steps_of(tmp_path)
    assert [line["stale_tokens"] == line["sampled_tokens"] for line in lines] == [False, True, True]
    assert all(line["asked_again"]["tokens"] == line["sampled_tokens"] for line in lines)
    assert [line["sampled_ahead"]["tokens"] > 0 for line in lines] == [True, True, False]
