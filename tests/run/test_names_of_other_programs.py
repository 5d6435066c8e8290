"""A name of another program gets a hint, and what the hint names exists."""

from __future__ import annotations

import dataclasses
import re

import pytest

import lockstep
from lockstep.cli.fields import AdaptedRunArguments
from lockstep.cli.help import check_names, fields_of
from lockstep.cli.main import COMMANDS, main
from lockstep.cli.training import TRAINERS
from lockstep.config.other_names import _ARGUMENTS, _MEANINGS, INSTEAD, hint_of
from lockstep.errors import InputError

KINDS = [getattr(lockstep, name).config_class for name in TRAINERS.values()]
FIELDS = {f.name for kind in (*KINDS, AdaptedRunArguments) for f in dataclasses.fields(kind)}
# Words of the hints that are no fields.
OTHER_WORDS = {
    "train_dataset",
    "attn_implementation",
    "ref_model",
    "WANDB_PROJECT",
    "WANDB_ENTITY",
    "eval_dataset",
}
OTHER_WORDS |= {"peft_config", "quantization_config"}


def test_what_a_hint_names_is_a_field() -> None:
    assert {field for fields in _MEANINGS.values() for field in fields} <= FIELDS
    assert _ARGUMENTS.keys() <= FIELDS
    for text in (*INSTEAD.values(), *_ARGUMENTS.values()):
        assert set(re.findall(r"\w+_\w+", text)) <= FIELDS | OTHER_WORDS, text


def test_no_hint_is_for_a_name_that_the_commands_have() -> None:
    grpo = fields_of("grpo").keys()
    assert not INSTEAD.keys() & grpo
    assert all(hint_of(name, grpo) == f"here it is {name!r}" for name in _MEANINGS.keys() & grpo)
    assert not INSTEAD.keys() & _MEANINGS.keys()


@pytest.mark.parametrize("command", TRAINERS)
def test_a_hint_names_only_fields_of_the_command(command: str) -> None:
    fields = fields_of(command)
    for name in {*_MEANINGS, *INSTEAD} - fields.keys():
        found = re.match("here it is '(.*)'", hint_of(name, fields))
        assert found is None or found[1] in fields


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("evaluation_strategy", "here it is 'eval_strategy'"),
        ("actor_rollout_ref.rollout.n", "here it is 'num_generations'"),
        ("data.train_batch_size", "here it is 'per_device_train_batch_size'"),
        ("actor_rollout_ref.rollout.temperature", "here it is 'temperature'"),
        ("no_cuda", "here it is 'use_cpu'"),
        ("per_gpu_train_batch_size", "here it is 'per_device_train_batch_size'"),
        ("kl_coef", "here it is 'beta'"),
        ("max_async_level", "here it is 'max_staleness'"),
        ("max_seq_length", "here it is 'vllm_max_model_length'"),
        ("adv_estimator", "the command chooses the method"),
        ("group_by_length", "leave it out"),
    ],
)
def test_a_name_of_another_program_gets_its_hint(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=re.escape(hint)):
        check_names([name], fields_of("grpo"), "the command line")
    with pytest.raises(InputError, match=re.escape(hint)):
        lockstep.GRPOConfig(**{name: 1})


def test_a_name_of_a_command_gets_the_argument_of_the_trainer_in_python() -> None:
    with pytest.raises(InputError, match="has no field 'lora_rank'; the trainer takes a peft_config"):
        lockstep.GRPOConfig(lora_rank=8)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="has no field 'max_tokens'; here it is 'max_new_tokens'"):
        lockstep.OnlineDPOConfig(max_tokens=8)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "word", ["train", "sft", "eval", "doctor", "resume", "--model_name_or_path", "evalute"]
)
def test_a_command_of_another_program_gets_one_of_ours(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    said = capsys.readouterr().err
    assert len(said) < 500
    assert any(name in said for name in COMMANDS)


def test_help_and_version_are_found_in_each_form(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("help", "-h", "--help"):
        assert main([word]) == 0
        assert "usage: lockstep COMMAND" in capsys.readouterr().out
    for word in ("version", "-V", "--version"):
        assert main([word]) == 0
        assert capsys.readouterr().out == f"lockstep {lockstep.__version__}\n"
