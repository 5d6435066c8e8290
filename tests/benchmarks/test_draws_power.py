"""`make draws` adds evidence up as the proof does, and prints a row for every fault."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.proofs import draws as benchmark
from lockstep.watch.draws import BETS, DrawEvidence, DrawStats


def test_the_evidence_along_the_tokens_is_that_of_a_first_generation() -> None:
    pays = np.random.default_rng(0).normal(0, 0.3, (len(BETS), 12))
    evidence = DrawEvidence()
    evidence.add(DrawStats(tokens=12, evidence=dict(zip(BETS, pays.sum(1).tolist(), strict=True))))
    assert benchmark.evidence_along(pays)[-1] == pytest.approx(evidence.log_evidence, abs=1e-5)


def test_the_command_prints_every_fault(
    untied_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "draws.json"
    words = [
        "--model",
        untied_dir,
        "--completions",
        "60",
        "--length",
        "20",
        "--orders",
        "5",
        "--json",
        str(file),
    ]
    monkeypatch.setattr(sys, "argv", ["draws", *words])
    benchmark.main()
    rows, printed = json.loads(file.read_text()), capsys.readouterr().out
    for name in (*benchmark.FAULTS, "best of two completions"):
        assert name in printed
        assert name in rows
    assert rows["greedy"]["most"] < 100
    assert math.isinf(rows["T = 1.05"]["half"]) or rows["T = 1.05"]["half"] > 100
    assert rows["nothing"]["alarms"] == 0
