"""The reference and the frozen weights stay as they are, and the reference's log-probs are those of a plain forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import methods
import pytest
import torch
from methods import ALONE, GROUPS, PAIRS, lora
from transformers import TrainerCallback

from lockstep.contract.protocol import Engine
from lockstep.errors import ProofError
from lockstep.learn import generation
from lockstep.learn.generation import AllScores
from lockstep.models.policy import load_policy

KL = {**GROUPS, "beta": 0.1, "max_steps": 3}
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "GRPO": ("GRPO", KL, False),
    "GRPO, several steps per generation": ("GRPO", {**KL, "num_iterations": 2, "max_steps": 4}, False),
    "GRPO, adapter": ("GRPO", KL, True),
    "GRPO, adapter, no KL": ("GRPO", {**KL, "beta": 0.0}, True),
    "GRPO, top-k": ("GRPO", {**KL, "top_k": 5}, False),
    "GRPO, the reference follows": ("GRPO", {**KL, "sync_ref_model": True, "ref_model_sync_steps": 1}, False),
    "PPO": ("PPO", {**ALONE, "beta": 0.1, "max_steps": 3}, False),
    "Online DPO": ("OnlineDPO", {**PAIRS, "max_steps": 3}, False),
}
Make = Callable[..., Any]


@pytest.fixture
def make(untied_dir: str, hf_engine: Engine, tmp_path: Path) -> Make:
    def made(case: str = "GRPO", **arguments: Any) -> Any:
        method, fields, adapted = CASES[case]
        return methods.make(
            method,
            untied_dir,
            tmp_path,
            hf_engine,
            fields,
            **({"peft_config": lora()} if adapted else {}),
            **arguments,
        )

    return made


@pytest.mark.parametrize("case", CASES)
def test_a_clean_run_passes_and_looks_at_frozen_weights_in_each_generation(make: Make, case: str) -> None:
    run = make(case)
    run.train()
    assert run.watch.frozen is not None
    assert len(run.watch.frozen.digests) > 20


class AtStep(TrainerCallback):
    """Does something after the first step."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            with torch.no_grad():
                self._work()


@pytest.mark.parametrize("case", ["GRPO", "GRPO, adapter", "GRPO, adapter, no KL"])
def test_a_frozen_weight_that_moves_stops_the_run_and_is_named(make: Make, case: str) -> None:
    run = make(case)
    frozen = methods.reference_of(run) or run.model
    name, moved = next(
        (n, p) for n, p in frozen.named_parameters() if "down_proj" in n and not p.requires_grad
    )
    run.add_callback(AtStep(lambda: moved[0, :4].mul_(1.01)))
    with pytest.raises(ProofError, match=rf"have changed before version 1, (reference\.)?{name} among them"):
        run.train()


def test_an_adapter_that_is_merged_into_its_base_stops_the_run(make: Make) -> None:
    run = make("GRPO, adapter")

    def merge() -> None:
        # The delta goes into the base and stays in the adapter too.
        for module in run.model.modules():
            if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer"):
                module.base_layer.weight += module.get_delta_weight("default")

    run.add_callback(AtStep(merge))
    with pytest.raises(ProofError, match="frozen tensors have changed before version 1"):
        run.train()


def test_a_reference_that_is_the_policy_itself_is_refused(make: Make, untied_dir: str) -> None:
    run = make()
    for path, module in run.model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(run.reference.own.get_submodule(path), name, parameter)
    with pytest.raises(ProofError, match="are the trained tensors themselves"):
        run.train()
    # A reference with the same values in memory of its own is the usual case.
    assert make(ref_model=load_policy(untied_dir)).train()


def rolled(scores: AllScores) -> AllScores:
    """Each sequence gets the next one's log-probs, cut or repeated to its own length."""
    names = list(scores.logps)
    return replace(
        scores,
        logps={
            name: torch.tensor(scores.logps[other]).repeat(9)[: len(scores.logps[name])].numpy()
            for name, other in zip(names, [*names[1:], names[0]], strict=True)
        },
    )


def scaled(scores: AllScores) -> AllScores:
    return replace(scores, logps={name: values * 1.05 for name, values in scores.logps.items()})


@pytest.mark.parametrize("change", [rolled, scaled])
@pytest.mark.parametrize("case", ["GRPO", "GRPO, adapter", "GRPO, top-k", "PPO"])
def test_log_probs_of_other_tokens_or_another_size_are_refused(make: Make, case: str, change: Any) -> None:
    honest = generation.score_all

    def otherwise(*given: Any, measure: bool) -> AllScores:
        found = honest(*given, measure=measure)
        return found if measure else change(found)

    with (
        patch.object(generation, "score_all", otherwise),
        pytest.raises(ProofError, match="differ from a plain forward of the reference"),
    ):
        make(case).train()
