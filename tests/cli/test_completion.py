"""The completion script, in a real bash: it completes commands, fields, choices and recipes, but no file names."""

from __future__ import annotations

import subprocess

import pytest

from lockstep.cli.completion import script
from lockstep.cli.help import recipe_names
from lockstep.cli.main import COMMANDS, main


def completed(*words: str) -> list[str]:
    """What bash offers for the last word."""
    typed = " ".join(f"'{word}'" for word in words)
    code = (
        f"{script()}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _lockstep; printf '%s\\n' "
        f'"${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["lockstep", ""], list(COMMANDS)),
        (["lockstep", "ver"], ["verify"]),
        (["lockstep", "grpo", "--learning_r"], ["--learning_rate"]),
        (["lockstep", "demo", "--max_st"], ["--max_steps", "--max_staleness"]),
        (["lockstep", "ppo", "--vf"], ["--vf_coef"]),
        (["lockstep", "grpo", "--vf"], []),
        (["lockstep", "grpo", "--recipe", ""], recipe_names()),
        (["lockstep", "grpo", "--loss_type", "da"], ["dapo"]),
        (["lockstep", "grpo", "--dataset_name", ""], []),
        (["lockstep", "rollouts", "--b"], ["--best"]),
    ],
)
def test_a_word_is_completed(words: list[str], found: list[str]) -> None:
    assert sorted(completed(*words)) == sorted(found)


def test_the_command_prints_the_script_for_both_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    bash = capsys.readouterr().out
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out == "autoload -U +X bashcompinit && bashcompinit\n" + bash
    assert main(["completion", "fish"]) == 2
