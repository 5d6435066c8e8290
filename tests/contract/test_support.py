"""Settings that leave no token to sample are found from a tokenizer and a config, and only such settings are."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import make_tokenizer

from lockstep import GRPOConfig, GRPOTrainer
from lockstep.config.sampling import check_end_of_thinking, check_leaves_tokens
from lockstep.contract.distribution import shaped_logits
from lockstep.contract.sampling import Grammar, GrammarCompiler, Sampling
from lockstep.contract.support import Bans
from lockstep.errors import InputError
from lockstep.learn import policy_and_reference

TOKENIZER, END = make_tokenizer(), 0
REGEX = "vllm_structured_outputs_regex"


def ids(text: str) -> list[int]:
    return [TOKENIZER(letter, add_special_tokens=False)["input_ids"][0] for letter in text]


def config(**fields: Any) -> GRPOConfig:
    given = {"bf16": False, "report_to": [], "max_completion_length": 8, "use_vllm": False} | fields
    return GRPOConfig(output_dir="unused", **given)


# What is given, and what the sentence says.
NOTHING: list[tuple[dict[str, Any], str]] = [
    (
        {"allowed_token_ids": [END], "min_tokens": 1},
        "allowed_token_ids and min_tokens leave no token to sample at the beginning of a completion: lower min_tokens, "
        "or allow a token that does not end the completion",
    ),
    (
        {"allowed_token_ids": ids("yn"), "bad_words": ["y", "n"]},
        "allowed_token_ids and bad_words leave no token to sample at the beginning",
    ),
    (
        {"allowed_token_ids": ids("ab"), "bad_words": ["aa", "ab", "ba", "bb"]},
        "allowed_token_ids and bad_words leave no token to sample after",
    ),
    (
        {"structured_outputs_choice": ["y"], "bad_words": ["y"]},
        "structured_outputs_choice and bad_words leave no token to sample at the beginning",
    ),
    (
        {"structured_outputs_choice": ["abc"], "allowed_token_ids": [*ids("ab"), END]},
        "structured_outputs_choice and allowed_token_ids leave no token to sample after 'ab': change one of them",
    ),
    (
        {REGEX: "[0-9]{3}", "allowed_token_ids": ids("0123456789"), "min_tokens": 8},
        "0 to allowed_token_ids, because the completion may end there",
    ),
    (
        {"structured_outputs_json": {"type": "integer"}, "allowed_token_ids": ids("abc")},
        "structured_outputs_json and allowed_token_ids leave no token",
    ),
    (
        {"structured_outputs_grammar": 'root ::= "a" root "b" | "x"', "allowed_token_ids": [*ids("ax"), END]},
        "structured_outputs_grammar and allowed_token_ids leave no token to sample after",
    ),
    ({"allowed_token_ids": [5, 400]}, "allowed_token_ids names token 400; the model's last token is 383"),
]
SOMETHING: list[dict[str, Any]] = [
    {"allowed_token_ids": [END]},
    {"allowed_token_ids": [5, END], "min_tokens": 8},
    {"allowed_token_ids": [5, 6], "logit_bias": {5: -100, 6: -100}},
    {"allowed_token_ids": [*ids("ab"), END], "bad_words": ["aa", "ab", "ba", "bb"]},
    {"structured_outputs_choice": ["y", "n"], "bad_words": ["y"]},
    # The grammar allows nothing but an end before the smallest length: it may be sampled, as in vLLM.
    {REGEX: "[0-9]{3}", "min_tokens": 8},
    {REGEX: "[0-9]+", "allowed_token_ids": ids("0123456789")},
    # A stop string ends the completion where the grammar would have nothing but an end.
    {REGEX: "[0-9]z", "allowed_token_ids": ids("0123456789z"), "stop_strings": ["z"]},
    {"structured_outputs_choice": ["a long text"], "max_completion_length": 2},
    {"bad_words": ["aa"], "min_tokens": 8},
]


@pytest.mark.parametrize(("fields", "said"), NOTHING)
def test_fields_that_leave_no_token_are_named_with_the_place_and_what_to_do(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        check_leaves_tokens(config(**fields), TOKENIZER, 384, [END])


@pytest.mark.parametrize("fields", SOMETHING)
def test_fields_that_leave_a_token_everywhere_are_taken(fields: dict[str, Any]) -> None:
    check_leaves_tokens(config(**fields), TOKENIZER, 384, [END])


def test_a_trainer_refuses_them_before_a_model_is_loaded(
    untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_and_reference, "load_policy", None)
    sizes = {"num_generations": 2, "per_device_train_batch_size": 2}
    given = config(allowed_token_ids=[END], min_tokens=1, **sizes)
    with pytest.raises(InputError, match="allowed_token_ids and min_tokens leave no token"):
        GRPOTrainer(
            untied_dir,
            lambda completions, **_: [0.0] * len(completions),
            given,
            Dataset.from_list([{"prompt": "a"}]),
        )


def test_an_end_of_thinking_that_may_not_be_sampled_is_said(caplog: pytest.LogCaptureFixture) -> None:
    fields = {"max_thinking_length": 3, "interruption": "!", "end_of_thinking": "!"}
    check_end_of_thinking(config(**fields, allowed_token_ids=ids("ab!")), TOKENIZER)
    assert not caplog.text
    check_end_of_thinking(config(**fields, allowed_token_ids=ids("ab")), TOKENIZER)
    assert "allowed_token_ids lacks end_of_thinking='!'" in caplog.text


def test_the_ids_that_are_left_are_those_of_the_engines_distribution() -> None:
    draw, compiler = random.Random(2), GrammarCompiler(TOKENIZER, 384, [END])
    for _ in range(60):
        before = draw.choices(ids("123ab"), k=draw.randint(0, 3))
        sampling = Sampling(
            8,
            allowed_token_ids=draw.choice([None, (END, *ids("12ab")), (*ids("3"), END)]),
            bad_words=tuple(tuple(draw.choices(ids("123ab"), k=draw.randint(1, 2))) for _ in range(2)),
            min_tokens=draw.randint(0, 4),
        )
        mask = None
        if draw.random() < 0.5:
            state = compiler.start(Grammar("regex", "[0-9ab]{0,3}"))
            for token in before:
                state.accept(token)
            mask = state.mask()
        scores = shaped_logits(torch.zeros(384), sampling, (), before, end_ids=[END], grammar_mask=mask)
        left = Bans(sampling, 384, (END,))._left(sampling, before, mask)
        assert left.tolist() == (~scores[0].isneginf()).tolist()


def test_bans_of_few_ids_are_judged_as_every_completion_of_them_is() -> None:
    """Against a search through all completions of three tokens, over drawn settings."""
    draw, judged = random.Random(1), []
    for _ in range(300):
        some = draw.sample(range(6), draw.randint(1, 3))
        words = {tuple(draw.choices(some, k=draw.randint(1, 2))) for _ in range(draw.randint(0, 5))}
        sampling = Sampling(
            3, allowed_token_ids=tuple(some), bad_words=tuple(words), min_tokens=draw.randint(0, 2)
        )

        def has_empty_place(before: tuple[int, ...], own: Sampling = sampling) -> bool:
            if len(before) == 3 or END in before:
                return False
            banned = {word[-1] for word in own.bad_words if word[:-1] == before[-len(word[:-1]) or 3 :]}
            early = {END} if len(before) < own.min_tokens else set()
            left = set(own.allowed_token_ids or ()) - banned - early
            return not left or any(has_empty_place((*before, token)) for token in left)

        try:
            Bans(sampling, 6, (END,)).check(lambda: pytest.fail("there is no grammar"))
            found = False
        except InputError:
            found = True
        assert found == has_empty_place(()), sampling
        judged.append(found)
    assert 50 < sum(judged) < 250
