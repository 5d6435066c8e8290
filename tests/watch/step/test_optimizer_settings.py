"""The optimizer is set as the config says and holds what the checkpoint gave.

What a callback of the user's changes is taken.

CI runs one row of each matrix per kind of comparison. Others are faults of `lockstep verify --self-test` too (U12 to
U13b).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import methods
import pytest
import torch
from portions import portion
from transformers import (
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    MixtralConfig,
    Olmo2Config,
    PretrainedConfig,
    Qwen3Config,
    Trainer,
    TrainerCallback,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.training_args import OptimizerNames

from lockstep.contract.protocol import Engine
from lockstep.definitions import optimizer as definition
from lockstep.errors import ProofError
from lockstep.watch.receipt import RECEIPT, read_receipt

SAVES = {**methods.GROUPS, "save_strategy": "steps", "save_steps": 1}
Make = Callable[..., Any]
Change = Callable[[torch.optim.Optimizer], Any]


@pytest.fixture
def make(untied_dir: str, hf_engine: Engine) -> Make:
    def made(
        folder: Path, arguments: dict[str, Any] | None = None, method: str = "GRPO", **fields: Any
    ) -> Any:
        fields = {**SAVES, "max_steps": 3, **({"num_generations": 1} if method == "PPO" else {}), **fields}
        given = {"model": untied_dir, **(arguments or {})}
        return methods.make(method, given.pop("model"), folder, hf_engine, fields, **given)

    return made


@pytest.fixture(scope="module")
def stopped(untied_dir: str, hf_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two steps, which only settings and data of `make` can go on with."""
    folder = tmp_path_factory.mktemp("stopped")
    methods.make("GRPO", untied_dir, folder, hf_engine, {**SAVES, "max_steps": 2}).train()
    return folder


def resume(run: Any, folder: Path, step: int) -> None:
    run.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))


def sets(**values: Any) -> Change:
    """Sets settings of the first group."""
    return lambda optimizer: optimizer.param_groups[0].update(values)


def exchanges(key: str) -> Change:
    """Exchanges a part of the state of two tensors of one shape."""

    def change(optimizer: torch.optim.Optimizer) -> None:
        first, second = [s for p, s in optimizer.state.items() if p.shape == (64, 64)][:2]
        first[key], second[key] = second[key], first[key]

    return change


def counts_on(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] += 1


def at_step(run: Any, step: int, change: Change) -> None:
    """Change the optimizer in the middle of a step, outside of all callbacks."""
    real = run.training_step

    def training_step(*given: Any, **named: Any) -> Any:
        if run.state.global_step == step:
            change(run.optimizer)
        return real(*given, **named)

    run.training_step = training_step


class Changing(TrainerCallback):
    """A callback of the user's that changes the optimizer at an event of one step."""

    def __init__(self, change: Change, event: str = "on_step_begin", step: int = 1) -> None:
        def called(args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            if state.global_step == step:
                change(optimizer)

        setattr(self, event, called)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_receipt(folder / RECEIPT) if entry["kind"] == "optimizer"]


# ---- the second reading of the config
# -----------------------------------------------------------------------------------------


SMALL: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16, "num_hidden_layers": 1}
FAMILIES: list[PretrainedConfig] = [
    GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=16),
    BloomConfig(hidden_size=8, n_head=2, n_layer=1, vocab_size=16),
    *(kind(**SMALL, head_dim=4, num_key_value_heads=2) for kind in (Qwen3Config, Gemma2Config, Olmo2Config)),
    MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2),
]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_the_tensors_with_a_weight_decay_are_those_of_transformers(config: PretrainedConfig) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    decaying = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    wanted = definition.optimizer_fields({**vars(methods_config()), "weight_decay": 0.1})
    modules = dict(model.named_modules())
    for name, _ in model.named_parameters():
        inside = isinstance(modules[name.rpartition(".")[0]], torch.nn.LayerNorm)
        found = wanted.of(name, in_layer_norm=inside)
        assert found["weight_decay"] == (0.1 if name in decaying else 0.0), name


def methods_config() -> Any:
    import lockstep

    return lockstep.GRPOConfig(output_dir="unused", bf16=False)


def test_the_definition_names_optimizers_that_transformers_has() -> None:
    known = {member.value for member in OptimizerNames}
    assert {*definition.ADAMW, *definition.LION, *definition.OTHERS} <= known


# ---- faults at the start
# ------------------------------------------------------------------------------------------------------

AT_START: dict[str, tuple[Change, str]] = {
    "weight decay": (sets(weight_decay=10.0), r"weight_decay of model\.\S+ is 10\.0; the config gives 0\.0"),
    "betas": (
        sets(betas=(0.999, 0.9)),
        r"betas of model\.\S+ is \[0\.999, 0\.9\]; the config gives \[0\.9, 0\.999\]",
    ),
    "eps": (sets(eps=1e-3), r"eps of model\.\S+ is 0\.001; the config gives 1e-08"),
    "maximize": (sets(maximize=True), r"maximize of model\.\S+ is True; the config gives False"),
}


@pytest.mark.parametrize("what", portion(AT_START, lambda what: what == "weight decay"))
def test_an_optimizer_that_is_made_with_other_settings_takes_no_step(
    make: Make, tmp_path: Path, what: str
) -> None:
    change, said = AT_START[what]
    run = make(tmp_path)
    real = run.create_optimizer

    def otherwise(*given: Any) -> Any:
        optimizer = real(*given)
        change(optimizer)
        return optimizer

    with patch.object(run, "create_optimizer", otherwise), pytest.raises(ProofError, match=said):
        run.train()
    assert run.state.global_step == 0


def test_norms_that_decay_are_named(make: Make, tmp_path: Path) -> None:
    run = make(tmp_path, weight_decay=0.1)
    every = [name for name, _ in run.model.named_parameters()]
    with (
        patch.object(run, "get_decay_parameter_names", lambda model: every),
        pytest.raises(
            ProofError, match=r"weight_decay of model\.\S*(norm\.weight|bias) is 0\.1; the config gives 0\.0"
        ),
    ):
        run.train()


def test_the_value_head_has_its_own_rate_and_no_decay(make: Make, tmp_path: Path) -> None:
    run = make(tmp_path, method="PPO", weight_decay=0.1, value_learning_rate=0.05, max_steps=1)
    run.train()
    run = make(tmp_path / "other", method="PPO", weight_decay=0.1, max_steps=1)
    real = run.create_optimizer

    def otherwise(*given: Any) -> Any:
        optimizer = real(*given)
        optimizer.param_groups[-1]["weight_decay"] = 0.1
        return optimizer

    with (
        patch.object(run, "create_optimizer", otherwise),
        pytest.raises(ProofError, match=r"weight_decay of value_head\.weight is 0\.1; the config gives 0\.0"),
    ):
        run.train()


def test_a_config_that_changes_after_the_trainer_was_made_is_refused(make: Make, tmp_path: Path) -> None:
    run = make(tmp_path)
    run.args.weight_decay = 0.1
    with pytest.raises(ProofError, match=r"weight_decay of \S+ is 0\.1; the config gives 0\.0"):
        run.train()


def test_a_new_optimizer_that_holds_moments_is_refused(make: Make, tmp_path: Path) -> None:
    run = make(tmp_path)
    real = run.create_scheduler

    def otherwise(*given: Any, **named: Any) -> Any:
        head = run.model.lm_head.weight
        run.optimizer.state[head] = {"step": torch.tensor(5.0), "exp_avg": head * 0, "exp_avg_sq": head * 0}
        return real(*given, **named)

    with (
        patch.object(run, "create_scheduler", otherwise),
        pytest.raises(ProofError, match=r"already holds moments of lm_head\.weight \(1 of"),
    ):
        run.train()


# ---- faults in the middle
# -----------------------------------------------------------------------------------------------------

IN_THE_MIDDLE: dict[str, tuple[Change, str]] = {
    "weight decay": (sets(weight_decay=10.0), r"weight_decay of model\S+ and \d+ more is 10\.0 and was 0\.0"),
    "betas": (sets(betas=(0.5, 0.5)), r"betas of .* is \[0\.5, 0\.5\] and was \[0\.9, 0\.999\]"),
    "groups": (
        lambda optimizer: optimizer.param_groups.pop(),
        "the optimizer has 1 groups of tensors, and had 2",
    ),
    "moments": (exchanges("exp_avg"), "changed by .* where AdamW changes it by"),
    "step counts": (counts_on, "changed by .* where AdamW changes it by|as the number of steps of"),
}


@pytest.mark.parametrize("what", portion(IN_THE_MIDDLE, lambda what: what in ("weight decay", "groups")))
def test_what_changes_outside_of_callbacks_stops_the_same_step(make: Make, tmp_path: Path, what: str) -> None:
    change, said = IN_THE_MIDDLE[what]
    run = make(tmp_path)
    at_step(run, 2, change)
    with pytest.raises(ProofError, match=said):
        run.train()
    assert run.state.global_step == 2


def test_a_setting_that_the_step_itself_changes_is_named(make: Make, tmp_path: Path) -> None:
    run, real = make(tmp_path), torch.optim.AdamW.step

    def step(self: Any, closure: Any = None) -> None:
        sets(weight_decay=10.0)(self)
        real(self)

    with (
        patch.object(torch.optim.AdamW, "step", step),
        pytest.raises(ProofError, match=r"weight_decay of .* is 10\.0 and was 0\.0"),
    ):
        run.train()


@pytest.mark.parametrize("change", [exchanges("exp_avg_sq"), counts_on], ids=["moments", "step counts"])
def test_a_state_that_changes_before_a_checkpoint_is_not_saved(
    make: Make, tmp_path: Path, change: Change
) -> None:
    """After the last step no other step would see it, and the checkpoint's digests would be of the wrong state."""
    run = make(tmp_path)
    run.add_callback(Changing(change, "on_step_end", step=3))
    with pytest.raises(ProofError, match=r"have changed since the last optimizer step: (exp_avg_sq|step) of"):
        run.train()
    assert not (tmp_path / "checkpoint-3").exists()


# ---- faults after a resume
# ----------------------------------------------------------------------------------------------------

AFTER_LOADING: dict[str, tuple[Change, str]] = {
    "moments": (exchanges("exp_avg"), "changed since the checkpoint was loaded: exp_avg of"),
    "step counts": (counts_on, "changed since the checkpoint was loaded: step of"),
    "weight decay": (sets(weight_decay=10.0), r"weight_decay of \S+ is 10\.0; the config gives 0\.0"),
    "betas": (sets(betas=(0.999, 0.9)), r"betas of \S+ is \[0\.999, 0\.9\]; the config gives"),
}


@pytest.mark.parametrize("what", portion(AFTER_LOADING, lambda what: what in ("moments", "weight decay")))
def test_what_changes_between_the_load_and_the_first_step_is_found(
    make: Make, stopped: Path, tmp_path: Path, what: str
) -> None:
    change, said = AFTER_LOADING[what]
    run = make(tmp_path)
    with (
        patch.object(run, "_load_scaler", lambda checkpoint: change(run.optimizer)),
        pytest.raises(ProofError, match=said),
    ):
        resume(run, stopped, 2)
    assert run.state.global_step == 2


def test_the_moments_of_an_optimizer_without_a_rule_are_compared_too(make: Make, tmp_path: Path) -> None:
    fields = {"optim": "sgd", "optim_args": "momentum=0.9"}
    make(tmp_path, **fields, max_steps=2).train()
    run = make(tmp_path, **fields)
    run.add_callback(Changing(exchanges("momentum_buffer"), "on_train_begin", step=2))
    with pytest.raises(ProofError, match="changed since the checkpoint was loaded: momentum_buffer of"):
        resume(run, tmp_path, 2)


# ---- what is taken
# ------------------------------------------------------------------------------------------------------------


def test_what_a_callback_changes_is_taken_written_and_kept_after_a_resume(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The value goes into the proof of the step: without it, the step would have changed weights in another way."""
    run = make(tmp_path)
    run.add_callback(Changing(sets(weight_decay=5.0, betas=(0.5, 0.6))))
    run.train()
    (line,) = lines(tmp_path)
    assert line["step"] == 2
    assert [(c["field"], c["before"], c["after"]) for c in line["changes"]] == [
        ("weight_decay", 0.0, 5.0),
        ("betas", [0.9, 0.999], [0.5, 0.6]),
    ]
    assert {c["by"] for c in line["changes"]} == {"callback Changing (on_step_begin)"}
    assert "callback Changing (on_step_begin) has changed the optimizer: weight_decay from 0.0 to 5.0" in (
        capsys.readouterr().out
    )
    again = make(tmp_path, max_steps=4)
    resume(again, tmp_path, 3)
    assert again.optimizer.param_groups[0]["weight_decay"] == 5.0
    # From a checkpoint of before the change, it is not there.
    again = make(tmp_path, max_steps=4)
    resume(again, tmp_path, 1)
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.0
    assert lines(tmp_path) == []


def test_after_a_resume_a_value_that_the_receipt_does_not_have_is_named(make: Make, tmp_path: Path) -> None:
    run = make(tmp_path, max_steps=2)
    run.add_callback(Changing(sets(weight_decay=5.0)))
    run.train()
    run = make(tmp_path)
    with (
        patch.object(run, "_load_scaler", lambda checkpoint: sets(weight_decay=0.0)(run.optimizer)),
        pytest.raises(ProofError, match=r"weight_decay of \S+ and 15 more is 0\.0; the receipt gives 5\.0"),
    ):
        resume(run, tmp_path, 2)


EVENTS = ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log", "on_save"]


def test_changes_are_taken_at_every_event_and_a_resumed_run_begins_with_those_of_its_checkpoint(
    make: Make, tmp_path: Path
) -> None:
    """What comes after the optimizer's step does not count for it; what comes after a checkpoint is not in it."""
    begins = Changing(sets(weight_decay=0.5), "on_train_begin", step=0)
    before = [Changing(sets(weight_decay=1.0 + n), event) for n, event in enumerate(EVENTS)]
    run = make(tmp_path, {"callbacks": [begins, *before]}, max_steps=2)
    for n, event in enumerate(EVENTS):
        run.add_callback(Changing(sets(weight_decay=11.0 + n), event))
    run.train()
    at = {
        step: [c["after"] for e in lines(tmp_path) if e["step"] == step for c in e["changes"]]
        for step in (1, 2)
    }
    assert at == {1: [0.5, 4.0, 14.0, 5.0, 15.0], 2: [6.0, 16.0, 1.0, 11.0, 2.0, 12.0, 3.0, 13.0]}
    found: list[float] = []
    for step in (2, 1):
        again = make(tmp_path, max_steps=3)
        again.add_callback(
            Changing(lambda o: found.append(o.param_groups[0]["weight_decay"]), "on_train_begin", step)
        )
        resume(again, tmp_path, step)
    assert found == [13.0, 15.0]


def test_a_learning_rate_that_a_callback_sets_counts_until_the_schedule_sets_the_next(
    make: Make, tmp_path: Path
) -> None:
    run = make(tmp_path, lr_scheduler_type="linear", max_steps=4)
    for step, event in enumerate(("on_step_begin", "on_pre_optimizer_step", "on_step_end"), start=1):
        run.add_callback(Changing(sets(lr=0.5**step), event, step))
    run.train()
    taken = [(c["field"], c["after"]) for line in lines(tmp_path) for c in line["changes"]]
    assert taken == [("lr", 0.5), ("lr", 0.25), ("lr", 0.125)]
    assert run.optimizer.param_groups[0]["lr"] == 0.0
    # The last of them is still to come in the checkpoint of step 3. The others are over in their checkpoints.
    for step in (3, 2):
        resume(make(tmp_path, lr_scheduler_type="linear", max_steps=4), tmp_path, step)


def test_an_optimizer_of_the_users_is_taken_as_it_is_and_changed_as_they_like(
    make: Make, tmp_path: Path, untied_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def given() -> dict[str, Any]:
        model = AutoModelForCausalLM.from_pretrained(untied_dir)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.8, 0.9), weight_decay=0.3)
        return {"model": model, "optimizers": (optimizer, None)}

    run = make(tmp_path, given())
    at_step(run, 1, sets(weight_decay=0.4, lr=2e-3))
    run.train()
    first, *later = lines(tmp_path)
    assert "the optimizer was given by the program" in capsys.readouterr().out
    assert [first["given"][0][name] for name in ("betas", "weight_decay")] == [[0.8, 0.9], 0.3]
    assert {c["field"]: c["after"] for line in later for c in line["changes"]} == {
        "weight_decay": 0.4,
        "lr": 2e-3,
    }
    again = make(tmp_path, given(), max_steps=4)
    resume(again, tmp_path, 3)
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.4
    run = make(tmp_path, given(), max_steps=5)
    with (
        patch.object(run, "_load_scaler", lambda checkpoint: sets(weight_decay=10.0)(run.optimizer)),
        pytest.raises(ProofError, match=r"weight_decay of \S+ and \d+ more is 10\.0; the receipt gives 0\.4"),
    ):
        resume(run, tmp_path, 4)


def test_an_optimizer_that_the_program_makes_before_training_is_its_own(make: Make, tmp_path: Path) -> None:
    run = make(tmp_path)
    run.create_optimizer()
    sets(weight_decay=0.2)(run.optimizer)
    run.train()
    (line,) = lines(tmp_path)
    assert line["given"][0]["weight_decay"] == 0.2


def test_a_subclass_that_makes_its_optimizer_gives_it(make: Make, tmp_path: Path) -> None:
    import lockstep

    class Own(lockstep.GRPOTrainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            super().create_optimizer(model)
            sets(weight_decay=0.2)(self.optimizer)
            return self.optimizer

    with patch.object(lockstep, "GRPOTrainer", Own):
        make(tmp_path).train()
    (line,) = lines(tmp_path)
    assert line["given"][0]["weight_decay"] == 0.2


def test_a_config_that_changes_between_two_runs_acts_where_that_was_asked_for(
    make: Make, tmp_path: Path
) -> None:
    run = make(tmp_path, max_steps=2, learning_rate=1e-3)
    run.add_callback(Changing(sets(weight_decay=5.0)))
    run.train()
    again = make(tmp_path, weight_decay=0.1, adam_beta2=0.9, learning_rate=2e-3, resume_with_changes=True)
    resume(again, tmp_path, 2)
    first, second = again.optimizer.param_groups
    assert (first["weight_decay"], second["weight_decay"], first["betas"]) == (0.1, 0.0, (0.9, 0.9))
    assert first["initial_lr"] == 2e-3
    # It goes on so.
    once_more = make(
        tmp_path, weight_decay=0.1, adam_beta2=0.9, learning_rate=2e-3, max_steps=4, resume_with_changes=True
    )
    resume(once_more, tmp_path, 3)
    assert once_more.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_second_training_goes_on_with_what_the_first_has_taken(make: Make, tmp_path: Path) -> None:
    run = make(tmp_path, max_steps=2)
    run.add_callback(Changing(sets(weight_decay=5.0)))
    run.train()
    run.train()
    (line,) = lines(tmp_path)
    assert [(c["before"], c["after"]) for c in line["changes"]] == [(0.0, 5.0)]
