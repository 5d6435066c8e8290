"""Three processes as ranks: arrays arrive whole, a value for all is encoded once, and no rank waits forever."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as processes

import lockstep.rollouts.ranks as module
from lockstep.errors import LockstepError
from lockstep.rollouts.ranks import Ranks

COUNT = 3
# NaN, an infinity, −0 and a denormal.
UNUSUAL = np.array([0x7FC00001, 0xFF800000, 0x80000000, 1], np.uint32).view(np.float32)


def told(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except LockstepError as error:
        return str(error)


def play(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=COUNT)
    encoded, honest = [], module.encode
    module.encode = lambda value: encoded.append(value) or honest(value)  # type: ignore[func-returns-value]
    ranks, found = Ranks(60.0), {}

    def own(parts: Any) -> list[Any]:
        return [{"rank": r, "mine": part["values"] * 2} for r, part in enumerate(parts)]

    several = ranks.call("own", lambda: {"values": np.arange(rank, dtype=np.int64)}, own)
    found["own"] = [several["rank"], several["mine"].tolist()]
    encoded.clear()
    made = ranks.from_owner("made", lambda: UNUSUAL, lambda values: {"x": values}, lambda sent: sent["x"])
    found["made"] = made.tobytes().hex()
    found["answers encoded"] = len(encoded) - 1
    shared = ranks.share("shared", lambda: np.full(rank, rank == 1))
    found["shared"] = [part.tolist() for part in shared]
    found["cannot be sent"] = told(lambda: ranks.share("odd", lambda: {1, 2} if rank == 2 else 1))
    found["cannot be answered"] = told(lambda: ranks.call("odd", lambda: 0, lambda parts: [object(), 1, 2]))
    found["afterwards"] = ranks.share("afterwards", lambda: rank)
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    processes.spawn(play, args=(str(folder),), nprocs=COUNT)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(COUNT)]


def test_each_rank_gets_its_own_answer_and_parts_of_any_length(found: list[dict[str, Any]]) -> None:
    assert [rank["own"] for rank in found] == [[0, []], [1, [0]], [2, [0, 2]]]
    assert all(rank["shared"] == [[], [True], [False, False]] for rank in found)


def test_what_the_owner_made_arrives_bit_for_bit_and_was_encoded_once_for_all(
    found: list[dict[str, Any]],
) -> None:
    assert {rank["made"] for rank in found} == {UNUSUAL.tobytes().hex()}
    assert [rank["answers encoded"] for rank in found] == [1, 0, 0]


def test_what_cannot_be_sent_is_an_error_on_every_rank_and_the_next_call_works(
    found: list[dict[str, Any]],
) -> None:
    assert all("rank 2: TypeError: set cannot be sent" in rank["cannot be sent"] for rank in found)
    assert all("rank 0: TypeError: object cannot be sent" in rank["cannot be answered"] for rank in found)
    assert all(rank["afterwards"] == [0, 1, 2] for rank in found)
