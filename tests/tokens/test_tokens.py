"""Tokenizer guards and chat rendering: ids are made once, and embeddings are never resized."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from datasets import Dataset
from tiny import make_model, make_tokenizer

from lockstep import GRPOConfig
from lockstep.errors import InputError
from lockstep.images.prompts import PromptReader
from lockstep.rollouts.ranks import Ranks
from lockstep.run.data.prompts import read_prompts
from lockstep.tokens.chat import (
    embedding_rows,
    fit_vocabulary,
    guard_tokenizer,
    load_tokenizer,
    render_prompt,
)


def test_a_missing_pad_token_becomes_the_end_token_and_the_vocabulary_stays() -> None:
    tokenizer, model = make_tokenizer(), make_model()
    size, rows = len(tokenizer), embedding_rows(model)
    assert tokenizer.pad_token_id is None
    guard_tokenizer(tokenizer)
    fit_vocabulary(model, tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.pad_token_id
    assert (len(tokenizer), embedding_rows(model)) == (size, rows)


def test_tokens_without_an_embedding_are_taken_with_a_word_and_refused_where_they_are_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer, model = guard_tokenizer(make_tokenizer()), make_model()
    rows = embedding_rows(model)
    fit_vocabulary(model, tokenizer)
    assert not caplog.text
    tokenizer.add_tokens([f"<new{i}>" for i in range(rows - len(tokenizer) + 2)])
    fit_vocabulary(model, tokenizer)
    assert "has 2 tokens that the model cannot embed" in caplog.text
    assert embedding_rows(model) == rows
    first, second = sorted(i for i in tokenizer.get_vocab().values() if i >= rows)
    assert (first, second) == (rows, rows + 1)
    config = GRPOConfig(output_dir="unused", max_completion_length=4, bf16=False)
    (last,) = (token for token, i in tokenizer.get_vocab().items() if i == rows - 1)
    (beyond,) = (token for token, i in tokenizer.get_vocab().items() if i == rows)
    for text in (last, beyond):
        data = {"train": Dataset.from_dict({"prompt": ["what is 1 + 1", f"what {text}"]})}
        with (
            nullcontext()
            if text == last
            else pytest.raises(InputError, match=f"train/1 has token id {rows} but")
        ):
            read_prompts(data, PromptReader(tokenizer), 64, config, Ranks(60.0), vocabulary=rows)


@pytest.mark.parametrize("name", ["pad_token", "eos_token"])
def test_a_special_token_without_an_embedding_is_refused(name: str) -> None:
    tokenizer, model = guard_tokenizer(make_tokenizer()), make_model()
    tokenizer.add_tokens([f"<new{i}>" for i in range(400)])
    setattr(tokenizer, name, "<new399>")
    with pytest.raises(InputError, match="embeds only 384 tokens"):
        fit_vocabulary(model, tokenizer)


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
    ids = render_prompt(
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}], tokenizer
    )
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
