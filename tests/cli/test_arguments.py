"""The command line has one parser for file and arguments, and every mistake gives one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lockstep.cli.fields import RunArguments, build, read
from lockstep.cli.help import check_names, fields_of
from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.learn.methods.grpo import GRPOConfig

RECIPES = Path(__file__).parents[2] / "recipes"


COMMANDS = {"rloo.yaml": "rloo", "online_dpo.yaml": "online-dpo"}


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.name)
def test_every_recipe_resolves_and_its_resolution_is_a_config(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = COMMANDS.get(recipe.name, "grpo")
    assert main([command, "--config", str(recipe), "--dry_run"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    for name, value in yaml.safe_load(recipe.read_text(encoding="utf-8")).items():
        assert printed[name] == value, name
    # The recipe contains the command that runs it.
    assert f"lockstep {command} --config recipes/{recipe.name}" in recipe.read_text(encoding="utf-8")


def test_a_dry_run_can_be_used_as_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "grpo",
                "--model_name_or_path",
                "m",
                "--num_generations",
                "4",
                "--scale_rewards",
                "batch",
                "--dry_run",
            ]
        )
        == 0
    )
    first = capsys.readouterr().out
    (tmp_path / "resolved.yaml").write_text(first)
    assert main(["grpo", "--config", str(tmp_path / "resolved.yaml"), "--dry_run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(first)


def test_words_win_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "learning_rate: 1.0e-5\nmax_steps: 7\nreward_funcs: [a, b]\nbf16: false\nmodel_init_kwargs: {dtype: float64}\n"
    )
    given = read(["--config", str(config), "--learning_rate", "2e-5", "--output_dir", str(tmp_path)], "grpo")
    run, made = build(given, GRPOConfig, RunArguments)
    assert (made.learning_rate, made.max_steps, made.bf16, given.dry_run) == (2e-5, 7, False, False)
    assert made.model_init_kwargs == {"dtype": "float64"}
    assert run.reward_funcs == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        (
            ["--learning_rat", "3"],
            None,
            "unknown field 'learning_rat' in the command line; did you mean 'learning_rate'?",
        ),
        (["--learning_rate", "fast"], None, "invalid float value: 'fast'"),
        (["--max_steps", "2.5"], None, "invalid int value"),
        (["--loss_type", "best"], None, "invalid choice: 'best'"),
        (["--config", "/no/such.yaml"], None, "config file /no/such.yaml does not exist"),
        ([], "learning_rat: 3\n", "unknown field 'learning_rat' in"),
        ([], "learning_rate: fast\n", "invalid float value: 'fast'"),
        ([], "- a\n- b\n", "must hold fields with values"),
        ([], "vllm_importance_sampling_clip_max: null\n", "vllm_importance_sampling_clip_max is null"),
        ([], "a: [\n", "is not YAML"),
        (
            ["--num_generations", "3", "--model_name_or_path", "m", "--dataset_name", "arithmetic"],
            None,
            "not a multiple of num_generations=3",
        ),
        (["--cache_implementation", "static"], None, "cache_implementation='static' is not supported"),
        ([], None, "model_name_or_path is not set"),
        (["--model_name_or_path", "m"], None, "dataset_name is not set"),
        (["stray"], None, "stray"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "c.yaml").write_text(content)
        words = ["--config", str(tmp_path / "c.yaml"), *words]
    assert main(["grpo", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("lockstep: ")
    assert message in line


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 2
    assert "no command 'fly'" in capsys.readouterr().err


def test_a_name_with_a_slash_is_a_reward_model_and_looked_for_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "grpo",
        "--model_name_or_path",
        "m",
        "--dataset_name",
        "arithmetic",
        "--output_dir",
        str(tmp_path / "run"),
    ]
    assert main([*words, "--reward_funcs", "accuracy", "/no/such/model"]) == 2
    assert "model directory /no/such/model does not exist" in capsys.readouterr().err
    assert main([*words, "--reward_funcs", "accurate"]) == 2
    assert "not one of exact_match, accuracy, format" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_words_of_a_file_are_what_they_say(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "save_strategy: no\nlogging_strategy: no\nbf16: no\nstop_strings: [no, "
        "on]\nstructured_outputs_choice: [yes, true]\n"
        "presence_penalty: -1.0e-5\nend_of_thinking: '---'\nrun_name: -x\n"
    )
    _, made = build(
        read(["--config", str(config), "--output_dir", str(tmp_path)], "grpo"), GRPOConfig, RunArguments
    )
    assert (made.save_strategy, made.logging_strategy, made.bf16) == ("no", "no", False)
    assert made.stop_strings == ["no", "on"]
    assert made.structured_outputs_choice == ["yes", "true"]
    assert (made.presence_penalty, made.end_of_thinking, made.run_name) == (-1e-5, "---", "-x")


ADVICE = {
    "max_prompt_length": "no prompt is cut",
    "dtype": "engine_dtype",
    "torch_dtype": "bf16",
    "overlap_rewards": "it was removed; max_staleness has its purpose",
    "renderer": "it was removed: the model's chat template makes the ids",
}


def test_a_field_of_trl_or_of_earlier_gets_advice_and_not_the_closest_name() -> None:
    for name, advice in ADVICE.items():
        with pytest.raises(InputError) as found:
            check_names([name], fields_of("grpo"), "the command line")
        assert advice in str(found.value)
        assert "did you mean" not in str(found.value)
        with pytest.raises(InputError, match=f"GRPOConfig has no field {name!r}; .*{advice}"):
            GRPOConfig(output_dir="unused", **{name: True})
    with pytest.raises(InputError, match="did you mean 'learning_rate'"):
        check_names(["learnin_rate"], fields_of("grpo"), "the command line")
