"""LoRA and QLoRA from the command line, with TRL's names: training, resuming, and arguments without an effect."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_method_commands import GROUPS, config, curve, home

from lockstep.cli.fields import AdaptedRunArguments, RunArguments, adapter_arguments, build, read, settings_of
from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.learn.methods.grpo import GRPOConfig
from lockstep.models import quantised

__all__ = ["home"]

LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "up_proj"]}


@pytest.mark.parametrize("four_bits", [False, True], ids=["lora", "qlora"])
@pytest.mark.parametrize("command", ["grpo", "online-dpo"])
def test_an_adapter_is_trained_and_gone_on_with(
    home: Path,
    untied_dir: str,
    command: str,
    four_bits: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if four_bits:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed here")
    fields = GROUPS if command == "grpo" else {"per_device_train_batch_size": 2, "max_new_tokens": 6}
    asked = []
    check = quantised.check_quantization
    monkeypatch.setattr(
        "lockstep.learn.policy_and_reference.check_quantization",
        lambda wanted, lora: (asked.append(wanted), check(wanted, lora)),
    )
    path = config(home, untied_dir, **{**fields, **LORA, "load_in_4bit": four_bits})
    assert main([command, "--config", path, "--output_dir", str(home / "whole")]) == 0, (
        capsys.readouterr().err
    )
    assert json.loads((home / "whole" / "summary.json").read_text())["parity"]["failed"] == 0
    assert [getattr(wanted, "load_in_4bit", False) for wanted in asked] == [four_bits]
    (adapter,) = (home / "whole").glob("**/checkpoint-4/adapter_config.json")
    assert json.loads(adapter.read_text())["r"] == 4

    monkeypatch.setenv("TEST_INTERRUPT_AT", "3")
    assert main([command, "--config", path]) == 130, capsys.readouterr().err
    monkeypatch.delenv("TEST_INTERRUPT_AT")
    other = config(home, untied_dir, **{**fields, **LORA, "load_in_4bit": four_bits, "lora_r": 8})
    assert main([command, "--config", other]) == 2
    assert "lora_r was 4" in capsys.readouterr().err
    path = config(home, untied_dir, **{**fields, **LORA, "load_in_4bit": four_bits})
    assert main([command, "--config", path]) == 0, capsys.readouterr().err
    assert curve(home / "run") == curve(home / "whole")


def parsed(*words: str) -> AdaptedRunArguments:
    return build(read(["--output_dir", "unused", *words], "grpo"), GRPOConfig, AdaptedRunArguments)[0]


def test_every_word_reaches_the_adapter() -> None:
    words = "--use_peft --lora_r 3 --lora_alpha 5 --lora_dropout 0.1 --lora_target_modules all-linear --use_rslora True"
    words += " --use_dora --lora_modules_to_save norm --load_in_4bit --bnb_4bit_quant_type fp4 --use_bnb_nested_quant"
    made = adapter_arguments(parsed(*words.split()))
    lora, four_bits = made["peft_config"], made["quantization_config"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (3, 5, 0.1)
    assert (lora.target_modules, lora.modules_to_save) == ("all-linear", ["norm"])
    assert (lora.use_rslora, lora.use_dora, lora.task_type) == (True, True, "CAUSAL_LM")
    assert (four_bits.load_in_4bit, four_bits.bnb_4bit_quant_type, four_bits.bnb_4bit_use_double_quant) == (
        True,
        "fp4",
        True,
    )
    two = adapter_arguments(parsed("--use_peft", "--lora_target_modules", "q_proj", "up_proj"))
    assert two["peft_config"].target_modules == {"q_proj", "up_proj"}
    assert two["quantization_config"] is None
    assert adapter_arguments(parsed()) == {}
    with pytest.raises(InputError, match="invalid choice: 'int4'"):
        parsed("--use_peft", "--load_in_4bit", "--bnb_4bit_quant_type", "int4")


def test_a_dry_run_with_an_adapter_is_a_config_that_verify_names_what_it_cannot_do_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model_name_or_path", "m", "--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj"]
    assert main(["grpo", *words, "--dry_run"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "resolved.yaml").write_text(printed)
    assert main(["grpo", "--config", str(tmp_path / "resolved.yaml"), "--dry_run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(printed)
    assert main(["verify", "--config", str(tmp_path / "resolved.yaml")]) == 2
    assert "give --use_peft False to verify the model without" in capsys.readouterr().err


def test_a_run_without_an_adapter_is_what_it_was_before_there_were_words_for_one() -> None:
    assert settings_of(parsed()) == dataclasses.asdict(RunArguments())
    assert settings_of(parsed("--use_peft"))["lora_r"] == 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lora_r", "4"], "lora_r has no effect without use_peft"),
        (["--load_in_4bit"], "load_in_4bit has no effect without use_peft"),
        (["--use_peft", "--use_bnb_nested_quant"], "use_bnb_nested_quant has no effect without load_in_4bit"),
    ],
)
def test_words_without_effect_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--model_name_or_path", "m", "--dataset_name", "arithmetic", "--output_dir", str(tmp_path / "run")]
    assert main(["grpo", *run, *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["grpo", *run, *words, "--dry_run"]) == 2


@pytest.mark.parametrize("fields", [{}, LORA], ids=["full", "adapter"])
def test_a_quantisation_that_a_file_describes_is_refused_with_the_words_that_ask_for_it(
    home: Path, untied_dir: str, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    described = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    path = config(home, untied_dir, **{**GROUPS, **fields, "model_init_kwargs": described})
    assert main(["grpo", "--config", path]) == 2
    said = capsys.readouterr().err
    assert "is a mapping" in said
    assert "on the command line set use_peft and load_in_4bit" in said
    # The error names settings that form a valid config.
    path = config(home, untied_dir, **{**GROUPS, **fields, "use_peft": True, "load_in_4bit": True})
    assert main(["grpo", "--config", path, "--dry_run"]) == 0
