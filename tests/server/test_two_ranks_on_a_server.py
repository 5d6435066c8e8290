"""Two ranks train with one real server. Some tests cause a fault on one of the ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from accounts import difference
from conftest import VLLM
from servers import KEY, Server
from test_two_ranks import SCRIPT, check_entries, run_ranks

from lockstep.server.keys import KEY_VARIABLE

pytestmark = [*VLLM, pytest.mark.long]


def test_two_ranks_train_with_one_server(
    untied_dir: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_SERVER_URL", server.url)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    work = ["data:image", "data:fewer", "served"]
    run_ranks([sys.executable, str(SCRIPT)], [untied_dir, str(tmp_path), *work], tmp_path, codes=[0, 0])
    for name in work[:2]:
        refused = [torch.load(tmp_path / f"{name.replace(':', '-')}.{rank}.pt") for rank in (0, 1)]
        assert refused[0]["raised"] == refused[1]["raised"] == "InputError"
        assert refused[0]["message"] == refused[1]["message"]
    one, other = (torch.load(tmp_path / f"served.{rank}.pt") for rank in (0, 1))
    assert "raised" not in one, one
    assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
    assert one["logs"][0]["parity/max_abs_gap"] < 1e-3
    assert [entry["kind"] for entry in check_entries(tmp_path / "served")] == ["start", "step"]


@pytest.mark.parametrize("kind", ["fsdp", "deepspeed"])
def test_two_ranks_with_a_sharded_model_train_with_one_server(
    kind: str, untied_dir: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_SERVER_URL", server.url)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    script = str(SCRIPT.with_name("sharded.py"))
    run_ranks(
        [sys.executable, script], [kind, "2", untied_dir, str(tmp_path), "served"], tmp_path, codes=[0, 0]
    )
    for rank in (0, 1):
        found = torch.load(tmp_path / f"served.{rank}-2.pt")
        assert "raised" not in found, found
        whole, own = found["whole"], found["sharded"]
        for expected, got in zip(whole["gradients"], own["gradients"], strict=True):
            assert difference(expected, got) <= 1e-6
        assert difference(whole["weights"], own["weights"]) <= 1e-6
        logs = found["everything"]["logs"]
        assert any(log.get("staleness/max", 0) > 0 for log in logs)
        assert sum("eval_reward" in log for log in logs) == 2
        assert all(log["parity/max_abs_gap"] < 1e-3 for log in logs if "loss" in log)
    kinds = [entry["kind"] for entry in check_entries(tmp_path / "served-everything")]
    assert kinds.count("step") == 4
