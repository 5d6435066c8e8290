"""Pictures on two trainer ranks: the same steps as on one, even if one rank has none, or one clear error on both."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accounts import difference
from conftest import needs_vllm
from seeing import save_seeing, seeing_plugin
from seeing_ranks import ALONE, COMPARED, WORK
from servers import KEY, serve
from test_two_ranks import run_ranks
from tiny import CONTEXT

from lockstep.server.keys import KEY_VARIABLE

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).parent / "seeing_ranks.py"
LIMIT = 1e-3
# Figures of a step that do not depend on the last digits of float32.
EQUAL = ("num_tokens", "completions/mean_length", "reward", "reward_std", "parity/checked_tokens")
Found = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("models") / "seeing")


@pytest.fixture(scope="module")
def found(model: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of both ranks, and then of a single one, by piece of work. A hang is a failure."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(SCRIPT)]
    run_ranks(command, [model, str(folder), *WORK], folder, codes=[0, 0])
    run_ranks(command, [model, str(folder), *COMPARED], folder, codes=[0], names=(ALONE,))

    @functools.cache
    def of(name: str) -> list[dict[str, Any]]:
        names = ("0", "1", *([ALONE] if name in COMPARED else []))
        return [torch.load(folder / f"{name}.{rank}.pt") for rank in names]

    return of


@pytest.mark.parametrize(("work", "pictures"), [("on_one_rank", [0, 4]), ("uneven", [3, 1])])
def test_two_ranks_take_the_steps_of_one(work: str, pictures: list[int], model: str, found: Found) -> None:
    one, other, alone = found(work)
    assert one["pictures"] == other["pictures"] == pictures
    for own in (one, other):
        assert all(own["own"])
        assert max(line["parity/max_abs_gap"] for line in own["logs"]) < LIMIT
        assert difference(alone["weights"], own["weights"]) < 1e-5
        for mine, theirs in zip(own["logs"], alone["logs"], strict=True):
            assert all(mine[name] == theirs[name] for name in EQUAL)
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
    for name in ("eval_reward", "eval_parity/checked_tokens"):
        assert (
            one["evaluation"][name] == other["evaluation"][name] == pytest.approx(alone["evaluation"][name])
        )


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("unreadable", "rank 1: prompt train/2: a picture cannot be read"),
        ("other_pixels", "rank 1 has other prompts than rank 0"),
        ("tower_fails", "out of memory, by design"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_the_same_error_on_both(work: str, said: str, found: Found) -> None:
    for own in found(work):
        assert said in own["message"]


@pytest.mark.vllm
@needs_vllm
def test_two_ranks_learn_from_pictures_with_a_real_server(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", seeing_plugin(tmp_path / "plugin"))
    with serve(model, tmp_path, max_model_len=CONTEXT) as server:
        monkeypatch.setenv("TEST_SERVER_URL", server.url)
        monkeypatch.setenv(KEY_VARIABLE, KEY)
        run_ranks(
            [sys.executable, str(SCRIPT)], [model, str(tmp_path), "on_one_rank"], tmp_path, codes=[0, 0]
        )
    one, other = (torch.load(tmp_path / f"on_one_rank.{rank}.pt") for rank in (0, 1))
    assert max(line["parity/max_abs_gap"] for line in one["logs"]) < LIMIT
    assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
    assert one["pictures"] == [0, 4]
