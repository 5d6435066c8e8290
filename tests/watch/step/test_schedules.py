"""Every schedule of transformers runs under the proof of its rates, or a sentence refuses it before a model loads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import methods
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import GROUPS, PROMPTS
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

import lockstep
from lockstep.contract.protocol import Engine
from lockstep.definitions.optimizer import PlateauSchedule
from lockstep.errors import InputError, ProofError
from lockstep.watch.optimizer_rules import Rates
from lockstep.watch.optimizer_settings import OptimizerSettings, Taken

# Arguments without which transformers cannot make a schedule.
NEEDED: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 2},
}
BY_METRIC = ("reduce_lr_on_plateau", "greedy")


@pytest.mark.parametrize("name", [kind.value for kind in SchedulerType])
def test_every_schedule_of_transformers_keeps_its_rates(name: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2)
    kwargs = {**NEEDED.get(name, {}), **({"mode": "max", "patience": 0} if name in BY_METRIC else {})}
    scheduler = get_scheduler(name, optimizer, 2, 20, kwargs or None)
    settings = OptimizerSettings(optimizer, scheduler, {parameter: "w"}, lambda _: {}, Taken(None, []))
    by_metric = name in BY_METRIC
    formula = PlateauSchedule(kwargs, [1e-2]) if name == "reduce_lr_on_plateau" else None
    rates = Rates(scheduler, None if kwargs else name, 2, 20, 0, settings, 0 if by_metric else None, formula)
    for step in range(9):
        assert rates.at(step) == pytest.approx([optimizer.param_groups[0]["lr"]])
        optimizer.step()
        if not by_metric:
            scheduler.step()
        elif step % 2:
            rates.before_metric()
            scheduler.step(1.0)
            rates.after_metric(1.0)
    optimizer.param_groups[0]["lr"] *= 1.01
    with pytest.raises(ProofError, match="the optimizer has a learning rate of"):
        rates.at(9)


METRICS = st.lists(st.floats(-3, 3) | st.sampled_from([0.0, 1.0, math.nan]), min_size=1, max_size=25)


@given(
    METRICS,
    st.sampled_from(["min", "max"]),
    st.sampled_from(["rel", "abs"]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([0.0, 2e-3]),
)
def test_the_formula_of_a_plateau_is_that_of_torch(
    metrics: list[float], mode: Any, kind: Any, patience: int, cooldown: int, lowest: float
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    asked = {
        "mode": mode,
        "threshold_mode": kind,
        "patience": patience,
        "cooldown": cooldown,
        "min_lr": lowest,
    }
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, **asked)
    ours = PlateauSchedule({**asked, "factor": 0.5}, [1e-2])
    for metric in metrics:
        theirs.step(metric)
        ours.after(metric)
        assert ours.rates == [optimizer.param_groups[0]["lr"]]


def plateau(untied_dir: str, folder: Path, engine: Engine, **fields: Any) -> Any:
    """The reward never rises by 100, so that the rate is halved at every evaluation but the first."""
    never = {"patience": 0, "factor": 0.5, "threshold": 100.0, "threshold_mode": "abs"}
    given = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": never,
        "num_generations_eval": 1,
    }
    when = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 3,
    }
    held_out = PROMPTS.select([0, 1])
    return methods.make(
        "GRPO", untied_dir, folder, engine, {**GROUPS, **given, **when, **fields}, eval_dataset=held_out
    )


def rates_of(run: Any) -> list[float]:
    return [log["learning_rate"] for log in run.state.log_history if "loss" in log]


def test_a_plateau_halves_the_rate_by_its_metric_and_a_resumed_run_goes_on(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = plateau(untied_dir, tmp_path, hf_engine)
    run.train()
    assert run.lr_scheduler.mode == "max"
    again = plateau(untied_dir, tmp_path, hf_engine, max_steps=5)
    again.train(resume_from_checkpoint=True)
    # The log stands before the evaluation of its step.
    assert rates_of(again) == pytest.approx([1e-2, 1e-2, 5e-3, 2.5e-3, 1.25e-3])


def test_a_plateau_that_takes_another_metric_takes_no_step(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.optim.lr_scheduler.ReduceLROnPlateau.step
    monkeypatch.setattr(
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        "step",
        lambda self, metric, epoch=None: real(self, metric + 1e6 * self.last_epoch, epoch),
    )
    with pytest.raises(ProofError, match=r"a learning rate of 0\.01 in step 3; the schedule gives 0\.005"):
        plateau(untied_dir, tmp_path, hf_engine).train()


def test_a_rate_that_a_callback_sets_is_where_a_plateau_goes_on(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = plateau(untied_dir, tmp_path, hf_engine, max_steps=4)

    class Sets(methods.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                run.optimizer.param_groups[0]["lr"] = 8e-3

    run.add_callback(Sets())
    run.train()
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_a_long_warm_up_of_a_run_whose_length_its_data_decide_is_taken(tmp_path: Path) -> None:
    lockstep.GRPOConfig(
        output_dir=str(tmp_path),
        lr_scheduler_type="polynomial",
        warmup_steps=1000,
        num_train_epochs=9,
        bf16=False,
    )


@pytest.mark.parametrize("name", [kind.value for kind in SchedulerType])
def test_a_schedule_that_cannot_be_made_is_a_sentence(tmp_path: Path, name: str) -> None:
    fields: dict[str, Any] = {"output_dir": str(tmp_path), "lr_scheduler_type": name, "bf16": False}
    if name in BY_METRIC:
        fields |= {"eval_strategy": "steps", "eval_steps": 2}
    needed = NEEDED.get(name)
    if needed:
        with pytest.raises(
            InputError, match=f"lr_scheduler_type={name} cannot be used: .*lr_scheduler_kwargs"
        ):
            lockstep.GRPOConfig(**fields)
        # YAML reads 1e-7 as text.
        text = {key: str(value) for key, value in needed.items()}
        with pytest.raises(InputError, match=r"cannot be used: .* without quotation marks"):
            lockstep.GRPOConfig(**fields, lr_scheduler_kwargs=text)
    lockstep.GRPOConfig(**fields, lr_scheduler_kwargs=needed)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"optim_args": "momentum=fast"},
            "optim=sgd with optim_args=momentum=fast cannot be used: ValueError: could not",
        ),
        ({"optim_args": "momentum=-1"}, "cannot be used: ValueError: Invalid momentum"),
        ({"optim_args": "momentum"}, "cannot be used: ValueError: not enough values"),
        ({"optim": "galore_adamw"}, "optim=galore_adamw cannot be used: ImportError: .*galore_torch"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused_before_a_model_is_loaded(
    fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=says):
        lockstep.GRPOConfig(
            output_dir=str(tmp_path), bf16=False, use_vllm=False, **{"optim": "sgd", **fields}
        )
