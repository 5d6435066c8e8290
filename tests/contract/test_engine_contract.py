"""One suite for every engine: the contract of `contract/protocol.py`, and weights before and after a push."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from servers import Server
from tiny import CONTEXT, make_model, perturbed
from transformers import PreTrainedModel

from lockstep.contract.protocol import Completion, Engine, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.rollouts.driver import collect
from lockstep.rollouts.group import Prompt
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch.custody import Record
from lockstep.weights.push import push_weights

END_ID = 0


@pytest.fixture(autouse=True)
def pushed(engine: Engine, untied_dir: str) -> PreTrainedModel:
    """The engine holds the model's weights as version 7 before every test."""
    model = make_model()
    push_weights(model, engine, 7)
    return model


def requests(count: int, sampling: Sampling, *, length: int = 12, seed: int = 0) -> list[GenerationRequest]:
    rng = random.Random(seed)
    return [
        GenerationRequest(
            RequestKey(f"p{i}", 0),
            tuple(rng.randrange(4, 300) for _ in range(length + i % 5)),
            sampling,
            1000 + i,
        )
        for i in range(count)
    ]


def forward_logits(model: PreTrainedModel, completion: Completion) -> torch.Tensor:
    """(tokens, V) logits that predict each token of a completion, from one plain forward."""
    ids = torch.tensor([[*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0]
    return logits[len(completion.prompt_ids) - 1 : -1]


def reference_logprobs(
    logits: torch.Tensor, sampling: Sampling, completion: Completion, step: int
) -> torch.Tensor:
    """The processed distribution, computed from its definition, independently of the engines' code."""
    scores = logits.clone().double()
    before = set(completion.prompt_ids) | set(completion.token_ids[:step])
    for token in before if sampling.repetition_penalty != 1.0 else ():
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in completion.token_ids[:step]:
        scores[token] -= sampling.frequency_penalty
    for token in set(completion.token_ids[:step]):
        scores[token] -= sampling.presence_penalty
    probabilities = (scores / sampling.temperature).softmax(-1)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    keep &= probabilities >= sampling.min_p * probabilities.max()
    order = probabilities.argsort(descending=True)
    if sampling.top_k:
        keep[order[sampling.top_k :]] = False
    if sampling.top_p < 1:
        kept = order[keep[order]]
        mass = probabilities[kept] / probabilities[kept].sum()
        keep[kept[mass.cumsum(0) - mass >= sampling.top_p]] = False
    return torch.where(keep, probabilities, 0.0).div(probabilities[keep].sum()).log()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12),
        Sampling(max_tokens=12, temperature=0.7),
        Sampling(max_tokens=12, temperature=1.3, top_k=5),
        Sampling(max_tokens=12, top_p=0.8),
        Sampling(max_tokens=12, min_p=0.1),
        Sampling(max_tokens=12, temperature=1.5, min_p=0.02, top_k=40, top_p=0.9),
        Sampling(max_tokens=12, repetition_penalty=1.4),
        Sampling(max_tokens=12, presence_penalty=0.8, frequency_penalty=0.6),
    ],
    ids=lambda s: "-".join(
        f"{k}={getattr(s, k)}"
        for k in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
    ),
)
def test_logprobs_are_those_of_the_distribution_sampled(
    engine: Engine, pushed: PreTrainedModel, sampling: Sampling
) -> None:
    answers = engine.generate(requests(8, sampling))
    worst = 0.0
    for completion in answers.values():
        logits = forward_logits(pushed, completion)
        for step, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            expected = reference_logprobs(logits[step], sampling, completion, step)[token]
            worst = max(worst, abs(float(expected) - logprob))
    assert worst < 1e-3


def test_completions_are_found_by_key_whatever_the_order_of_requests(engine: Engine) -> None:
    asked = requests(10, Sampling(max_tokens=6))
    forwards = engine.generate(asked)
    backwards = engine.generate(asked[::-1])
    assert forwards.keys() == backwards.keys() == {request.key for request in asked}
    assert all(forwards[key].token_ids.tolist() == backwards[key].token_ids.tolist() for key in forwards)


def test_a_completion_does_not_depend_on_its_neighbours(engine: Engine) -> None:
    asked = requests(6, Sampling(max_tokens=8))
    together = engine.generate(asked)
    for request in asked:
        assert (
            engine.generate([request])[request.key].token_ids.tolist()
            == together[request.key].token_ids.tolist()
        )


def test_the_prompt_comes_back_as_it_was_sent(engine: Engine) -> None:
    asked = requests(5, Sampling(max_tokens=3))
    answers = engine.generate(asked)
    assert all(answers[request.key].prompt_ids.tolist() == request.prompt_ids.tolist() for request in asked)


def test_each_request_has_its_own_seed(engine: Engine) -> None:
    (request,) = requests(1, Sampling(max_tokens=8))
    copies = [
        GenerationRequest(RequestKey("same", i), request.prompt_ids, request.sampling, 50 + i)
        for i in range(12)
    ]
    first = engine.generate(copies)
    again = engine.generate(copies)
    assert {k: c.token_ids.tolist() for k, c in first.items()} == {
        k: c.token_ids.tolist() for k, c in again.items()
    }
    assert len({tuple(completion.token_ids.tolist()) for completion in first.values()}) > 6


def test_samples_follow_the_distribution(engine: Engine, pushed: PreTrainedModel) -> None:
    (request,) = requests(1, Sampling(max_tokens=1))
    copies = [
        GenerationRequest(RequestKey("same", i), request.prompt_ids, request.sampling, i) for i in range(600)
    ]
    answers = engine.generate(copies)
    with torch.no_grad():
        expected = pushed(torch.tensor(request.prompt_ids)[None]).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in answers.values()]), minlength=len(expected))
    top = expected.argsort(descending=True)[:5]
    spread = (expected[top] * (1 - expected[top]) / 600).sqrt()
    assert bool(((counts[top] / 600 - expected[top]).abs() < 4.5 * spread).all())


def test_finish_reasons_are_the_engines_own(engine: Engine) -> None:
    answers = engine.generate(requests(40, Sampling(max_tokens=60, temperature=2.0)))
    reasons = [completion.finish_reason for completion in answers.values()]
    assert {"stop", "length"} == set(reasons)
    for completion in answers.values():
        ended = completion.token_ids[-1] == END_ID
        assert completion.finish_reason == ("stop" if ended else "length")
        assert END_ID not in completion.token_ids[:-1]
        assert ended or len(completion.token_ids) == 60


def test_a_stop_string_ends_a_completion(engine: Engine, untied_dir: str) -> None:
    tokenizer = load_tokenizer(untied_dir)
    asked = requests(10, Sampling(max_tokens=40))
    plain = engine.generate(asked)
    texts = {k: tokenizer.decode(c.token_ids, skip_special_tokens=True) for k, c in plain.items()}
    key = max(texts, key=lambda k: len(texts[k]))
    stop = next(ch for ch in texts[key] if ch.isascii() and ch.isprintable())
    request = next(r for r in asked if r.key == key)
    stopping = GenerationRequest(key, request.prompt_ids, Sampling(max_tokens=40, stop=(stop,)), request.seed)
    completion = engine.generate([stopping])[key]
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) < len(plain[key].token_ids)
    assert completion.token_ids.tolist() == plain[key].token_ids[: len(completion.token_ids)].tolist()
    assert stop in tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_a_stop_string_may_be_a_special_token(engine: Engine, untied_dir: str) -> None:
    tokenizer = load_tokenizer(untied_dir)
    special = tokenizer.convert_tokens_to_ids("<|user|>")
    (asked,) = requests(1, Sampling(max_tokens=6, logit_bias=((special, 100.0),), stop=("<|user|>",)))
    completion = engine.generate([asked])[asked.key]
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([special], "stop")


@pytest.mark.parametrize("ends", [(), (END_ID,), (5,), (5, 6)], ids=str)
def test_a_request_ends_at_its_own_end_tokens_and_not_at_those_of_the_engines_directory(
    engine: Engine, ends: tuple[int, ...]
) -> None:
    # All three tokens are sampled often. The directory names one of them as its end token.
    biases = tuple((token, 30.0) for token in (END_ID, 5, 6))
    answers = engine.generate(requests(12, Sampling(max_tokens=8, logit_bias=biases, end_ids=ends)))
    due, ended = set(ends or (END_ID,)), 0
    for completion in answers.values():
        assert not due & set(completion.token_ids[:-1].tolist())
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in due)
        ended += completion.finish_reason == "stop"
    assert ended
    found = {int(token) for completion in answers.values() for token in completion.token_ids[:-1]}
    assert {END_ID, 5, 6} - due <= found


def test_requests_may_have_limits_of_their_own(engine: Engine) -> None:
    asked = [
        GenerationRequest(r.key, r.prompt_ids, Sampling(max_tokens=1 + i), r.seed)
        for i, r in enumerate(requests(5, Sampling(max_tokens=1)))
    ]
    answers = engine.generate(asked)
    assert all(len(answers[r.key].token_ids) <= r.sampling.max_tokens for r in asked)
    assert any(len(c.token_ids) == 5 for c in answers.values())


def test_no_request_is_sent_if_one_names_more_ids_than_the_engine_takes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = engine.settings()
    if settings.engine != "vllm":
        pytest.skip("only vLLM has such limits, on GPUs")
    small = replace(settings, request_limits={"bad_words": 2})
    monkeypatch.setattr(engine, "settings", lambda: small)
    monkeypatch.setattr(engine, "serve", pytest.fail)
    over = requests(1, Sampling(max_tokens=1, bad_words=((5,), (6,), (7,))))
    with pytest.raises(InputError, match="bad_words has 3 sequences"):
        engine.generate([*requests(3, Sampling(max_tokens=1, bad_words=((5,), (6,))))[1:], *over])


def test_n_completions_of_a_prompt_form_its_group(engine: Engine, untied_dir: str) -> None:
    tokenizer = load_tokenizer(untied_dir)
    prompts = [Prompt(f"row/{i}", (5 + i, 9, 11, 40), "text") for i in range(3)]
    groups = collect(
        prompts, engine, tokenizer, Sampling(max_tokens=4), Record, num_generations=5, run_seed=1, version=7
    )
    assert [group.prompt.prompt_id for group in groups] == ["row/0", "row/1", "row/2"]
    assert all([r.completion.key.sample for r in g.rollouts] == [0, 1, 2, 3, 4] for g in groups)
    assert all(r.completion.prompt_ids.tolist() == g.prompt.ids.tolist() for g in groups for r in g.rollouts)


def test_an_over_long_prompt_is_refused_by_name_before_anything_starts(engine: Engine) -> None:
    good = requests(2, Sampling(max_tokens=8))
    long = GenerationRequest(RequestKey("row/17", 0), tuple([5] * (CONTEXT - 7)), Sampling(max_tokens=8), 0)
    with pytest.raises(InputError, match=r"row/17 has 505 tokens"):
        engine.generate([*good, long])
    assert len(engine.generate(good)) == 2


def test_a_key_used_twice_is_refused(engine: Engine) -> None:
    (request,) = requests(1, Sampling(max_tokens=2))
    with pytest.raises(InputError, match="occurs twice"):
        engine.generate([request, request])


def test_many_long_prompts_with_seeds_are_answered(engine: Engine) -> None:
    # These are more prompt tokens than fit into one engine step: on vLLM's CPU build a split prefill with a seed fails.
    answers = engine.generate(requests(30, Sampling(max_tokens=2), length=400))
    assert len(answers) == 30


def test_tokens_carry_the_version_that_sampled_them(engine: Engine, pushed: PreTrainedModel) -> None:
    asked = requests(3, Sampling(max_tokens=4))
    assert {v for c in engine.generate(asked).values() for v in c.weight_versions} == {7}
    push_weights(pushed, engine, 8)
    assert engine.version == 8
    assert {v for c in engine.generate(asked).values() for v in c.weight_versions} == {8}


def test_a_push_changes_the_engine_to_the_new_weights_and_back(
    engine: Engine, pushed: PreTrainedModel
) -> None:
    asked = requests(6, Sampling(max_tokens=8))
    original = engine.generate(asked)
    moved = perturbed(pushed, scale=0.5)
    push_weights(moved, engine, 8)
    assert gap(moved, engine.generate(asked)) < 1e-3 < gap(pushed, engine.generate(asked))
    push_weights(pushed, engine, 9)
    assert {k: c.token_ids.tolist() for k, c in engine.generate(asked).items()} == {
        k: c.token_ids.tolist() for k, c in original.items()
    }


def test_nothing_computed_from_older_weights_survives_a_push(engine: Engine, pushed: PreTrainedModel) -> None:
    # The prompt is long enough for several blocks of a prefix cache (fault W6).
    asked = requests(6, Sampling(max_tokens=4), length=150)
    engine.generate(asked)
    moved = perturbed(pushed, scale=0.5)
    push_weights(moved, engine, 8)
    assert gap(moved, engine.generate(asked)) < 1e-3


def gap(model: PreTrainedModel, answers: dict[RequestKey, Completion]) -> float:
    worst = 0.0
    for completion in answers.values():
        logps = forward_logits(model, completion).log_softmax(-1)
        scored = logps[torch.arange(len(completion.token_ids)), torch.tensor(completion.token_ids)]
        worst = max(worst, float((scored - torch.tensor(completion.logprobs)).abs().max()))
    return worst


def test_a_push_does_not_touch_the_trained_model(engine: Engine, pushed: PreTrainedModel) -> None:
    before = {name: parameter.clone() for name, parameter in pushed.named_parameters()}
    for version in range(8, 12):
        push_weights(pushed, engine, version)
    engine.generate(requests(2, Sampling(max_tokens=3)))
    assert all(torch.equal(parameter, before[name]) for name, parameter in pushed.named_parameters())


def test_the_engine_keeps_no_reference_to_the_trainers_weights(
    engine: Engine, pushed: PreTrainedModel
) -> None:
    asked = requests(4, Sampling(max_tokens=6))
    before = engine.generate(asked)
    with torch.no_grad():
        for parameter in pushed.parameters():
            parameter.mul_(1.5)
    engine.reset_caches()
    after = engine.generate(asked)
    assert {k: c.logprobs.tolist() for k, c in before.items()} == {
        k: c.logprobs.tolist() for k, c in after.items()
    }


def test_a_failed_update_closes_the_engine_until_a_whole_one(engine: Engine, pushed: PreTrainedModel) -> None:
    class Broken(torch.nn.Module):
        def named_parameters(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
            named = list(pushed.named_parameters())
            return iter([*named[:3], ("model.layers.0.mlp.no_such_weight", named[3][1])])

    with pytest.raises((LockstepError, KeyError, ValueError, AttributeError)):
        push_weights(Broken(), engine, 8)
    assert engine.version is None
    with pytest.raises(ProofError, match="no committed weights"):
        engine.generate(requests(1, Sampling(max_tokens=2)))
    push_weights(pushed, engine, 9)
    assert gap(pushed, engine.generate(requests(3, Sampling(max_tokens=4)))) < 1e-3


def test_a_generation_that_takes_too_long_is_ended_and_leaves_nothing_behind(engine: Engine) -> None:
    asked = requests(8, Sampling(max_tokens=100))
    limit, engine.timeout = engine.timeout, 0.0  # type: ignore[attr-defined]
    try:
        with pytest.raises(LockstepError, match="did not finish"):
            engine.generate(asked)
    finally:
        engine.timeout = limit  # type: ignore[attr-defined]
    few = requests(2, Sampling(max_tokens=3), seed=9)
    assert engine.generate(few).keys() == {request.key for request in few}


def test_settings_are_read_back(engine: Engine, untied_dir: str) -> None:
    settings = engine.settings()
    assert (settings.model, settings.vocab_size, settings.max_model_len) == (untied_dir, 384, CONTEXT)
    assert (settings.dtype, settings.head_dtype) == (torch.float32, torch.float32)
    assert settings.logprobs_mode == "processed_logprobs"
    assert not settings.sampling_defaults


def test_every_completion_is_handed_over_once_as_it_will_be_answered(engine: Engine) -> None:
    asked = requests(6, Sampling(max_tokens=9))
    seen: list[Completion] = []
    answers = engine.generate(asked, seen.append)
    assert len(seen) == 6
    assert {completion.key: completion for completion in seen} == answers


def longest(engine: Engine) -> GenerationRequest:
    """A request that gets a long completion."""
    asked = requests(6, Sampling(max_tokens=400), seed=9)
    answers = engine.generate(asked)
    return max(asked, key=lambda request: len(answers[request.key].token_ids))


def count_sampled(engine: Engine, request: pytest.FixtureRequest) -> Callable[[], float]:
    """What tells how many tokens the engine has sampled from now on: of one in process, 0 until it has sampled all."""
    if isinstance(engine, VLLMInProcess):
        return lambda: 0.0 if engine.llm.llm_engine.has_unfinished_requests() else math.inf
    server: Server = request.getfixturevalue("server")
    before = server.sampled_tokens()
    return lambda: server.sampled_tokens() - before


def test_short_completions_are_handed_over_while_a_long_one_is_sampled(
    engine: Engine, request: pytest.FixtureRequest
) -> None:
    """Other conversations go on meanwhile.

    An engine that hands over everything at the end has sampled all tokens before.
    """
    if engine.settings().engine == "transformers":
        pytest.skip("samples a batch together and hands it over at its end")
    # Many long ones, so that much is left to sample for as long as this process may be late to hear of the short ones.
    one = longest(engine)
    long = [replace(one, key=RequestKey(f"long {i}", 0)) for i in range(60)]
    short = [replace(r, key=RequestKey(f"short {r.key}", 0)) for r in requests(3, Sampling(max_tokens=2))]
    counts: dict[RequestKey, float] = {}
    sampled = count_sampled(engine, request)
    answers = engine.generate([*short, *long], lambda completion: counts.update({completion.key: sampled()}))
    tokens = sum(len(completion.token_ids) for completion in answers.values())
    assert tokens >= 60 * 100
    assert counts.keys() == answers.keys()
    assert {key for key, _ in list(counts.items())[:3]} == {r.key for r in short}
    assert all(counts[r.key] < 0.9 * tokens for r in short), counts
    assert sampled() > 0.9 * tokens
