"""A run bets on every sampled token once, keeps its evidence, and stops where tokens are not fair draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from methods import ALONE, GROUPS, INTERRUPTED, PAIRS, StopAfter, make
from transformers import TrainerCallback

from lockstep.contract.protocol import Engine
from lockstep.errors import ProofError
from lockstep.watch import draws
from lockstep.watch.receipt import RECEIPT, read_receipt

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "one step": ("GRPO", GROUPS),
    "two steps": ("GRPO", {**GROUPS, "num_iterations": 2}),
    "entropies first": ("GRPO", {**GROUPS, "top_entropy_quantile": 0.5}),
    "reference": ("GRPO", {**GROUPS, "beta": 0.1}),
    "top-p": ("GRPO", {**GROUPS, "top_p": 0.9}),
    # At the second step the entropies are those of a policy with which the engine has not sampled.
    "top-p-entropies-of-each-step": (
        "GRPO",
        {**GROUPS, "top_p": 0.8, "top_entropy_quantile": 0.5, "num_iterations": 2},
    ),
    "interrupted": ("GRPO", {**GROUPS, **INTERRUPTED, "max_completion_length": 12}),
    "PPO": ("PPO", {**ALONE, "num_iterations": 2}),
    "pairs": ("OnlineDPO", PAIRS),
}


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_receipt(folder / RECEIPT) if line["kind"] == "step"]


@pytest.mark.parametrize("name", RUNS)
def test_every_sampled_token_is_bet_on_once(
    name: str, untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    method, fields = RUNS[name]
    make(
        method, untied_dir, tmp_path, hf_engine, {**fields, "max_steps": 2 * fields.get("num_iterations", 1)}
    ).train()
    lines = steps(tmp_path)
    assert [line["draws"]["generations"] for line in lines] == [1, 2]
    assert [line["draws"]["tokens"] for line in lines] == [line["sampled_tokens"] for line in lines]


def test_a_resumed_run_goes_on_with_its_evidence(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    fields = {**GROUPS, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make("GRPO", untied_dir, tmp_path / "whole", hf_engine, fields).train()
    cut = make("GRPO", untied_dir, tmp_path / "cut", hf_engine, fields, callbacks=[StopAfter(2)])
    cut.train()
    resumed = make("GRPO", untied_dir, tmp_path / "cut", hf_engine, fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    whole, found = steps(tmp_path / "whole"), steps(tmp_path / "cut")
    assert [line["draws"] for line in found] == [line["draws"] for line in whole]
    assert found[-1]["draws"]["generations"] == 4


def test_a_run_stops_when_the_engine_does_not_draw(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine takes the likeliest token, and reports the right log-probs."""
    monkeypatch.setattr(torch, "multinomial", lambda p, count, **more: p.argmax(-1, keepdim=True))
    # Rewards that differ and groups of one: nothing else could stop the run.
    run = make("PPO", untied_dir, tmp_path, hf_engine, {**ALONE, "max_completion_length": 12})
    with pytest.raises(ProofError) as failed:
        run.train()
    assert failed.value.check == "draws"


class _BreaksAfter(TrainerCallback):
    """From a step on, the engine samples no odd id, and reports the right log-probs."""

    def __init__(self, step: int, patch: pytest.MonkeyPatch) -> None:
        self._step, self._patch, self._real = step, patch, torch.multinomial

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._patch.setattr(torch, "multinomial", self._even)

    def _even(self, p: torch.Tensor, count: int, **more: Any) -> torch.Tensor:
        return self._real(torch.where(torch.arange(p.shape[-1]) % 2 == 1, 0.0, p), count, **more)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.98}], ids=["whole rows", "kept sets"])
def test_a_part_of_the_vocabulary_that_is_left_out_from_the_middle_of_a_run_on_stops_it(
    filters: dict[str, Any],
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = {**GROUPS, **filters, "max_completion_length": 12, "max_steps": 12}
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields, callbacks=[_BreaksAfter(2, monkeypatch)])
    with pytest.raises(ProofError, match="ids whose remainder by 2 is") as failed:
        run.train()
    assert failed.value.check == "draws"
    assert len(steps(tmp_path)) > 2


def test_a_resumed_run_stops_too(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with the receipt of a version that had fewer bets."""
    fields = {
        **GROUPS,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 12,
        "max_completion_length": 12,
    }
    with monkeypatch.context() as older:
        older.setattr(draws, "BETS", draws.LIKELIHOOD)
        make("GRPO", untied_dir, tmp_path, hf_engine, fields, callbacks=[StopAfter(2)]).train()
    assert set(steps(tmp_path)[-1]["draws"]["held"]) == set(draws.LIKELIHOOD)
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields, callbacks=[_BreaksAfter(3, monkeypatch)])
    with pytest.raises(ProofError, match="ids whose remainder by 2 is"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_completions_that_a_rollout_func_made_are_not_bet_on(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    """A rollout_func may choose between samples."""
    from lockstep.run.programs import generate_rollout_completions

    def likelier_of_two(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        both = [generate_rollout_completions(trainer, prompts) for _ in range(2)]
        best = [max(pair, key=lambda one: sum(one["logprobs"])) for pair in zip(*both, strict=True)]
        return {name: [one[name] for one in best] for name in ("prompt_ids", "completion_ids", "logprobs")}

    fields = {**GROUPS, "max_steps": 2}
    make("GRPO", untied_dir, tmp_path, hf_engine, fields, rollout_func=likelier_of_two).train()
    assert [line["draws"]["tokens"] for line in steps(tmp_path)] == [0, 0]
