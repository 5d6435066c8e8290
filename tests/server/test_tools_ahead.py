"""Rollouts with tools and environments on a real server, sampled ahead: pushes land in the middle of conversations.

CI tests tools without staleness, and environments and filters with generations ahead. The other combinations, and
filters in bf16, are tested before a release.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from caller import Product, multiply
from conftest import VLLM
from portions import portion
from servers import Server, serve
from test_filters_ahead import KEPT

from lockstep import GRPOConfig, GRPOTrainer
from lockstep.errors import InputError

pytestmark = [*VLLM, pytest.mark.long, pytest.mark.usefixtures("server_key")]


@pytest.fixture(scope="module")
def caller_server(caller_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(caller_dir, tmp_path_factory.mktemp("server")) as running:
        yield running


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) % 5) for ids in completion_ids]


def run(
    model: str, folder: Path, url: str, max_staleness: int, more: dict[str, Any] | None = None, **given: Any
) -> GRPOTrainer:
    rows = [{"prompt": [{"role": "user", "content": f"what is {i} + {i}"}]} for i in range(40)]
    fields: dict[str, Any] = {
        "vllm_server_base_url": url, "vllm_server_timeout": 240.0, "max_staleness": max_staleness,
        "num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 120, "max_steps": 4,
        "logging_steps": 1, "learning_rate": 1e-3, "save_strategy": "no", "report_to": [], "bf16": False,
    }  # fmt: skip
    args = GRPOConfig(output_dir=str(folder), disable_tqdm=True, **(fields | (more or {})))
    trainer = GRPOTrainer(model, by_length, args, datasets.Dataset.from_list(rows), **given)
    trainer.train()
    return trainer


TOOLS, ENVIRONMENTS = {"tools": [multiply]}, {"environment_factory": Product}
PAIRS = [(TOOLS, 0), (ENVIRONMENTS, 2), (TOOLS, 2), (ENVIRONMENTS, 0)]


@pytest.mark.parametrize(("given", "max_staleness"), portion(PAIRS, lambda pair: pair in PAIRS[:2]))
def test_every_turn_is_proven_with_the_weights_that_sampled_it(
    given: dict[str, Any], max_staleness: int, caller_dir: str, caller_server: Server, tmp_path: Path
) -> None:
    trainer = run(caller_dir, tmp_path, caller_server.url, max_staleness, **given)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 4
    assert max(line["parity/max_abs_gap"] for line in lines) < 1e-3
    assert all(line["tools/call_frequency"] > 0 for line in lines)
    assert all(line["parity/checked_tokens"] > 0 for line in lines[:1])
    if max_staleness:
        assert max(line["staleness/max"] for line in lines) > 0
    if "environment_factory" in given:
        assert all(line["environments/failed"] == 0 for line in lines)
        # Every environment went back after its rollout was scored.
        assert trainer.rollout_tools is not None
        assert not trainer.rollout_tools.program._held
    trainer.close()


def test_a_rollout_func_samples_on_a_server_too_but_not_ahead(
    caller_dir: str, caller_server: Server, tmp_path: Path
) -> None:
    import lockstep

    def one_turn(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = lockstep.generate_rollout_completions(trainer, prompts, max_tokens=20)
        return {name: [row[name] for row in found] for name in ("prompt_ids", "completion_ids", "logprobs")}

    trainer = run(caller_dir, tmp_path / "now", caller_server.url, 0, rollout_func=one_turn)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert max(line["parity/max_abs_gap"] for line in lines) < 1e-3
    with pytest.raises(InputError, match="max_staleness=2 is not supported with rollout_func"):
        run(caller_dir, tmp_path / "ahead", caller_server.url, 2, rollout_func=one_turn)


@pytest.fixture(params=["float32", pytest.param("bfloat16", marks=pytest.mark.release)])
def served_as(
    request: pytest.FixtureRequest, caller_dir: str, tmp_path: Path
) -> Iterator[tuple[str, Server]]:
    """A dtype, and a server of this dtype."""
    if request.param == "float32":
        yield request.param, request.getfixturevalue("caller_server")
    else:
        with serve(caller_dir, tmp_path, dtype=request.param) as running:
            yield request.param, running


def test_rollouts_with_tools_and_filters_ahead_have_the_gap_of_rollouts_without(
    served_as: tuple[str, Server], caller_dir: str, tmp_path: Path
) -> None:
    dtype, server = served_as
    more = {"num_iterations": 2, "max_steps": 6, "bf16": dtype == "bfloat16", **KEPT}
    trainer = run(caller_dir, tmp_path / "run", server.url, 2, more, tools=[multiply])
    trainer.close()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 6
    assert max(line.get("tools/turns", 0) for line in lines) > 1
    assert lines[0]["parity/checked_tokens"] > 0
    limit = {"float32": 1e-4, "bfloat16": 0.15}[dtype]
    assert max(line["parity/mean_abs_gap"] for line in lines if line["parity/checked_tokens"]) < limit
    assert max(line.get("staleness/max", 0) for line in lines) > 0
