"""The files of a checkpoint hold the weights in memory, and the best one is that of the best evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from methods import FIELDS, PROMPTS, by_length, lora, make
from safetensors.torch import load_file, save_file

from lockstep.contract.protocol import Engine
from lockstep.errors import ProofError
from lockstep.run.trainers.checkpoints import WholeCheckpoints

SAVED = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
BEST = {**SAVED, "load_best_model_at_end": True, "metric_for_best_model": "reward"}
# The mean reward of the evaluation after each number of steps.
BY_STEP = [0.0, 1.0, 3.0, 2.0, 2.5]
HELD_OUT = PROMPTS.map(lambda row: {"prompt": row["prompt"] + " now"})


def run_of(model: str, folder: Path, engine: Engine, bf16: bool, adapter: bool, **more: Any) -> Any:
    fields = {**FIELDS["GRPO"], **SAVED, **more.pop("fields", {})}
    fields |= {"bf16": True, "use_vllm": False} if bf16 else {}
    more |= {"peft_config": lora()} if adapter else {}
    given: Any = None if bf16 else engine
    return make("GRPO", model, folder, given, fields, eval_dataset=HELD_OUT, **more)


def written(change: Any, at: int) -> Any:
    """A save that writes other weights at one step."""
    real = WholeCheckpoints._save

    def save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        real(self, output_dir, state_dict)
        if self.state.global_step == at:
            (path,) = Path(output_dir or "").glob("*model.safetensors")
            tensors = load_file(path)
            change(tensors)
            save_file(tensors, path, metadata={"format": "pt"})

    return save


def one_row(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if "up_proj" in name)
    tensors[name][0] *= 1.01


def everything_in_half_precision(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.bfloat16).to(tensor.dtype)


def two_layers_exchanged(tensors: dict[str, torch.Tensor]) -> None:
    one = next(name for name in tensors if "layers.0" in name and "up_proj" in name and "lora_A" not in name)
    other = one.replace("layers.0", "layers.1")
    tensors[one], tensors[other] = tensors[other], tensors[one]


@pytest.mark.parametrize(
    ("change", "bf16", "adapter", "at"),
    [
        (one_row, False, False, 1),
        (one_row, True, True, 3),
        (everything_in_half_precision, True, False, 2),
        (everything_in_half_precision, False, True, 1),
        (two_layers_exchanged, False, True, 3),
        (two_layers_exchanged, True, False, 2),
    ],
)
def test_a_checkpoint_of_other_weights_than_those_in_memory_gets_no_name(
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    bf16: bool,
    adapter: bool,
    at: int,
) -> None:
    monkeypatch.setattr(WholeCheckpoints, "_save", written(change, at))
    run = run_of(untied_dir, tmp_path, hf_engine, bf16, adapter)
    with pytest.raises(ProofError, match="differ from the weights in memory"):
        run.train()
    assert run.state.global_step == at
    assert not (tmp_path / f"checkpoint-{at}").exists()


def wrong_direction(run: Any) -> None:
    real = run._determine_best_metric

    def determine(metrics: dict[str, float], trial: Any) -> bool:
        run.args.greater_is_better = not run.args.greater_is_better
        try:
            return bool(real(metrics, trial))
        finally:
            run.args.greater_is_better = not run.args.greater_is_better

    run._determine_best_metric = determine


def always_the_latest(run: Any) -> None:
    real = run._determine_best_metric

    def determine(metrics: dict[str, float], trial: Any) -> bool:
        run.state.best_metric = None
        return bool(real(metrics, trial))

    run._determine_best_metric = determine


def of_one_step_before(run: Any) -> None:
    real = run._load_best_model

    def load() -> None:
        best = Path(run.state.best_model_checkpoint)
        run.state.best_model_checkpoint = str(best.with_name(f"checkpoint-{run.state.best_global_step - 1}"))
        run.state.best_global_step -= 1
        real()

    run._load_best_model = load


def nothing_is_loaded(run: Any) -> None:
    run.model.load_state_dict = lambda *given, **named: torch.nn.modules.module._IncompatibleKeys([], [])


def rewards(by_step: list[float]) -> Any:
    """A reward that follows the number of steps: the evaluations' means are those of the list."""

    def reward(completion_ids: list[list[int]], trainer_state: Any, **more: Any) -> list[float]:
        spread = by_length(completion_ids, **more)
        return [by_step[min(trainer_state.global_step, len(by_step) - 1)] + 1e-6 * one for one in spread]

    return reward


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.release)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fault", [wrong_direction, always_the_latest, of_one_step_before, nothing_is_loaded])
def test_a_wrong_best_checkpoint_stops_the_run(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, fault: Any, bf16: bool
) -> None:
    run = run_of(untied_dir, tmp_path, hf_engine, bf16, False, fields=BEST, reward_funcs=rewards(BY_STEP))
    fault(run)
    said = r"best checkpoint is said to be|differ from checkpoint-2 after it was loaded"
    with pytest.raises(ProofError, match=said):
        run.train()


@pytest.mark.parametrize(("adapter", "greater"), [(False, True), (True, False)])
def test_the_best_checkpoint_is_loaded_and_proven(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, adapter: bool, greater: bool
) -> None:
    fields = {**BEST, "greater_is_better": greater}
    run = run_of(
        untied_dir, tmp_path, hf_engine, False, adapter, fields=fields, reward_funcs=rewards(BY_STEP)
    )
    run.train()
    assert run.state.best_global_step == (2 if greater else 1)
