"""Two ranks train with one real server. Some tests cause a fault on one of the ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
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
