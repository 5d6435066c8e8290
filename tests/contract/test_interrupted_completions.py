"""Interrupted completions on every engine: the sampled tokens have the log-probs of the trainer's own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_engine_contract import forward_logits
from tiny import CONTEXT, make_model
from transformers import PreTrainedModel

from lockstep.contract.protocol import Completion, Engine
from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError
from lockstep.rollouts.conversation import single_turn
from lockstep.rollouts.driver import collect
from lockstep.rollouts.group import Prompt
from lockstep.rollouts.programs.interruptions import Interruption, interrupted
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch.custody import Record
from lockstep.weights.push import push_weights

AFTER, LIMIT = 6, 24
INSERTED = (77, 78, 79)
PROMPTS = [Prompt(f"row/{i}", (5 + i, 9, 11, 40), "text") for i in range(4)]


@pytest.fixture(autouse=True)
def pushed(engine: Engine) -> PreTrainedModel:
    model = make_model()
    push_weights(model, engine, 7)
    return model


def sample(
    engine: Engine,
    model: str,
    interruption: Interruption | None,
    prompts: Sequence[Prompt] = PROMPTS,
    **sampling: Any,
) -> dict[Any, Completion]:
    limits = Sampling(**{"max_tokens": LIMIT, **sampling})
    groups = collect(
        prompts,
        engine,
        load_tokenizer(model),
        limits,
        Record,
        num_generations=6,
        run_seed=1,
        version=7,
        program=single_turn if interruption is None else interrupted(interruption, limits),
    )
    return {r.completion.key: r.completion for group in groups for r in group.rollouts}


def said_by_some(plain: dict[Any, Completion]) -> int:
    """A token that some completions have said by the time of their interruption, and others have not."""
    begins = [set(c.token_ids[:AFTER].tolist()) for c in plain.values()]
    return max(
        set().union(*begins) - {0},
        key=lambda token: min(n := sum(token in b for b in begins), len(begins) - n),
    )


def test_sampled_tokens_have_the_trainers_log_probs_and_the_others_are_those_put_in(
    engine: Engine, pushed: PreTrainedModel, untied_dir: str
) -> None:
    plain = sample(engine, untied_dir, None)
    end = said_by_some(plain)
    found = sample(engine, untied_dir, Interruption(AFTER, INSERTED, (end,)))
    ways = set()
    for key, c in found.items():
        begun = plain[key].token_ids[:AFTER].tolist()
        # The same seeds: the beginning is the one that would have been sampled anyway.
        assert c.token_ids[:AFTER].tolist() == begun
        whole = len(plain[key].token_ids) <= AFTER and plain[key].finish_reason == "stop"
        thinks = end not in begun and not whole
        ways.add("whole" if whole else "interrupted" if thinks else "goes on")
        mask = [not (thinks and AFTER <= i < AFTER + len(INSERTED)) for i in range(len(c.token_ids))]
        assert (c.sampled is not None and c.sampled.tolist() == mask) if thinks else c.sampled is None
        assert tuple(c.token_ids[AFTER : AFTER + len(INSERTED)].tolist()) == INSERTED or not thinks
        assert len(c.token_ids) <= LIMIT
        assert c.prompt_ids.tolist() == plain[key].prompt_ids.tolist()
        assert set(c.weight_versions) == {7}
        assert c.finish_reason == ("stop" if c.token_ids[-1] == 0 else "length")
        assert c.finish_reason == "stop" or len(c.token_ids) == LIMIT
        own = forward_logits(pushed, c).log_softmax(-1)[torch.arange(len(mask)), torch.tensor(c.token_ids)]
        for logp, expected, sampled in zip(c.logprobs, own.tolist(), mask, strict=True):
            assert abs(logp - expected) < 1e-3 if sampled else logp == 0.0
    assert {"interrupted", "goes on"} <= ways


def test_a_stop_string_across_two_parts_is_seen(engine: Engine, untied_dir: str) -> None:
    tokenizer = load_tokenizer(untied_dir)
    plain = sample(engine, untied_dir, None)

    def text(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    for end in {token for c in plain.values() for token in c.token_ids[:AFTER].tolist()} - {0}:
        interruption = Interruption(AFTER, INSERTED, (end,))
        going_on = sample(engine, untied_dir, interruption)
        for key, c in going_on.items():
            before, after = text(c.token_ids[:AFTER]), text(c.token_ids[AFTER:])
            if c.sampled is not None or len(c.token_ids) < AFTER + 3 or not (before and after):
                continue
            stop = before[-1] + after[0]
            if (
                not stop.isascii()
                or stop in before
                or text(c.token_ids[: AFTER + 1]) != before + text(c.token_ids[AFTER:][:1])
            ):
                continue
            stopped = sample(engine, untied_dir, interruption, stop=(stop,))[key]
            assert stopped.finish_reason == "stop"
            assert stopped.token_ids.tolist() == c.token_ids[: len(stopped.token_ids)].tolist()
            assert stop in text(stopped.token_ids)
            assert stop not in text(stopped.token_ids[:-1])
            return
    pytest.fail("no completion continues with a letter")


def test_a_prompt_that_only_the_first_part_would_fit_behind_is_refused_before_anything_starts(
    engine: Engine, untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = replace(PROMPTS[0], ids=(5,) * (CONTEXT - LIMIT + 1))
    real, calls = engine.serve, []
    monkeypatch.setattr(engine, "serve", lambda inbox: calls.append(1) or real(inbox))
    with pytest.raises(
        InputError, match=rf"row/0 has {CONTEXT - LIMIT + 1} tokens: with up to {LIMIT} new tokens"
    ):
        sample(engine, untied_dir, Interruption(AFTER, INSERTED, (1,)), [long])
    assert calls == []
    fits = replace(long, ids=long.ids[1:])
    assert len(sample(engine, untied_dir, Interruption(AFTER, INSERTED, (1,)), [fits])) == 6
