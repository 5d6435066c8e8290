"""Checkpoints of families whose saved weights have other names, or are cut in other parts, than the model's own.

They are loaded when a run goes on and when the best checkpoint is chosen. `transformers.Trainer` would leave them out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import start
from datasets import Dataset
from methods import GROUPS, PROMPTS, StopAfter, make, parameters
from model_families import save_family
from safetensors.torch import load_file, save_file
from seeing import mixed_rows, save_seeing

from lockstep.errors import InputError
from lockstep.models.policy import load_policy, load_renamed

SAVES = {**GROUPS, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}


@pytest.fixture(scope="module", params=["experts", "pictures"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    """The model's directory, its engine, and its data."""
    folder = tmp_path_factory.mktemp("models") / request.param
    if request.param == "experts":
        return (path := save_family("mixtral", folder)), start("transformers", path), PROMPTS
    return (path := save_seeing(folder)), start("transformers", path), Dataset.from_list(mixed_rows())


def run_of(family: tuple[str, Any, Any], folder: Path, **fields: Any) -> Any:
    model, engine, data = family
    return make("GRPO", model, folder, engine, {**SAVES, **fields}, train_dataset=data, eval_dataset=data)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    family: tuple[str, Any, Any], tmp_path: Path
) -> None:
    whole = run_of(family, tmp_path / "whole")
    whole.train()
    stopped = run_of(family, tmp_path / "cut")
    stopped.add_callback(StopAfter(1))
    stopped.train()
    resumed = run_of(family, tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert same(parameters(resumed.model), parameters(whole.model))


def test_the_best_checkpoint_is_in_the_model_at_the_end(family: tuple[str, Any, Any], tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "reward", "eval_strategy": "steps"}
    run = run_of(family, tmp_path, eval_steps=1, **best)
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def evaluate(*_: Any, **__: Any) -> dict[str, float]:
        kept[run.state.global_step] = parameters(run.model)
        return {"eval_reward": -float(run.state.global_step)}

    run.evaluate = evaluate
    run.train()
    assert not same(kept[1], kept[2])
    assert same(parameters(run.model), kept[1])


def test_weights_that_the_files_lack_are_refused_by_name(
    family: tuple[str, Any, Any], tmp_path: Path
) -> None:
    model, _, _ = family
    policy = load_policy(model)
    policy.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks? .*lm_head\.weight"):
        load_renamed(policy, tmp_path)
