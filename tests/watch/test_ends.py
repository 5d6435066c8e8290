"""The ends proof reads from an answer's ids whether it ended where it should."""

from __future__ import annotations

import pytest
from tiny import make_tokenizer

from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.errors import ProofError
from lockstep.rollouts.driver import decoding
from lockstep.watch.samples import Ends

TOKENIZER = make_tokenizer()
END, OTHER_END = TOKENIZER.eos_token_id, 1
ENDS = Ends((END, OTHER_END), decoding(TOKENIZER, special=True))


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def check(ids: list[int], reason: str, limit: int = 4, prompt: str = "hello", **sampling: object) -> None:
    key = RequestKey("a", 0)
    request = GenerationRequest(key, ids_of(prompt), Sampling(limit, **sampling), 0)  # type: ignore[arg-type]
    answer = Completion(key, request.prompt_ids, ids, [-1.0] * len(ids), [0] * len(ids), reason)  # type: ignore[arg-type]
    ENDS.check(request, answer)


WORLD = ids_of("hello world")


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_an_answer_that_ends_with_an_end_token_has_stopped(end: int) -> None:
    check([7, 8, end], "stop")
    check([7, 8, 9, end], "stop")
    with pytest.raises(ProofError, match="ends"):
        check([7, 8, 9, end], "length")


def test_an_answer_of_the_limit_without_an_end_has_reached_it() -> None:
    check([7, 8, 9, 10], "length")
    with pytest.raises(ProofError, match="neither"):
        check([7, 8, 9, 10], "stop")


@pytest.mark.parametrize(
    ("ids", "reason", "says"),
    [
        ([7, END, 8, 9], "length", "after an end token"),
        ([END, END], "stop", "after an end token"),
        ([7, 8], "stop", "neither an end token"),
        ([7, 8], "length", "has 2"),
        ([7, 8, 9, 10, 11], "length", "at most 4"),
    ],
)
def test_ends_that_were_ignored_removed_or_cut_are_refused(ids: list[int], reason: str, says: str) -> None:
    with pytest.raises(ProofError, match=says):
        check(ids, reason)


def test_a_stop_string_comes_last_and_never_before() -> None:
    size = len(WORLD)
    check(WORLD, "stop", limit=size + 4, stop=("rld",))
    check(WORLD, "stop", limit=size, stop=("rld",))
    with pytest.raises(ProofError, match="after a stop string"):
        check([*WORLD, 7], "length", limit=size + 1, stop=("rld",))
    with pytest.raises(ProofError, match="comes last"):
        check(WORLD, "length", limit=size, stop=("rld",))
    with pytest.raises(ProofError, match="neither"):
        check(WORLD, "stop", limit=size + 4, stop=("xyz",))


def test_a_stop_string_may_be_a_special_token() -> None:
    (user,) = ids_of("<|user|>")
    check([*WORLD, user], "stop", limit=len(WORLD) + 4, stop=("<|user|>",))
    with pytest.raises(ProofError, match="after a stop string"):
        check([*WORLD, user, 7], "length", limit=len(WORLD) + 2, stop=("<|user|>",))


def test_a_stop_string_within_the_first_tokens_does_not_count_there() -> None:
    size = len(WORLD)
    check([*WORLD, 7], "length", limit=size + 1, stop=("rld",), min_tokens=size)
    with pytest.raises(ProofError, match="after a stop string"):
        check([*WORLD, 7], "length", limit=size + 1, stop=("rld",), min_tokens=size - 2)
