"""A command that does not train says which typed words have no effect in it, and refuses an adapter's fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.fields import read, without_unused
from lockstep.cli.help import fields_of
from lockstep.cli.main import main
from lockstep.cli.past_runs import next_lines
from lockstep.config.effect import NOTHING_OF
from lockstep.config.option import Part

NOWHERE = ["--model_name_or_path", "/no/such", "--dataset_name", "arithmetic", "--train_size", "4"]
PLACE = {
    "evaluate": [*NOWHERE, "--eval_size", "4"],
    "gateway": [*NOWHERE, "--agent_command", "true"],
    "verify": ["--model", "/no/such"],
}


def said(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([command, *PLACE[command], *words]) == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("command", PLACE)
@pytest.mark.parametrize(
    "words",
    [
        ["--push_to_hub"],
        ["--save-steps", "3"],
        ["--save_strategy=no"],
        ["--max_steps", "9"],
        ["--eval_delay", "2", "--eval_steps", "3"],
        ["--num_iterations", "2", "--per_device_train_batch_size=3"],
        ["--learning_rate", "1", "--optim", "sgd"],
        ["--logging_steps", "3", "--no_average_tokens_across_devices", "--log_completions"],
    ],
    ids=str,
)
def test_typed_words_without_an_effect_are_said_in_one_line(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = [w[2:].partition("=")[0].replace("-", "_") for w in words if w[0] == "-" and w[2:5] != "no_"]
    (line,) = [line for line in said(command, words, capsys) if "no effect" in line]
    assert all(name in line for name in names)
    assert f"in lockstep {command}" in line


@pytest.mark.parametrize("command", PLACE)
def test_words_with_an_effect_are_not_said(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(command, ["--seed", "3", "--temperature", "0.5", "--bf16", "False"], capsys)
    assert not [line for line in lines if "no effect" in line]


@pytest.mark.parametrize("command", ["evaluate", "gateway"])
def test_adapter_fields_without_an_adapter_are_refused_and_an_adapter_too(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "lora_r has no effect without use_peft" in said(command, ["--lora_r", "4"], capsys)[-1]
    # The config of a run has its adapter's fields.
    config = tmp_path / "run.yaml"
    config.write_text("use_peft: true\nlora_r: 4\n")
    lines = said(command, ["--config", str(config), "--use_peft", "False"], capsys)
    assert not any("lora_r" in line for line in lines)
    packaged = ["--model_name_or_path", "smollm2-135m-instruct"]
    assert "lockstep merge" in said(command, ["--config", str(config), *packaged], capsys)[-1]


@pytest.mark.parametrize("flag", ["receipt", "explain"])
def test_verify_of_files_says_that_nothing_else_is_used(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["verify", f"--{flag}", str(tmp_path / "none"), "--model", "m", "--self_test", "--json", "x"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
    assert line.endswith(f"json and model and self_test have no effect with {flag}")


def test_an_evaluation_makes_no_repository(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import Trainer

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a repository was made")

    monkeypatch.setattr(Trainer, "init_hf_repo", refuse)
    monkeypatch.chdir(tmp_path)
    fields = {"model_name_or_path": untied_dir, "dataset_name": "arithmetic", "eval_size": "2"}
    fields |= {"use_vllm": "false", "bf16": "false", "max_completion_length": "4", "push_to_hub": "true"}
    fields |= {"num_generations": "2", "per_device_train_batch_size": "2", "output_dir": "run"}
    assert main(["evaluate", *(word for name, value in fields.items() for word in (f"--{name}", value))]) == 0
    said = capsys.readouterr()
    assert "held-out reward" in said.out
    assert (
        "output_dir and per_device_train_batch_size and push_to_hub have no effect in lockstep evaluate"
        in said.err
    )
    assert not list(tmp_path.iterdir())


def test_the_command_of_an_evaluation_has_no_words_without_an_effect(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 2}')
    typed = ["--config", "c d.yaml", "--max_steps", "3", "--lora_r", "4", "--push_to_hub", "--seed", "1"]
    lines = next_lines(tmp_path, adapter=True, typed=typed)
    (evaluation,) = [line.strip() for line in lines if "lockstep evaluate" in line]
    assert evaluation.startswith("lockstep evaluate --config 'c d.yaml' --seed 1 --model_name_or_path")


def test_a_field_of_a_part_that_a_command_lacks_is_said_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("epsilon: 0.5\noptim: sgd\nseed: 3\nlr_scheduler_kwargs: {a: 1}\n")
    given = read(["--config", str(tmp_path / "run.yaml"), "--epsilon", "0.1", "--eval_size", "3"], "grpo")
    found = without_unused(given, "evaluate", (Part.HELD_OUT,))
    assert found.words == ("--seed=3", "--eval_size", "3")
    assert found.values == {"seed": 3, "eval_size": 3}
    # The file may be that of a run.
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("epsilon has no effect in lockstep evaluate, which learns nothing")
    assert without_unused(given, "evaluate", tuple(Part)) == given


def test_a_field_that_a_command_sets_itself_is_said_and_its_own_comes_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = read(["--num_generations", "3", "--max_steps", "4"], "verify")
    found = without_unused(given, "verify", (Part.LEARNING,), {"num_generations": 4, "min_p": None})
    assert found.words == ("--num_generations", "4")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("in lockstep verify, which makes no training run and decides that itself")


def test_every_part_is_that_of_a_field_and_has_words() -> None:
    parts = {field["part"] for field in fields_of("grpo").values() if "part" in field}
    assert parts == set(Part) == NOTHING_OF.keys()
