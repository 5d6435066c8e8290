"""Every request gets its own answer, or there is an error: for any order, number or repetition of answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.engines.answers import check_answers, check_requests
from lockstep.engines.protocol import Completion, GenerationRequest, RequestKey, Sampling, request_seed
from lockstep.errors import InputError, ProofError


def request(prompt: int, sample: int = 0) -> GenerationRequest:
    return GenerationRequest(RequestKey(f"p{prompt}", sample), (prompt, 1, 2), Sampling(max_tokens=4), prompt)


def answer(asked: GenerationRequest, **changes: object) -> Completion:
    whole = Completion(asked.key, asked.prompt_ids, (7, 8), (-0.5, -0.1), (3, 3), "stop")
    return replace(whole, **changes)  # type: ignore[arg-type]


@given(st.permutations(range(6)))
def test_any_order_of_answers_gives_the_same_result(order: list[int]) -> None:
    asked = [request(i // 2, i % 2) for i in range(6)]
    found = check_answers(asked, [answer(asked[i]) for i in order], [3])
    assert all(found[r.key].prompt_ids.tolist() == r.prompt_ids.tolist() for r in asked)


@given(st.lists(st.integers(0, 5), max_size=9))
# Each was answered, one of them twice.
@example([0, 1, 2, 3, 4, 4])
def test_every_other_multiset_of_answers_is_refused(given_answers: list[int]) -> None:
    asked = [request(i) for i in range(5)]
    universe = [*asked, request(99)]
    answers = [answer(universe[i]) for i in given_answers]
    if sorted(given_answers) == list(range(5)):
        assert len(check_answers(asked, answers, [3])) == 5
    else:
        with pytest.raises(ProofError, match="keys"):
            check_answers(asked, answers, [3])


@pytest.mark.parametrize(
    ("changes", "proof"),
    [
        ({"prompt_ids": (0, 1, 2, 2)}, "echo"),
        ({"prompt_ids": (1, 1, 3)}, "echo"),
        ({"token_ids": (), "logprobs": (), "weight_versions": ()}, "keys"),
        ({"token_ids": (7, -1)}, "keys"),
        ({"logprobs": (-0.5,)}, "logprobs"),
        ({"logprobs": (-0.5, float("nan"))}, "logprobs"),
        ({"logprobs": (-0.5, float("-inf"))}, "logprobs"),
        # Finite, but not in the float32 that log-probs are kept in.
        ({"logprobs": (-0.5, -1e39)}, "logprobs"),
        ({"weight_versions": (3, 2)}, "version"),
        ({"weight_versions": ()}, "logprobs"),
        ({"sampled": (True,)}, "keys"),
        ({"sampled": (False, False)}, "keys"),
    ],
)
def test_a_wrong_answer_names_its_proof(changes: dict[str, object], proof: str) -> None:
    with pytest.raises(ProofError) as caught:
        check_answers([request(1)], [answer(request(1), **changes)], [3])
    assert caught.value.check == proof


def test_requests_are_refused_before_any_is_started() -> None:
    with pytest.raises(ProofError, match="no committed weights"):
        check_requests([request(1)], None, 100)
    with pytest.raises(InputError, match="occurs twice"):
        check_requests([request(1), request(1)], 3, 100)
    with pytest.raises(InputError, match="p1 has no tokens"):
        check_requests([replace(request(1), prompt_ids=())], 3, 100)
    with pytest.raises(InputError, match="p1 has 3 tokens"):
        check_requests([request(1)], 3, 6)
    check_requests([request(1)], 3, 7)


def test_seeds_differ_by_run_version_prompt_and_sample() -> None:
    seeds = {
        request_seed(run, version, RequestKey(prompt, sample))
        for run in range(3)
        for version in range(3)
        for prompt in ("1", "11")
        for sample in range(3)
    }
    assert len(seeds) == 54
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_a_greedy_temperature_is_refused() -> None:
    with pytest.raises(InputError, match="temperature"):
        Sampling(max_tokens=1, temperature=0.0)
