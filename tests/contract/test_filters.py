"""Every engine samples from the distribution that `Sampling` describes, and reports the ids that its filters kept."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
import torch
from by_the_book import kept_set, logprob, shaped
from tiny import make_model, make_tokenizer
from transformers import PreTrainedModel

from lockstep.contract.protocol import Completion, Engine, GenerationRequest, RequestKey
from lockstep.contract.sampling import Grammar, GrammarCompiler, Sampling
from lockstep.errors import InputError, LockstepError
from lockstep.weights.push import push_weights

END_ID = 0
VOCABULARY = 384
TOKENIZER = make_tokenizer()
# Rounding moves a token over the edge of a set only if its probability is this close to the edge.
EDGE = 1e-4
DIGITS = Grammar("regex", "[0-9]{3}( [a-z]{2})?")
# Tokens that a tiny model samples often; at one in five tokens a pair of them follows each other.
COMMON = tuple(range(4, 64))

SETTINGS = {
    "top_k": Sampling(10, top_k=5),
    "top_p": Sampling(10, top_p=0.8),
    "min_p": Sampling(10, min_p=0.1),
    "filters": Sampling(10, temperature=1.5, min_p=0.02, top_k=40, top_p=0.9),
    "repetition_penalty": Sampling(10, repetition_penalty=1.4),
    "counted_penalties": Sampling(10, presence_penalty=0.8, frequency_penalty=-0.6),
    "logit_bias": Sampling(10, logit_bias=((7, 3.0), (9, -2.0), (END_ID, 1.0))),
    "allowed": Sampling(10, allowed_token_ids=COMMON),
    "bad_words": Sampling(10, allowed_token_ids=(5, 6, 7, 8), bad_words=((5,), (6, 7), (7, 7, 8), (8, 8))),
    "min_tokens": Sampling(10, min_tokens=6, logit_bias=((END_ID, 8.0),)),
    "regex": Sampling(10, grammar=DIGITS),
    "grammar_and_top_p": Sampling(
        10, grammar=DIGITS, top_p=0.7, repetition_penalty=1.3, min_tokens=4, temperature=0.7
    ),
    "all": Sampling(
        10,
        temperature=1.2,
        top_k=30,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((12, 2.0),),
        allowed_token_ids=COMMON,
        bad_words=((12,), (13, 14)),
        min_tokens=3,
    ),
}


@pytest.fixture(autouse=True)
def pushed(engine: Engine) -> PreTrainedModel:
    model = make_model()
    push_weights(model, engine, 7)
    return model


def requests(count: int, sampling: Sampling, seed: int = 0) -> list[GenerationRequest]:
    rng = random.Random(seed)
    return [
        GenerationRequest(
            RequestKey(f"p{i}", 0), [rng.randrange(4, 300) for _ in range(8 + i % 3)], sampling, 50 + i
        )
        for i in range(count)
    ]


def check(model: PreTrainedModel, sampling: Sampling, completion: Completion) -> int:
    """Compare a completion with the definition of its distribution.

    Returns how many of its sets differ by an id at an edge.
    """
    prompt, output = completion.prompt_ids.tolist(), completion.token_ids.tolist()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    masks = None
    if sampling.grammar is not None:
        masks = GrammarCompiler(TOKENIZER, VOCABULARY, [END_ID]).masks(sampling.grammar, output)
    assert (completion.kept_ids is not None) == sampling.is_filtered
    edges = 0
    for i, token in enumerate(output):
        mask = None if masks is None else masks[i]
        scores = shaped(logits[i], sampling, prompt, output[:i], [END_ID], mask)
        wanted = kept_set(scores, sampling)
        found = wanted
        if completion.kept_ids is not None:
            found = set(completion.kept_ids.part(i, i + 1).ids.tolist())
            assert kept_set(scores, sampling, -EDGE) <= found <= kept_set(scores, sampling, EDGE)
        assert token in found
        assert completion.logprobs[i] == pytest.approx(logprob(scores, sorted(found), token), abs=1e-4)
        edges += found != wanted
    return edges


@pytest.mark.parametrize("name", SETTINGS)
def test_log_probs_and_kept_ids_are_those_of_the_definition(
    engine: Engine, pushed: PreTrainedModel, name: str
) -> None:
    sampling = SETTINGS[name]
    answers = engine.generate(requests(8, sampling))
    edges = sum(check(pushed, sampling, answer) for answer in answers.values())
    assert edges <= 2
    assert sum(len(answer.token_ids) for answer in answers.values()) > 20


def drawn(rng: random.Random) -> Sampling:
    """Each setting is in force or not, with a drawn value."""

    def maybe(value: object, neutral: object) -> object:
        return value if rng.random() < 0.5 else neutral

    allowed = tuple(rng.sample(range(4, VOCABULARY), 200))
    return Sampling(
        max_tokens=10,
        temperature=rng.choice([0.7, 1.0, 1.4]),
        top_p=maybe(rng.uniform(0.5, 0.99), 1.0),
        top_k=maybe(rng.randrange(1, 80), 0),
        min_p=maybe(rng.uniform(0.0, 0.2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.8, 1.6), 1.0),
        presence_penalty=maybe(rng.uniform(-1.5, 1.5), 0.0),
        frequency_penalty=maybe(rng.uniform(-1.5, 1.5), 0.0),
        logit_bias=maybe(tuple((i, rng.uniform(-3, 3)) for i in rng.sample(range(VOCABULARY), 8)), ()),
        allowed_token_ids=maybe((END_ID, *allowed), None),
        bad_words=maybe(tuple((i,) for i in rng.sample(allowed, 20)), ()),
        min_tokens=maybe(rng.randrange(1, 9), 0),
        grammar=maybe(DIGITS, None),
    )  # type: ignore[arg-type]


def test_requests_of_one_batch_keep_their_own_drawn_distributions(
    engine: Engine, pushed: PreTrainedModel
) -> None:
    """With requests beside them that have no filter, grammar or penalty, and therefore no kept ids."""
    rng = random.Random(3)
    plain = requests(24, Sampling(10))
    samplings = [drawn(rng) if i % 4 else Sampling(10) for i in range(len(plain))]
    # A grammar and drawn ids together may leave nothing to sample.
    samplings = [replace(s, allowed_token_ids=None, bad_words=()) if s.grammar else s for s in samplings]
    asked = [replace(request, sampling=sampling) for request, sampling in zip(plain, samplings, strict=True)]
    answers = engine.generate(asked)
    edges = sum(check(pushed, request.sampling, answers[request.key]) for request in asked)
    assert edges <= 3
    assert sum(s.is_filtered for s in samplings) > 10


@pytest.mark.parametrize(
    ("grammar", "follows"),
    [
        (DIGITS, lambda text: re.fullmatch(DIGITS.spec, text)),
        (Grammar("choice", json.dumps(["yes", 'a "no"', "new\nline"])), ["yes", 'a "no"', "new\nline"].__contains__),
        (Grammar("grammar", 'root ::= "<" [a-c]+ ">"'), lambda text: re.fullmatch("<[abc]+>", text)),
        (
            Grammar("json", json.dumps({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
                                        "additionalProperties": False})),
            lambda text: json.loads(text)["n"] in (1, 2),
        ),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)  # fmt: skip
def test_a_finished_completion_follows_its_grammar(
    engine: Engine, pushed: PreTrainedModel, grammar: Grammar, follows: object
) -> None:
    # Blanks between the parts of a JSON text are allowed and likely: a bias keeps them short.
    blanks = [i for i in range(VOCABULARY) if TOKENIZER.decode([i]).isspace()]
    sampling = Sampling(30, grammar=grammar, logit_bias=tuple((i, -60.0) for i in blanks))
    answers = list(engine.generate(requests(8, sampling)).values())
    finished = [
        TOKENIZER.decode(a.token_ids, skip_special_tokens=True) for a in answers if a.finish_reason == "stop"
    ]
    assert finished
    assert all(follows(text) for text in finished), finished  # type: ignore[operator]
    assert sum(check(pushed, sampling, answer) for answer in answers[:3]) == 0


def test_a_minimum_length_holds_back_end_tokens_and_stop_strings(
    engine: Engine, pushed: PreTrainedModel
) -> None:
    eager = Sampling(12, logit_bias=((END_ID, 90.0),))
    assert {len(a.token_ids) for a in engine.generate(requests(6, eager)).values()} == {1}
    held = engine.generate(requests(6, replace(eager, min_tokens=5)))
    assert {(len(a.token_ids), a.finish_reason) for a in held.values()} == {(6, "stop")}
    # Every token ends a completion, but not among the first five.
    letter = next(i for i in COMMON if len(TOKENIZER.decode([i])) == 1)
    only = Sampling(12, allowed_token_ids=(letter,), stop=(TOKENIZER.decode([letter]),))
    for minimum, length in ((0, 1), (5, 6)):
        answers = engine.generate(requests(2, replace(only, min_tokens=minimum))).values()
        assert {(len(a.token_ids), a.finish_reason) for a in answers} == {(length, "stop")}


def test_more_kept_ids_than_allowed_end_in_an_error_that_names_top_k(engine: Engine) -> None:
    asked = requests(3, Sampling(6, temperature=2.0, top_p=0.99, max_kept_ids=4))
    with pytest.raises(InputError, match=r"max_kept_ids=4 ids for one token. Set top_k"):
        engine.generate(asked)
    # The engine goes on, and a bound on the sets makes them fit.
    bounded = [replace(r, sampling=replace(r.sampling, top_k=4)) for r in asked]
    assert engine.generate(bounded).keys() == {r.key for r in asked}


def test_an_engine_says_that_it_reports_kept_ids_and_which_library_makes_grammars(engine: Engine) -> None:
    found = engine.settings()
    assert (found.kept_ids, found.structured_outputs) == (True, "xgrammar")


def test_what_the_library_of_grammars_would_ignore_is_refused_by_vllm(engine: Engine) -> None:
    if engine.settings().engine != "vllm":
        pytest.skip("vLLM knows what xgrammar ignores")
    ignored = Grammar("json", '{"type": "integer", "multipleOf": 3}')
    with pytest.raises(LockstepError, match="not supported"):
        engine.generate(requests(1, Sampling(6, grammar=ignored)))
    assert len(engine.generate(requests(1, Sampling(6)))) == 1


EMPTY = {
    "allowed_token_ids and min_tokens": Sampling(
        10, allowed_token_ids=(END_ID,), min_tokens=2, end_ids=(END_ID,)
    ),
    "allowed_token_ids and bad_words": Sampling(
        10, allowed_token_ids=(5,), bad_words=((5, 5, 5),), top_k=4, end_ids=(END_ID,)
    ),
    # The grammar allows an end after three digits.
    "vllm_structured_outputs_regex and allowed_token_ids": Sampling(
        10,
        grammar=DIGITS,
        allowed_token_ids=tuple(TOKENIZER("123", add_special_tokens=False)["input_ids"]),
        end_ids=(END_ID,),
    ),
}


@pytest.mark.parametrize("names", EMPTY)
def test_an_engine_says_which_settings_leave_no_token_and_answers_again(engine: Engine, names: str) -> None:
    """A server that follows a grammar answers without the tokens: the error is its refusal, and names the settings."""
    with pytest.raises(LockstepError, match=f"{names} leave no token to sample") as found:
        engine.generate(requests(3, EMPTY[names]))
    told_by_server = engine.settings().engine == "vllm" and not isinstance(found.value, InputError)
    assert not told_by_server or "regex" in names
    assert told_by_server or str(found.value).startswith("prompt p")
    assert len(engine.generate(requests(2, SETTINGS["allowed"]))) == 2
