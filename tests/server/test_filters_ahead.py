"""Runs with sampling filters on a real server, with and without generations ahead.

The server sends kept ids over HTTP, and pushes happen in the middle of completions. CI tests all filters without
staleness, and kept ids with generations ahead and two steps per generation. The other rows are tested before a release.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from conftest import VLLM
from servers import Server

from lockstep import GRPOConfig, GRPOTrainer

pytestmark = [*VLLM, pytest.mark.long, pytest.mark.usefixtures("server_key")]
KEPT = {"top_p": 0.95, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}
RULES = {
    "presence_penalty": 0.5,
    "min_tokens": 2,
    "bad_words": ["th"],
    "vllm_structured_outputs_regex": "[a-z ]{4,60}",
}


@pytest.mark.parametrize(
    ("filters", "max_staleness", "num_iterations"),
    [
        pytest.param(KEPT | RULES, 0, 1, id="all, in turn"),
        pytest.param(KEPT, 2, 1, id="kept ids, ahead", marks=pytest.mark.release),
        pytest.param(RULES, 2, 1, id="rules, ahead", marks=pytest.mark.release),
        pytest.param(KEPT, 2, 2, id="kept ids, ahead, two steps"),
    ],
)
def test_the_gap_of_a_run_with_filters_on_a_server_is_that_of_a_run_without(
    filters: dict[str, Any],
    max_staleness: int,
    num_iterations: int,
    server: Server,
    untied_dir: str,
    tmp_path: Path,
) -> None:
    args = GRPOConfig(
        output_dir=str(tmp_path), vllm_server_base_url=server.url, vllm_server_timeout=240.0,
        max_staleness=max_staleness,
        num_generations=4, num_iterations=num_iterations, per_device_train_batch_size=8, max_completion_length=40,
        max_steps=4, logging_steps=1, learning_rate=1e-3, save_strategy="no", report_to=[], bf16=False,
        disable_tqdm=True,
        **filters,
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"prompt": [f"number {i}" for i in range(40)]})
    trainer = GRPOTrainer(
        untied_dir, lambda completion_ids, **_: [float(len(i) % 5) for i in completion_ids], args, data
    )
    trainer.train()
    trainer.close()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 4
    assert lines[0]["parity/checked_tokens"] > 0
    assert max(line["parity/max_abs_gap"] for line in lines if line["parity/checked_tokens"]) < 1e-3
    if max_staleness:
        assert max(line.get("staleness/max", 0) for line in lines) > 0
