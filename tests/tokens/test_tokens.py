"""Tokenizer guards and chat rendering: ids are made once, and embeddings are never resized."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import make_model, make_tokenizer

from lockstep.errors import InputError
from lockstep.tokens.chat import render_prompt
from lockstep.tokens.tokenizer import embedding_rows, fit_vocabulary, guard_tokenizer, load_tokenizer


def test_a_missing_pad_token_becomes_the_end_token_and_the_vocabulary_stays() -> None:
    tokenizer, model = make_tokenizer(), make_model()
    size, rows = len(tokenizer), embedding_rows(model)
    assert tokenizer.pad_token_id is None
    guard_tokenizer(tokenizer)
    fit_vocabulary(model, tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.pad_token_id
    assert (len(tokenizer), embedding_rows(model)) == (size, rows)


def test_added_tokens_without_an_embedding_are_refused() -> None:
    tokenizer, model = make_tokenizer(), make_model()
    tokenizer.add_tokens([f"<new{i}>" for i in range(100)])
    with pytest.raises(InputError, match="embeds only 384 tokens"):
        fit_vocabulary(model, tokenizer)
    assert embedding_rows(model) == 384


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="no end-of-sequence token"):
        guard_tokenizer(tokenizer)


def test_a_model_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="comes without a usable tokenizer"):
        load_tokenizer(str(tmp_path))


def test_messages_are_rendered_by_the_template_with_the_generation_prompt() -> None:
    tokenizer = make_tokenizer()
    ids = render_prompt([{"role": "user", "content": "what is 12"}], tokenizer)
    assert tokenizer.decode(ids) == "<|user|>what is 12<|end|><|assistant|>"
    # Special tokens are single ids; they are not tokenised as text.
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|user|>")


def test_a_last_assistant_message_is_continued() -> None:
    tokenizer = make_tokenizer()
    ids = render_prompt([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}], tokenizer)
    assert tokenizer.decode(ids).endswith("world")


def test_plain_text_is_encoded_as_it_stands() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.decode(render_prompt("the quick brown", tokenizer)) == "the quick brown"


@pytest.mark.parametrize("prompt", ["", [], [{"content": "no role"}], 7, None])
def test_a_prompt_that_is_none_is_refused(prompt: object) -> None:
    with pytest.raises(InputError, match="prompt"):
        render_prompt(prompt, make_tokenizer())  # type: ignore[arg-type]


def test_messages_without_a_chat_template_are_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        render_prompt([{"role": "user", "content": "hi"}], tokenizer)
