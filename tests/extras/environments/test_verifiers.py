"""An environment of the real verifiers runs its own rollouts through the gateway; the policy learns from its rubric."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import VLLM
from datasets import Dataset
from other_pythons import needs, python_with

import lockstep
from lockstep.errors import InputError
from lockstep.extras.environments.verifiers import VerifiersAgent, environment

FILE = Path(__file__).with_name("verifiers_environment.py")
PYTHON = str(python_with("verifiers"))


@pytest.fixture
def agent() -> Iterator[Any]:
    made: list[VerifiersAgent] = []

    def make(**arguments: Any) -> VerifiersAgent:
        made.append(environment(f"{FILE}:load_environment", python=PYTHON, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


def trainer(model: str, folder: Path, agent: VerifiersAgent, data: Dataset, **fields: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 60,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [], "bf16": False,
        "use_vllm": False, "disable_tqdm": True, "vllm_max_model_length": 256, "seed": 5,
    }  # fmt: skip
    config = lockstep.GRPOConfig(output_dir=str(folder), **{**settings, **fields})
    return lockstep.GRPOTrainer(model, args=config, train_dataset=data, agent=agent)


@needs("verifiers")
@pytest.mark.parametrize("use_vllm", [False, pytest.param(True, marks=VLLM)], ids=["transformers", "vllm"])
def test_verifiers_runs_its_own_rollouts_and_its_rubric_is_the_reward(
    use_vllm: bool, agent: Any, untied_dir: str, tmp_path: Path
) -> None:
    letters = agent()
    data = letters.rows()
    assert data[3]["prompt"] == [{"role": "user", "content": "what is 3 + 3"}]
    made = trainer(untied_dir, tmp_path, letters, data, use_vllm=use_vllm)
    made.train()
    made.close()
    lines = [line for line in made.state.log_history if "reward" in line]
    assert len(lines) == 2
    for line in lines:
        assert 1 < line["agent/answered"] <= 2
        assert line["agent/failed"] < 0.5
        assert line["parity/max_abs_gap"] < 1e-3
    for rollout in (r for group in made.loop.generation.groups for r in group.rollouts if r.failed is None):
        said = "".join(m["content"] for m in rollout.notes["messages"] if m["role"] == "assistant")
        assert rollout.reward == pytest.approx(sum("a" <= c <= "z" for c in said) / max(len(said), 1))


@needs("verifiers")
def test_every_rollout_has_a_seed_of_its_own(agent: Any, untied_dir: str, tmp_path: Path) -> None:
    seeded = agent(reward="seed", rows=4)
    made = trainer(untied_dir, tmp_path, seeded, seeded.rows(), max_steps=1)
    made.train()
    made.close()
    rewards = [r.reward for group in made.loop.generation.groups for r in group.rollouts if r.failed is None]
    assert len(set(rewards)) == len(rewards) > 8


@needs("verifiers")
def test_a_process_that_dies_costs_its_rollouts_and_the_run_says_why(
    agent: Any, untied_dir: str, tmp_path: Path
) -> None:
    dying = agent(dies=True)
    made = trainer(untied_dir, tmp_path, dying, dying.rows(), max_steps=1)
    with pytest.raises(InputError, match="the process of verifiers ended with code 9"):
        made.train()
    made.close()


@needs("verifiers")
def test_an_environment_that_cannot_be_loaded_says_why(agent: Any) -> None:
    with pytest.raises(InputError, match=r"cannot be loaded: TypeError: .*colour"):
        agent(colour="red").rows()


def test_a_python_without_verifiers_is_named_with_what_to_do() -> None:
    # verifiers below 0.2 needs other packages than ours, so this Python never has it.
    with pytest.raises(
        InputError, match=r"has no verifiers with load_environment .*pip install 'verifiers<0\.2' there"
    ):
        environment("gsm8k").rows()


def test_rows_of_another_data_set_are_refused() -> None:
    with pytest.raises(InputError, match="no column 'verifiers_row'; make the data set with rows"):
        environment("gsm8k")("http://127.0.0.1:1", "key", {"prompt": [], "seed": 1})
