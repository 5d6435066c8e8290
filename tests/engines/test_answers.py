"""Every request gets its own answer, or an error is raised.

This holds for any order, number and repetition of answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.contract.inbox import check_answers, check_requests, check_scores
from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey, request_seed
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers.messages import completion_from, scores_from, stamps_of
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.tokens.arrays import KeptIds


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
# Each request has an answer, and one request has two.
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


def test_an_id_that_the_model_does_not_have_is_refused() -> None:
    check_answers([request(1)], [answer(request(1))], [3], 100)
    largest = int(answer(request(1)).token_ids.max())
    with pytest.raises(ProofError, match=f"came back with {largest} as a token id"):
        check_answers([request(1)], [answer(request(1))], [3], largest)


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
        # Finite in float64, but not in float32. Log-probs are stored in float32.
        ({"logprobs": (-0.5, -1e39)}, "logprobs"),
        ({"weight_versions": (3, 2)}, "version"),
        # Of a version that nobody has pushed yet, in the whole answer or from its second token on.
        ({"weight_versions": (4, 4)}, "version"),
        ({"weight_versions": (3, 4)}, "version"),
        ({"weight_versions": (-1, -1)}, "version"),
        ({"weight_versions": (2**63 - 1, 2**63 - 1)}, "version"),
        ({"weight_versions": ()}, "logprobs"),
        ({"sampled": (True,)}, "keys"),
        ({"sampled": (False, False)}, "keys"),
    ],
)
def test_a_wrong_answer_names_its_proof(changes: dict[str, object], proof: str) -> None:
    with pytest.raises(ProofError) as caught:
        check_answers([request(1)], [answer(request(1), **changes)], [3])
    assert caught.value.check == proof


STAMPS = {"run:2": 2, "run:3": 3}


def said(*spans: object, **changes: object) -> dict[str, object]:
    """A server's answer to `request(1)`, with two tokens."""
    logprobs = [{"token_id": token, "logprob": -0.5} for token in (7, 8)]
    choice = {
        "token_ids": [7, 8], "finish_reason": "stop", "logprobs": {"content": logprobs}, "weight_versions": list(spans),
    }  # fmt: skip
    return {"request_id": "x/1", "prompt_token_ids": [1, 1, 2], "choices": [choice | changes]}


def span(version: object, start: object, end: object) -> dict[str, object]:
    return {"version": version, "start": start, "end": end}


def test_the_stamps_of_an_answer_become_the_version_of_each_token() -> None:
    found = completion_from(said(span("run:2", 0, 1), span("run:3", 1, 5)), request(1), "x/1", STAMPS)
    assert found.weight_versions.tolist() == [2, 3]


@pytest.mark.parametrize(
    "spans",
    [
        [],
        # Stamps of the future, of another run, and of no run.
        [span("run:4", 0, 2)],
        [span("run:3", 0, 1), span("run:4", 1, 2)],
        [span("other:3", 0, 2)],
        [span("run:-1", 0, 2)],
        [span("run:3.0", 0, 2)],
        [span("3", 0, 2)],
        [span(3, 0, 2)],
        [span(None, 0, 2)],
        # Spans that leave out tokens, overlap, go back, or have no end that a computer can count to.
        [span("run:3", 1, 3)],
        [span("run:2", 0, 1), span("run:3", 2, 3)],
        [span("run:2", 0, 2), span("run:3", 1, 2)],
        [span("run:2", 0, 2), span("run:3", 2, 1)],
        [span("run:3", 0, 1)],
        [span("run:3", 0, -1)],
        [span("run:3", 0, "2")],
        [span("run:3", 0, 2.0)],
        [span("run:3", False, 2)],
    ],
)
def test_stamps_that_no_push_gave_are_refused_by_the_version(spans: list[object]) -> None:
    with pytest.raises(ProofError) as caught:
        completion_from(said(*spans), request(1), "x/1", STAMPS)
    assert caught.value.check == "version"


def test_a_span_without_end_costs_no_memory() -> None:
    found = completion_from(said(span("run:3", 0, 10**15)), request(1), "x/1", STAMPS)
    assert found.weight_versions.tolist() == [3, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_versions": [{}]},
        {"weight_versions": [span(["run:3"], 0, 2)]},
        {"weight_versions": 3},
        {"weight_versions": ["run:3"]},
        {"token_ids": 7},
        {"token_ids": [7, "8"]},
        {"token_ids": [7, 2**70]},
        {"logprobs": []},
        {"logprobs": {"content": [{"token_id": 7}, {"token_id": 8}]}},
        {"logprobs": {"content": [{"token_id": 7, "logprob": "0"}, {"token_id": 8, "logprob": 0}]}},
        {"logprobs": {"content": 5}},
        {"finish_reason": ["stop"]},
    ],
)
def test_an_answer_with_fields_of_other_types_is_one_error(changes: dict[str, object]) -> None:
    broken = said(span("run:3", 0, 2), **changes)
    with pytest.raises(
        LockstepError, match=r"the answer to request x/1|ended with finish reason|0 log-probs"
    ):
        completion_from(broken, request(1), "x/1", STAMPS)
    assert stamps_of(broken) <= {"run:3"}
    scored = broken | {"prompt_logprobs": [None, {"1": {"logprob": "x"}}, {"2": 3}]}
    with pytest.raises(ProofError):
        scores_from(scored, (1, 1, 2), "x/1", STAMPS)


def test_requests_are_refused_before_any_is_started() -> None:
    with pytest.raises(ProofError, match="no committed weights"):
        check_requests([request(1)], None, 100, 400, {})
    with pytest.raises(InputError, match="occurs twice"):
        check_requests([request(1), request(1)], 3, 100, 400, {})
    with pytest.raises(InputError, match="p1 has no tokens"):
        check_requests([replace(request(1), prompt_ids=())], 3, 100, 400, {})
    with pytest.raises(InputError, match="p1 has 3 tokens"):
        check_requests([request(1)], 3, 6, 400, {})
    check_requests([request(1)], 3, 7, 400, {})
    largest = int(request(1).prompt_ids.max())
    check_requests([request(1)], 3, 7, largest + 1, {})
    with pytest.raises(
        InputError, match=f"p1 has token id {largest} but the model embeds only {largest} tokens"
    ):
        check_requests([request(1)], 3, 7, largest, {})


LIMITS = {"allowed_token_ids": 3, "logit_bias": 2, "end_ids": 4, "bad_words": 3, "bad_word_ids": 5}


@pytest.mark.parametrize(
    ("sampling", "more", "said"),
    [
        (
            {"allowed_token_ids": (5, 6, 7)},
            {"allowed_token_ids": (5, 6, 7, 8)},
            "allowed_token_ids names 4 ids; .* most 3",
        ),
        (
            {"logit_bias": ((5, 1.0), (6, 1.0))},
            {"logit_bias": ((5, 1.0), (6, 1.0), (7, 1.0))},
            "names 3 ids; .* most 2",
        ),
        (
            {"end_ids": (1, 2, 3, 4)},
            {"end_ids": (1, 2, 3, 4, 5)},
            "5 ids end a completion; .* most 4 .*RUNNER=0",
        ),
        (
            {"bad_words": ((5,), (6,), (7,))},
            {"bad_words": ((5,), (6,), (7,), (8,))},
            "4 sequences .*NUM_BAD_WORDS=4",
        ),
        (
            {"bad_words": ((5, 6, 7), (8, 9))},
            {"bad_words": ((5, 6, 7), (8, 9, 9))},
            "6 ids together; .*TOKENS=6",
        ),
    ],
)
def test_more_ids_than_the_engine_takes_are_refused_before_any_request_is_started(
    sampling: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    def check(changes: dict[str, Any], least: int, limits: dict[str, int]) -> None:
        asked = replace(request(1), sampling=Sampling(4, min_tokens=least, **changes))
        check_requests([request(2), asked], 3, 100, 400, limits)

    check(sampling, 1, LIMITS)
    with pytest.raises(InputError, match=said):
        check(more, 1, LIMITS)
    check(more, 1, {})
    if "end_ids" in more:
        # vLLM forbids end tokens only before the smallest length.
        check(more, 0, LIMITS)


def test_a_log_prob_that_is_not_finite_is_not_counted_as_one() -> None:
    check_scores({"a": (1, 2, 3)}, {"a": (-0.5, -1.0)})
    for found, said in (
        ((-0.5, float("nan")), "2 log-probs, 1 of them finite; 2 were"),
        ((-0.5,), "1 log-probs, 1 of"),
    ):
        with pytest.raises(ProofError, match=said):
            check_scores({"a": (1, 2, 3)}, {"a": found})


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


TOP_K = Sampling(max_tokens=4, top_k=2)
SETS = KeptIds([7, 9, 3, 8], [2, 4])


def filtered(sampling: Sampling = TOP_K, **changes: object) -> tuple[GenerationRequest, Completion]:
    asked = replace(request(1), sampling=sampling)
    return asked, answer(asked, **{"kept_ids": SETS, **changes})


@pytest.mark.parametrize(
    ("sampling", "changes"),
    [
        (TOP_K, {}),
        # Inserted ids have no set.
        (TOP_K, {"sampled": (True, False), "kept_ids": KeptIds([7, 9], [2])}),
        # Ids of equal logits are all kept.
        (TOP_K, {"kept_ids": KeptIds([6, 7, 9, 8, 9], [3, 5])}),
        (Sampling(4, top_p=0.9), {"kept_ids": KeptIds([7, 9, 8], [2, 3]), "logprobs": (-0.5, 0.0)}),
        (Sampling(4, min_p=0.5), {"logprobs": (-1.3, -0.3)}),
        (Sampling(4), {"kept_ids": None}),
    ],
)
def test_kept_ids_that_fit_their_request_pass(sampling: Sampling, changes: dict[str, object]) -> None:
    asked, found = filtered(sampling, **changes)
    assert check_answers([asked], [found], [3], vocab_size=10)[asked.key] is found


@pytest.mark.parametrize(
    ("sampling", "changes", "message"),
    [
        (TOP_K, {"kept_ids": None}, "does not report which ids"),
        (Sampling(4), {}, "settings have no filter"),
        (TOP_K, {"kept_ids": KeptIds([7, 9], [2])}, "2 sampled tokens and 1 sets"),
        (TOP_K, {"sampled": (True, False)}, "1 sampled tokens and 2 sets"),
        # The sets of two tokens, exchanged.
        (TOP_K, {"kept_ids": KeptIds([3, 8, 7, 9], [2, 4])}, "2 tokens outside .* first one is token 0"),
        (TOP_K, {"kept_ids": KeptIds([7, 9, 3, 9], [2, 4])}, "1 tokens outside .* first one is token 1"),
        # A set with too few ids.
        (TOP_K, {"kept_ids": KeptIds([7, 3, 8], [1, 3])}, "log-prob of that id is not 0"),
        (TOP_K, {"kept_ids": KeptIds([9, 7, 3, 8], [2, 4])}, "not ascending"),
        (TOP_K, {"kept_ids": KeptIds([7, 7, 3, 8], [2, 4])}, "not ascending"),
        (TOP_K, {"kept_ids": KeptIds([7, 10, 3, 8], [2, 4])}, "outside the vocabulary"),
        (TOP_K, {"kept_ids": KeptIds([-1, 7, 3, 8], [2, 4])}, "outside the vocabulary"),
        # The engine sampled from the whole vocabulary.
        (
            TOP_K,
            {"kept_ids": KeptIds([*range(400), 3, 8], [400, 402])},
            "a set of 400 kept ids, with top_k=2",
        ),
        (Sampling(4, min_p=0.5), {"logprobs": (-1.5, -0.3)}, "less likely than min_p=0.5 allows"),
    ],
)
def test_kept_ids_that_contradict_their_request_are_refused(
    sampling: Sampling, changes: dict[str, object], message: str
) -> None:
    asked, found = filtered(sampling, **changes)
    with pytest.raises(ProofError, match=message) as caught:
        check_answers([asked], [found], [3], vocab_size=None if "400" in message else 10)
    assert caught.value.check == "kept_ids"


@pytest.mark.parametrize("kept", [KeptIds([7, 9], [2, 2]), KeptIds([7, 8, 9, 3, 8], [3, 5])])
def test_more_kept_ids_than_allowed_are_an_input_error(kept: KeptIds) -> None:
    asked, found = filtered(Sampling(4, top_p=0.9, max_kept_ids=2), kept_ids=kept)
    with pytest.raises(InputError, match=r"max_kept_ids=2 ids for one token. Set top_k"):
        check_answers([asked], [found], [3])


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "bad_words"])
def test_tokens_that_the_model_does_not_have_are_refused_before_any_request_is_started(name: str) -> None:
    value = {"logit_bias": ((10, 1.0),), "allowed_token_ids": (3, 10), "bad_words": ((3,), (4, 10))}[name]
    asked = replace(request(1), sampling=Sampling(4, **{name: value}))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"{name} names token 10; the model's last token is 9"):
        check_requests([asked], 3, 100, vocab_size=10, limits={})
    check_requests([asked], 3, 100, vocab_size=11, limits={})
