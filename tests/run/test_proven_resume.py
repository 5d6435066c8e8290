"""A run goes on only with the state, data, rewards and settings of its stop, or says what has changed."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import methods
import pytest
import tiny
import torch
from datasets import Dataset
from methods import GROUPS, PROMPTS, lora
from portions import portion
from safetensors.torch import load_file, save_file
from transformers import Trainer

import lockstep
from lockstep.contract.protocol import Engine
from lockstep.errors import InputError, ProofError
from lockstep.models.policy import load_policy
from lockstep.run.trainers import checkpoints as whole_checkpoints
from lockstep.watch.receipt import RECEIPT, check_receipt, read_receipt

SAVES = {**GROUPS, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
Make = Callable[..., Any]


@pytest.fixture
def make(untied_dir: str, hf_engine: Engine) -> Make:
    def made(folder: Path, arguments: dict[str, Any] | None = None, **fields: Any) -> Any:
        return methods.make("GRPO", untied_dir, folder, hf_engine, {**SAVES, **fields}, **(arguments or {}))

    return made


def resume(run: Any, folder: Path, step: int = 2) -> None:
    run.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))


def optimizer_moves(trainer: Trainer) -> None:
    for state in trainer.optimizer.state.values():
        state["exp_avg"].mul_(1.01)


def one_weight_moves(trainer: Trainer) -> None:
    with torch.no_grad():
        next(trainer.model.parameters()).view(-1)[3] += 1e-3


def the_schedule_restarts(trainer: Trainer) -> None:
    trainer.lr_scheduler.last_epoch = 0


AFTER_LOADING = {
    "optimizer.exp_avg of policy.": optimizer_moves,
    r"policy\..*embed_tokens": one_weight_moves,
    "the schedule": the_schedule_restarts,
}


@pytest.mark.parametrize("named", AFTER_LOADING)
def test_what_is_in_memory_after_loading_is_what_was_in_memory_when_it_was_saved(
    make: Make, tmp_path: Path, named: str
) -> None:
    make(tmp_path).train()
    honest = Trainer._load_optimizer_and_scheduler

    def otherwise(self: Trainer, checkpoint: str | None) -> None:
        honest(self, checkpoint)
        AFTER_LOADING[named](self)

    with (
        patch.object(Trainer, "_load_optimizer_and_scheduler", otherwise),
        pytest.raises(ProofError, match=f"differ from checkpoint-2 after it was loaded: {named}"),
    ):
        resume(make(tmp_path, max_steps=3), tmp_path)


def test_an_adapter_goes_on_only_on_its_own_base_model(make: Make, tmp_path: Path, tied_dir: str) -> None:
    make(tmp_path, {"peft_config": lora()}).train()
    again = make(tmp_path, {"peft_config": lora()}, max_steps=3)
    with torch.no_grad():
        next(p for n, p in again.model.named_parameters() if "up_proj.base_layer" in n).mul_(1.01)
    with pytest.raises(ProofError, match=r"after it was loaded: policy.*up_proj\.base_layer"):
        resume(again, tmp_path)


def other_rows() -> Dataset:
    return Dataset.from_dict({"prompt": ["seven", "eight", "nine", "ten"]})


def another(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rows": ({"train_dataset": other_rows()}, {}, "train data"),
    "a column": ({"train_dataset": PROMPTS.add_column("answer", [1] * 8)}, {}, "train data"),
    "reward": ({"reward_funcs": another}, {}, "reward another, reward .*"),
    "seed": ({}, {"seed": 9}, "seed"),
    "learning rate": ({}, {"learning_rate": 0.5}, "learning_rate"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_changed_inputs_are_refused_and_taken_where_that_is_asked_for(
    make: Make, tmp_path: Path, what: str
) -> None:
    arguments, fields, named = CHANGED[what]
    make(tmp_path).train()
    with pytest.raises(InputError, match=f"these have changed since: {named}. Put the old ones back"):
        resume(make(tmp_path, arguments, **fields, max_steps=3), tmp_path)
    run = make(tmp_path, arguments, **fields, max_steps=3, resume_with_changes=True)
    resume(run, tmp_path)
    assert run.state.global_step == 3
    starts = [entry["inputs"] for entry in read_receipt(tmp_path / RECEIPT) if entry["kind"] == "start"]
    assert "changed" not in starts[0]
    assert len(starts[1]["changed"]) == named.count(",") + 1


def test_another_micro_batch_is_answered_with_the_field_that_may_change(make: Make, tmp_path: Path) -> None:
    make(tmp_path).train()
    smaller = make(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3)
    with pytest.raises(
        InputError, match=r"per_device_train_batch_size.*keep .*, and lower token_budget, which a run may"
    ):
        smaller.check_resume(str(tmp_path / "checkpoint-2"))


def other_folder(model_dir: str, folder: Path, **config: Any) -> str:
    """A copy of a model in another folder, whose config is written anew."""
    shutil.copytree(model_dir, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(dict(reversed({**json.loads(path.read_text()), **config}.items())), indent=5))
    return str(folder)


def changed_weights(model_dir: str) -> str:
    weights = load_file(f"{model_dir}/model.safetensors")
    name = next(name for name in weights if "norm" in name)
    save_file({**weights, name: weights[name] * 1.01}, f"{model_dir}/model.safetensors", {"format": "pt"})
    return model_dir


# By what differs: of the model's folder, and in the run.
MODELS: dict[str, tuple[dict[str, Any], bool, dict[str, Any], str]] = {
    "config": ({"rms_norm_eps": 1e-3}, False, {}, r"config.json \(rms_norm_eps was 1e-06, is 0.001\)"),
    "base": ({}, True, {"peft": True}, "weights of the base model"),
    "reference": ({}, True, {"beta": 0.1}, "weights of the reference model"),
    "a model given as reference": ({}, True, {"beta": 0.1, "given": True}, "weights of the reference model"),
}


# What is compared of a given reference and of one that is loaded is one function.
@pytest.mark.parametrize("what", portion(MODELS, lambda what: what in ("config", "base")))
def test_a_run_goes_on_only_with_the_model_with_which_it_began(
    untied_dir: str, tmp_path: Path, what: str
) -> None:
    """The trainer starts its own engine, so that both load the same folder."""
    config, other_weights, how, named = MODELS[what]

    def run(place: str, **fields: Any) -> Any:
        arguments: dict[str, Any] = {"peft_config": lora()} if how.get("peft") else {}
        model = place
        if how.get("given"):
            model, arguments = untied_dir, {"ref_model": load_policy(place)}
        wanted = {**SAVES, "use_vllm": False, "beta": how.get("beta", 0.0), "save_steps": 2, **fields}
        return methods.make("GRPO", model, tmp_path / "run", None, wanted, **arguments)  # type: ignore[arg-type]

    with closing(run(untied_dir)) as first:
        first.train()
    other = other_folder(untied_dir, tmp_path / "other", **config)
    if other_weights:
        changed_weights(other)
    with (
        closing(run(other, max_steps=3)) as again,
        pytest.raises(InputError, match=f"changed since: {named}. Put"),
    ):
        resume(again, tmp_path / "run")
    with closing(run(other, max_steps=3, resume_with_changes=True)) as wanted:
        resume(wanted, tmp_path / "run")
        assert wanted.state.global_step == 3
    # A folder in another place, with files that say the same in other words.
    with closing(run(other_folder(other, tmp_path / "same"), max_steps=4)) as same:
        resume(same, tmp_path / "run", 3)
        assert same.state.global_step == 4


def test_weights_that_every_checkpoint_has_may_be_gone_from_the_models_folder(
    untied_dir: str, tmp_path: Path
) -> None:
    def run(place: str, steps: int) -> Any:
        wanted = {**SAVES, "use_vllm": False, "max_steps": steps}
        return methods.make("GRPO", place, tmp_path / "run", None, wanted)  # type: ignore[arg-type]

    with closing(run(untied_dir, 2)) as first:
        first.train()
    with closing(run(changed_weights(other_folder(untied_dir, tmp_path / "other")), 3)) as again:
        resume(again, tmp_path / "run")
        assert again.state.global_step == 3


BITWISE = {"a warning": (False, False), "refused": (True, False), "taken": (True, True)}


@pytest.mark.parametrize("what", BITWISE)
def test_other_versions_devices_or_threads_are_a_warning_or_refused_where_bits_must_be_equal(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    bitwise, accept = BITWISE[what]
    make(tmp_path).train()
    run = make(tmp_path, max_steps=3, resume_with_changes=accept)
    run.args.full_determinism = bitwise
    run.inputs["surroundings"] = {**run.inputs["surroundings"], "threads": 99}
    if what == "refused":
        with pytest.raises(
            InputError, match=r"equal to the bit, and the run began elsewhere: threads was \d+, is 99"
        ):
            run.check_resume(True)
        return
    run.check_resume(True)
    assert "threads was" in caplog.text
    assert "is 99" in caplog.text


def test_a_receipt_of_an_older_version_without_these_inputs_is_taken(make: Make, tmp_path: Path) -> None:
    make(tmp_path).train()
    (start,) = [entry for entry in read_receipt(tmp_path / RECEIPT) if entry["kind"] == "start"]
    for name in ("model", "surroundings"):
        del start["inputs"][name]
    run = make(tmp_path, max_steps=3)
    run.checked = tmp_path / "checkpoint-2", start
    run.check_resume(str(tmp_path / "checkpoint-2"))


def test_a_longer_run_with_other_bookkeeping_is_the_same_run(make: Make, tmp_path: Path) -> None:
    make(tmp_path).train()
    run = make(tmp_path, max_steps=3, logging_steps=2, token_budget=512)
    resume(run, tmp_path)
    assert run.state.global_step == 3


def test_a_checkpoint_that_was_copied_elsewhere_brings_its_receipt(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "run").train()
    copied = shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "away" / "checkpoint-2")
    run = make(tmp_path / "new", max_steps=3)
    run.train(resume_from_checkpoint=str(copied))
    kinds = [entry["kind"] for entry in read_receipt(tmp_path / "new" / RECEIPT)]
    assert kinds == ["start", "step", "checkpoint", "step", "checkpoint", "start", "step", "checkpoint"]


def test_a_checkpoint_of_another_run_is_refused(make: Make, tmp_path: Path) -> None:
    for name in ("one", "other"):
        make(tmp_path / name, seed=3 if name == "one" else 4).train()
    here = tmp_path / "one"
    shutil.rmtree(here / "checkpoint-2")
    shutil.copytree(tmp_path / "other" / "checkpoint-2", here / "checkpoint-2")
    with pytest.raises(
        InputError, match=r"digests.json of checkpoint-2 was changed, or is of another checkpoint"
    ):
        resume(make(here, max_steps=3), here)
    with pytest.raises(InputError, match="checkpoint-2 was written with another receipt"):
        check_receipt(here / RECEIPT)


def test_every_line_of_a_checkpoint_names_its_digests(make: Make, tmp_path: Path) -> None:
    make(tmp_path).train()
    assert check_receipt(tmp_path / RECEIPT) == 5
    digests = json.loads((tmp_path / "checkpoint-2" / "digests.json").read_text())
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= digests["files"].keys()
    trained = [name for name in digests["memory"] if name.startswith("policy.")]
    moments = [name for name in digests["memory"] if name.startswith("optimizer.exp_avg of policy.")]
    assert len(moments) == len(trained) > 20


def test_a_checkpoint_that_was_compared_already_is_not_read_a_second_time(make: Make, tmp_path: Path) -> None:
    """The command line compares it when it opens the run's directory."""
    make(tmp_path).train()
    (start,) = [entry for entry in read_receipt(tmp_path / RECEIPT) if entry["kind"] == "start"]
    run, other = make(tmp_path, max_steps=3), make(tmp_path, {"train_dataset": other_rows()}, max_steps=3)
    for trainer in (run, other):
        trainer.checked = tmp_path / "checkpoint-2", start
    with patch.object(
        whole_checkpoints.checkpoints, "check_checkpoint", side_effect=AssertionError("read again")
    ):
        with pytest.raises(InputError, match="these have changed since: train data"):
            resume(other, tmp_path)
        resume(run, tmp_path)
        assert run.state.global_step == 3
        with pytest.raises(AssertionError, match="read again"):
            run.check_resume(str(tmp_path / "checkpoint-1"))


def test_a_script_goes_on_past_a_damaged_checkpoint_with_the_figures_that_it_logged(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = {"lr_scheduler_type": "constant"}
    whole, run = make(tmp_path / "whole", max_steps=3, **fixed), tmp_path / "run"
    whole.train()
    make(run, **fixed).train()
    receipt = (run / RECEIPT).read_bytes()
    path = run / "metrics.jsonl"
    honest = path.read_text().splitlines()
    path.write_text(path.read_text().replace('"loss": ', '"loss": 3', 1))
    (run / "checkpoint-2" / "trainer_state.json").unlink()
    (run / "shown_rollouts.jsonl").write_bytes(b"\xff\n")
    again = make(run, max_steps=3, **fixed)
    again.train(resume_from_checkpoint=True)
    said = capsys.readouterr().out
    assert "checkpoint-2 cannot be read" in said
    assert "receipt.jsonl names checkpoint-2" in said
    assert (run / "receipt-until-step-2.jsonl").read_bytes() == receipt
    assert "metrics.jsonl is not what the run has logged up to checkpoint-1; it is now" in said
    assert json.loads(path.read_text().splitlines()[0]) == json.loads(honest[0])
    assert (run / "damaged-checkpoint-2" / "model.safetensors").exists()
    assert (run / "damaged-shown_rollouts.jsonl").read_bytes() == b"\xff\n"
    assert methods.logs(again) == methods.logs(whole)


def test_changed_inputs_of_an_attempt_without_a_checkpoint_do_not_count(make: Make, tmp_path: Path) -> None:
    make(tmp_path).train()

    class Killed(Exception):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    attempt = make(tmp_path, {"train_dataset": other_rows()}, max_steps=4, resume_with_changes=True)
    with patch.object(Trainer, "_save_checkpoint", killed), pytest.raises(Killed):
        resume(attempt, tmp_path)
    with pytest.raises(InputError, match="these have changed since: train data"):
        resume(make(tmp_path, {"train_dataset": other_rows()}, max_steps=4), tmp_path)
    resume(make(tmp_path, max_steps=3), tmp_path)
    check_receipt(tmp_path / RECEIPT)


CLOCK_TEMPLATE = tiny.TEMPLATE + "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}"
MESSAGES = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": word}] for word in ("one", "two", "three", "four")]}
)


def with_clock() -> dict[str, Any]:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = CLOCK_TEMPLATE
    return {"processing_class": tokenizer, "train_dataset": MESSAGES}


def times(run: Any) -> set[str]:
    return {run.processing_class.decode(p.ids).rpartition(">")[2] for p in run.loop.prompts}


def test_a_resumed_run_renders_with_the_time_of_its_first_start(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = make(tmp_path / "run", with_clock())
    assert "the chat template contains the time: every prompt and turn of this run has 20" in caplog.text
    first.train()
    (moment,) = times(first)
    for further in (3, 4):
        again = make(tmp_path / "run", with_clock(), max_steps=further)
        resume(again, tmp_path / "run", further - 1)
        assert times(again) == {moment}
        assert again.state.global_step == further
    assert again.args.template_clock.moment.isoformat(" ") == moment

    other = make(tmp_path / "other", with_clock(), max_steps=5)
    with pytest.raises(
        InputError, match=r"train data\. The chat template contains the time.*Set resume_from_checkpoint="
    ):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    named = make(
        tmp_path / "other", with_clock(), resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4")
    )
    assert times(named) == {moment}
    caplog.clear()
    named.args.resume_from_checkpoint = None
    named.check_resume(None)
    assert "give another output_dir for a new run of today" in caplog.text


def test_an_older_receipt_without_a_time_is_named_as_the_cause(make: Make, tmp_path: Path) -> None:
    make(tmp_path, with_clock()).train()
    (start,) = [entry for entry in read_receipt(tmp_path / RECEIPT) if entry["kind"] == "start"]
    del start["inputs"]["clock of chat templates"]
    run = make(tmp_path / "other", with_clock(), max_steps=3)
    run.checked = tmp_path / "checkpoint-2", start
    with pytest.raises(InputError, match="the run's receipt names no time"):
        run.check_resume(str(tmp_path / "checkpoint-2"))


def test_every_template_of_a_run_gets_the_clock_of_the_run() -> None:
    source = Path(lockstep.__file__).parent
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"(config|args)\.chat_template_kwargs", path.read_text(encoding="utf-8"))
    }
    # What the user has given, under TRL's name.
    assert found <= {"run/trainers/trl_names.py"}
