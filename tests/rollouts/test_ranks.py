"""One rank alone needs no process group and keeps its errors.

For several ranks see tests/extras/trl/test_trl_ranks.py.
"""

from __future__ import annotations

import pytest

from lockstep.errors import InputError, ProofError
from lockstep.rollouts.ranks import Ranks


def test_one_rank_is_the_owner_and_gets_its_answer() -> None:
    ranks = Ranks(limit=1.0)
    assert ranks.owner
    assert (ranks.rank, ranks.count) == (0, 1)
    assert ranks.call("double", lambda: 3, lambda parts: [2 * part for part in parts]) == 6


@pytest.mark.parametrize("error", [InputError("bad"), ProofError("echo", "f", "c", "x"), KeyboardInterrupt()])
def test_its_errors_are_raised_as_they_are(error: BaseException) -> None:
    def fail(*_: object) -> list[int]:
        raise error

    for offer, work in ((fail, list), (int, fail)):
        with pytest.raises(type(error)) as caught:
            Ranks(limit=1.0).call("fail", offer, work)  # type: ignore[arg-type]
        assert caught.value is error
