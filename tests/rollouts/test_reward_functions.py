"""Reward models and mixed lists: the score of a text does not depend on the other texts of its batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scored import score_groups
from test_rewards import groups
from tiny import make_model, make_tokenizer, save_model
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from lockstep.errors import InputError
from lockstep.models.reward_model import RewardModel
from lockstep.rollouts.rewards import reward_functions, reward_name

PROMPTS = ["what is 12 + 34? ", "hello ", "the lazy dog jumps over the quick brown fox. ", "a"]
COMPLETIONS = ["46, and so on and on and on", "w", "no", " b c d"]


def classifier(labels: int = 1, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = {
        "vocab_size": 384,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "num_labels": labels,
    }
    config = LlamaConfig(**{**sizes, **settings, "attention_dropout": 0.5, "pad_token_id": None, **fields})
    return LlamaForSequenceClassification(config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "judge-of-texts"
    classifier().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def alone(model: PreTrainedModel, text: str) -> float:
    """The score of one text, without padding and in a forward pass of its own."""
    ids = make_tokenizer()(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, 0])


@pytest.mark.parametrize("budget", [1, 60, 100_000])
def test_a_score_is_that_of_the_text_alone_whatever_the_batch(budget: int) -> None:
    model = classifier()
    found = RewardModel(model, make_tokenizer(), tokens_per_batch=budget)(
        prompts=PROMPTS, completions=COMPLETIONS
    )
    expected = [alone(model, p + c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in found}) == 4


def test_a_model_that_looks_both_ways_does_not_look_at_padding() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=384, num_labels=1, initializer_range=0.5, **sizes)
    )
    found = RewardModel(model, make_tokenizer())(prompts=PROMPTS, completions=COMPLETIONS)
    expected = [alone(model, p + c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert found == pytest.approx(expected, abs=1e-5)


def test_the_tokenizer_adds_nothing_to_prompt_and_completion() -> None:
    model, tokenizer = classifier(), make_tokenizer()
    starts = TemplateProcessing(single="<|system|> $A", special_tokens=[("<|system|>", 1)])
    tokenizer.backend_tokenizer.post_processor = starts
    assert tokenizer("a")["input_ids"][0] == 1
    assert RewardModel(model, tokenizer)(prompts=["a"], completions=["b"]) == pytest.approx(
        [alone(model, "ab")], abs=1e-5
    )


@pytest.mark.parametrize("budget", range(1, 120, 9))
def test_no_forward_pass_is_larger_than_its_budget_but_for_a_single_row(budget: int) -> None:
    model = classifier()
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    RewardModel(model, make_tokenizer(), tokens_per_batch=budget)(prompts=PROMPTS, completions=COMPLETIONS)
    assert sum(rows for rows, _ in shapes) == 4
    assert all(rows == 1 or rows * width <= budget for rows, width in shapes)


def test_messages_go_through_the_models_own_chat_template() -> None:
    model, tokenizer = classifier(), make_tokenizer()
    prompt = [{"role": "user", "content": "hello"}]
    started = [*prompt, {"role": "assistant", "content": "it is "}]
    answer = [{"role": "assistant", "content": "world"}]
    found = RewardModel(model, tokenizer)(prompts=[prompt, started], completions=[answer, answer])
    whole = "<|user|>hello<|end|><|assistant|>{}world<|end|>"
    assert found == pytest.approx(
        [alone(model, whole.format("")), alone(model, whole.format("it is "))], abs=1e-5
    )


def test_dropout_is_off_and_no_gradient_is_kept_even_when_the_owner_trains_the_model() -> None:
    model = classifier()
    reward = RewardModel(model, make_tokenizer())
    first = reward(prompts=PROMPTS, completions=COMPLETIONS)
    model.train()
    assert model.model.layers[0].self_attn.attention_dropout == 0.0
    assert reward(prompts=PROMPTS, completions=COMPLETIONS) == first
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_model_that_returns_no_single_score_a_text_is_refused() -> None:
    model = make_model()
    model.config.num_labels = 1
    with pytest.raises(InputError, match=r"logits of shape \(1, 2, 384\), not \(1, 1\)"):
        RewardModel(model, make_tokenizer())(prompts=["a"], completions=["b"])


def test_a_missing_pad_token_becomes_the_end_token_and_the_model_knows() -> None:
    model, tokenizer = classifier(), make_tokenizer()
    assert tokenizer.pad_token_id is None
    RewardModel(model, tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.pad_token_id
    own = make_tokenizer()
    own.pad_token = "<|system|>"
    RewardModel(model, own)
    assert model.config.pad_token_id == own.pad_token_id != own.eos_token_id


@pytest.mark.parametrize(
    ("make", "prompts", "message"),
    [
        (lambda: classifier(labels=2), ["a"], "with 2 outputs"),
        (classifier, ["a" * 500], "reads 128 tokens; prompt and completion have 501"),
        (classifier, [[{"role": "user", "content": "a"}]], "needs a completion of messages"),
    ],
)
def test_what_a_reward_model_cannot_score_is_one_clear_error(
    make: Any, prompts: list[Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        RewardModel(make(), make_tokenizer())(prompts=prompts, completions=["b"])


def test_messages_without_a_chat_template_and_empty_texts_are_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    reward = RewardModel(classifier(), tokenizer)
    with pytest.raises(InputError, match="has no chat template"):
        reward(
            prompts=[[{"role": "user", "content": "a"}]],
            completions=[[{"role": "assistant", "content": "b"}]],
        )
    with pytest.raises(InputError, match="no tokens together"):
        reward(prompts=["", "a"], completions=["", "b"])
    assert reward(prompts=[], completions=[]) == []


def test_functions_names_and_models_mix_and_keep_their_order(saved: Path) -> None:
    def mine(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    loaded = LlamaForSequenceClassification.from_pretrained(saved)
    other = classifier()
    found = reward_functions([mine, str(saved), loaded, other], [None, None, None, make_tokenizer()])
    assert [reward_name(function) for function in found] == [
        "mine", "judge-of-texts", "judge-of-texts", "LlamaForSequenceClassification"
    ]  # fmt: skip
    scored = score_groups(groups(), found, [1.0] * 4)[1].rollouts[2]
    assert list(scored.scores) == [
        "mine",
        "judge-of-texts_1",
        "judge-of-texts_2",
        "LlamaForSequenceClassification",
    ]
    expected = alone(loaded, "question 1text 12")
    assert list(scored.scores.values()) == pytest.approx([1.0, expected, expected, expected], abs=1e-5)


def test_one_entry_takes_one_tokenizer() -> None:
    assert (
        reward_name(reward_functions(classifier(), make_tokenizer())[0]) == "LlamaForSequenceClassification"
    )


@pytest.mark.parametrize(
    ("given", "tokenizers", "message"),
    [
        ([], None, "no reward function given"),
        (3, None, r"3 \(int\) is neither"),
        ([len, None], None, r"None \(NoneType\) is neither"),
        (torch.nn.Linear(1, 1), None, r"\(Linear\) is neither"),
        ("/no/such/model", None, "does not exist"),
        ([len], [None, None], "2 entries for 1 reward functions"),
        ([len, len], "tokenizer", "1 entries for 2 reward functions"),
    ],
)
def test_what_is_no_reward_function_is_named(given: Any, tokenizers: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reward_functions(given, make_tokenizer() if tokenizers == "tokenizer" else tokenizers)


def test_a_model_from_nowhere_needs_its_tokenizer() -> None:
    with pytest.raises(InputError, match="needs its tokenizer in reward_processing_classes"):
        reward_functions(classifier())


def test_a_language_models_directory_is_refused_and_not_given_a_random_head(tmp_path: Path) -> None:
    save_model(tmp_path / "lm", kind="llama")
    with pytest.raises(InputError, match=r"its files lack score\.weight, which would be random"):
        reward_functions(str(tmp_path / "lm"))


def test_a_classifier_of_two_classes_is_refused_when_loaded(tmp_path: Path) -> None:
    classifier(labels=2).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="one output"):
        reward_functions(str(tmp_path))
