"""Every recipe is a config that its command takes, on data whose prompts its generations divide."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lockstep.cli.main import main

RECIPES = Path(__file__).parents[2] / "recipes"
COMMANDS = {"rloo.yaml": "rloo", "online_dpo.yaml": "online-dpo"}


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.yaml")))
def test_a_recipe_passes_a_dry_run_with_the_values_that_it_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, asked = COMMANDS.get(name, "grpo"), yaml.safe_load((RECIPES / name).read_text())
    assert main([command, "--config", str(RECIPES / name), "--dry_run"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert {key: resolved[key] for key in asked} == asked
    # The recipe says how it is run.
    assert f"lockstep {command} --config recipes/{name}" in (RECIPES / name).read_text()
