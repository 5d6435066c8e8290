"""Scripts with tools, an environment and a `rollout_func` run with TRL and with Lockstep; only their import changes.

CI runs every script for one step with both, and lets the script with an environment learn. That the others learn too
is checked before a release.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from caller import save_caller
from example_scripts import EXAMPLES
from portions import portion

IMPORT = "from {} import GRPOConfig, GRPOTrainer"
# By script: the tool that the tiny model calls.
SCRIPTS = {"trl_tools": "multiply", "trl_environment": "add", "trl_rollout_func": "multiply"}
FIELDS: dict[str, Any] = {
    "max_steps": 8,
    "learning_rate": 6e-4,
    "lr_scheduler_type": "constant",
    "max_completion_length": 120,
    "use_vllm": False,
    "use_cpu": True,
    "bf16": False,
    "seed": 3,
    "disable_tqdm": True,
}


def script(name: str, package: str) -> ModuleType:
    """The script of this name, with the trainers of this package."""
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.count(IMPORT.format("lockstep")) == 1
    module = ModuleType(f"{name}_with_{package}")
    exec(
        compile(text.replace(IMPORT.format("lockstep"), IMPORT.format(package)), f"{name}.py", "exec"),
        module.__dict__,
    )
    return module


@pytest.fixture(params=SCRIPTS)
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script with the trainers of a package, and returns what it logged per step."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    model = save_caller(tmp_path / "model", tool=SCRIPTS[request.param])

    def logged(package: str, **fields: Any) -> list[dict[str, float]]:
        module = script(request.param, package)
        # `inspect` and `typing` look the module of a class up by its name.
        monkeypatch.setitem(sys.modules, module.__name__, module)
        trainer = module.main(model, **{**FIELDS, **fields}, output_dir=str(tmp_path / "run"))
        if package == "lockstep":
            trainer.close()
        return [line for line in trainer.state.log_history if "reward" in line]

    return logged


@pytest.mark.parametrize("run", portion(SCRIPTS, lambda name: name == "trl_environment"), indirect=True)
def test_a_script_of_trls_moves_by_its_import_and_its_reward_rises(run: Any) -> None:
    lines = run("lockstep")
    rewards = [line["reward"] for line in lines]
    assert len(rewards) == FIELDS["max_steps"]
    assert np.mean(rewards[-3:]) > 1.3 * np.mean(rewards[:3])
    assert max(line["parity/max_abs_gap"] for line in lines) < 1e-4


def test_the_same_script_runs_with_trl_and_logs_the_same_names(run: Any) -> None:
    (theirs,) = run("trl", max_steps=1)
    (ours,) = run("lockstep", max_steps=1)
    names = {name for name in theirs if name.startswith(("reward", "tools/"))}
    assert names
    assert names <= ours.keys()
