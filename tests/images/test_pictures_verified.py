"""`lockstep verify` on a model that reads pictures: rows with pictures, and faults that the proofs must catch.

CI has one family on vLLM. The other one is tested before a release.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import VLLM
from seeing import let_vllm_see, save_seeing
from stages import config

from lockstep.cli.main import main
from lockstep.extras.selftest.picture_faults import PICTURE_FAULTS
from lockstep.extras.selftest.self_test import run_self_test
from lockstep.extras.verify.stage import open_stage

# The proof that catches each fault. W6b is caught at the push, before a picture is used.
CAUGHT_BY = {
    "T3": "echo",
    "T3b": "gap",
    "T3c": "gap",
    "T3d": "gap",
    "T3e": "gap",
    "T3f": "gap",
    "T3g": "gap",
    "T3h": "placeholder",
    "W6b": "caches",
}


@pytest.mark.parametrize(
    ("family", "engine", "left_out"),
    [
        ("qwen2_5_vl", "transformers", {"T3", "W6b"}),
        # Its parts of pictures have no axes.
        pytest.param("smolvlm", "transformers", {"T3", "W6b", "T3g"}, marks=pytest.mark.release),
        pytest.param("qwen2_5_vl", "vllm", set(), marks=[*VLLM, pytest.mark.long]),
        pytest.param("smolvlm", "vllm", {"T3g"}, marks=[*VLLM, pytest.mark.release]),
    ],
)
def test_every_fault_of_pictures_is_caught(
    family: str, engine: str, left_out: set[str], tmp_path: Path
) -> None:
    uses_vllm = engine == "vllm"
    if uses_vllm:
        let_vllm_see(family)
    model = save_seeing(tmp_path / "seeing", family)
    with open_stage(model, config(tmp_path / "run", use_vllm=uses_vllm, bf16=False), pictures=True) as stage:
        control, *verdicts = run_self_test(stage, lambda name: None, PICTURE_FAULTS)
    assert not control.caught_by, control.message
    assert {v.id for v in verdicts if v.skipped} == left_out
    assert {v.id: v.caught_by for v in verdicts if not v.skipped} == {
        name: proof for name, proof in CAUGHT_BY.items() if name not in left_out
    }


@pytest.mark.parametrize("plain", [False, True])
def test_a_model_that_reads_pictures_passes_every_row(plain: bool, tmp_path: Path) -> None:
    model, file = save_seeing(tmp_path / "seeing"), tmp_path / "rows.json"
    words = [
        "verify",
        "--model",
        model,
        "--engine",
        "transformers",
        "--dtype",
        "float32",
        "--json",
        str(file),
    ]
    assert main([*words, *(["--plain_prompts"] if plain else [])]) == 0
    rows = [row["proof"] for row in json.loads(file.read_text())["rows"]]
    assert rows[-2:] == ["training step, with pictures", "exact accounting, with pictures"]
