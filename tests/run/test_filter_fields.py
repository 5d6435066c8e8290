"""The fields that shape the sampling distribution: what engines get of them, and which values are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny import make_tokenizer

from lockstep import GRPOConfig, OnlineDPOConfig
from lockstep.config.sampling import bad_word_ids, sampling_of
from lockstep.contract.sampling import Grammar, Sampling
from lockstep.errors import InputError

TOKENIZER = make_tokenizer()
ENDS = (TOKENIZER.eos_token_id, 7)
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}


def sampling(config: type = GRPOConfig, **given: Any) -> Sampling:
    return sampling_of(config(output_dir="unused", bf16=False, **given), TOKENIZER, ENDS)


def test_by_default_nothing_changes_the_distribution() -> None:
    assert sampling() == Sampling(512, end_ids=ENDS)
    assert sampling(OnlineDPOConfig) == Sampling(64, temperature=0.9, end_ids=ENDS)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"top_p": 0.9, "top_k": 50, "min_p": 0.05}, {"top_p": 0.9, "top_k": 50, "min_p": 0.05}),
        (
            {"generation_kwargs": {"top_k": 50, "presence_penalty": 0.5}},
            {"top_k": 50, "presence_penalty": 0.5},
        ),
        ({"top_k": 50, "generation_kwargs": '{"top_k": 50}'}, {"top_k": 50}),
        ({"generation_kwargs": {"do_sample": True, "num_beams": 1, "top_k": 50}}, {"top_k": 50}),
        ({"top_k": 40, "generation_kwargs": {"do_sample": False}}, {"top_k": 1}),
        (
            {"repetition_penalty": 1.1, "frequency_penalty": -0.5},
            {"repetition_penalty": 1.1, "frequency_penalty": -0.5},
        ),
        ({"logit_bias": '{"12": 2, "3": -1.5}'}, {"logit_bias": ((3, -1.5), (12, 2.0))}),
        ({"allowed_token_ids": [4, 9], "min_tokens": 3}, {"allowed_token_ids": (4, 9), "min_tokens": 3}),
        ({"max_kept_ids": 100, "top_k": 5}, {"max_kept_ids": 100, "top_k": 5}),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, {"grammar": Grammar("regex", "[0-9]+")}),
        ({"structured_outputs_json": SCHEMA}, {"grammar": Grammar("json", json.dumps(SCHEMA))}),
        ({"structured_outputs_json": json.dumps(SCHEMA)}, {"grammar": Grammar("json", json.dumps(SCHEMA))}),
        ({"structured_outputs_choice": ["yes", "no"]}, {"grammar": Grammar("choice", '["yes", "no"]')}),
        ({"structured_outputs_grammar": 'root ::= "a"'}, {"grammar": Grammar("grammar", 'root ::= "a"')}),
    ],
)
def test_engines_get_what_the_fields_say(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert sampling(**given) == Sampling(512, end_ids=ENDS, **wanted)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5"),
        ({"temperature": 0.001}, "temperature=0.001"),
        ({"temperature": 2.5}, "temperature=2.5"),
        ({"min_tokens": 513}, "min_tokens=513"),
        ({"max_kept_ids": 0}, "max_kept_ids=0"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias=.*cannot be used"),
        ({"logit_bias": {1: 101.0}}, "logit_bias of token 1"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [4, 4]}, "allowed_token_ids has a token id twice"),
        ({"generation_kwargs": {"do_sample": "no"}}, "do_sample='no'; it must be true or false"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams=2; only 1 is taken: a beam search"),
        ({"generation_kwargs": {"beam_width": 2}}, "unknown key 'beam_width'"),
        ({"generation_kwargs": {"temperature": 0.5}}, "use the field temperature"),
        ({"top_k": 5, "generation_kwargs": {"top_k": 6}}, "top_k is 5, and 6 in generation_kwargs"),
        ({"generation_kwargs": [1]}, "generation_kwargs"),
        ({"vllm_structured_outputs_regex": "[a"}, "regex of the structured outputs cannot be read"),
        ({"vllm_structured_outputs_regex": " "}, "is empty"),
        ({"structured_outputs_json": "{"}, "not valid JSON"),
        ({"structured_outputs_json": {"type": "foo"}}, "json of the structured outputs cannot be read"),
        ({"structured_outputs_choice": ["a", ""]}, "texts that are not empty"),
        ({"structured_outputs_grammar": "root = a"}, "grammar of the structured outputs cannot be read"),
        (
            {"vllm_structured_outputs_regex": "a", "structured_outputs_choice": ["a"]},
            "vllm_structured_outputs_regex and structured_outputs_choice",
        ),
        ({"max_thinking_length": 9, "min_tokens": 3}, "min_tokens would start again"),
        ({"max_thinking_length": 9, "bad_words": ["no"]}, "bad_words would start again"),
    ],
)
def test_a_value_that_no_engine_can_sample_from_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sampling(**given)


def test_bad_words_have_the_ids_that_vllm_gives_them() -> None:
    pytest.importorskip("vllm")
    from vllm import SamplingParams

    TOKENIZER.max_token_id = max(TOKENIZER.get_vocab().values())  # type: ignore[attr-defined]
    words = ["the", " quick", "fox 12", "z", "lazy dog"]
    params = SamplingParams(bad_words=words)
    params.update_from_tokenizer(TOKENIZER)  # type: ignore[arg-type]
    found = bad_word_ids(words, TOKENIZER)
    assert [list(word) for word in found] == params.bad_words_token_ids
    assert len(found) > len(words)


@pytest.mark.parametrize("temperature", [0.0, 0.009, 2.001, 1000.0])
def test_a_config_refuses_a_temperature_that_no_engine_samples_with(temperature: float) -> None:
    """The bounds are those of a request, so that they are asked before a model is loaded."""
    with pytest.raises(InputError, match=r"at least 0\.01 and at most 2"):
        GRPOConfig(output_dir="unused", temperature=temperature)
    with pytest.raises(InputError, match="temperature"):
        Sampling(8, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.01, 2.0])
def test_a_config_takes_the_lowest_and_the_highest_temperature(temperature: float) -> None:
    assert GRPOConfig(output_dir="unused", temperature=temperature).temperature == temperature
    assert Sampling(8, temperature=temperature).temperature == temperature
