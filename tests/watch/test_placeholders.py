"""No placeholder of a picture is sampled. Inserted ids may show pictures."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.contract.protocol import Completion, RequestKey
from lockstep.errors import ProofError
from lockstep.watch.custody import check_placeholders

PLACEHOLDERS = (7, 9)


def completion(sampled: list[bool] | None) -> Completion:
    ids = (5, 6, 9)
    return Completion(
        RequestKey("p", 3),
        (1, 7, 2),
        ids,
        (-1.0,) * 3,
        (0,) * 3,
        "length",
        sampled=None if sampled is None else np.array(sampled),
    )


@pytest.mark.parametrize("sampled", [None, [False, True, True]])
def test_a_sampled_placeholder_is_refused(sampled: list[bool] | None) -> None:
    fine = completion([True, True, False])
    with pytest.raises(ProofError, match=r"completion p#3 has id 9, the placeholder of pictures") as found:
        check_placeholders([fine, completion(sampled)], PLACEHOLDERS)
    assert found.value.check == "placeholder"


def test_an_inserted_placeholder_and_a_run_without_pictures_pass() -> None:
    check_placeholders([completion([True, True, False])], PLACEHOLDERS)
    check_placeholders([completion(None)], ())
