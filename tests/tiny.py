"""Tiny models and a tokenizer that the tests make themselves: random weights, nothing downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT = 512


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with an end token, a chat template and no pad token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[END, "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog", "what is 12 + 34", "hello world"], trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE)


KINDS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def make_model(
    kind: str = "qwen2", *, tied: bool = False, seed: int = 0, scale: float = 0.3, **more: object
) -> PreTrainedModel:
    """A model of two layers with random weights; `more` are further fields of its config.

    The weights are scaled up so that the distributions are not flat and faults have a visible effect.
    """
    settings = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "initializer_range": scale,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
        **more,
    }
    config = KINDS[kind](**settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = 0
    draw_biases(model, scale)
    return model


@torch.no_grad()
def draw_biases(model: PreTrainedModel, scale: float) -> None:
    """Biases are initialised to zero; with zeros no test would detect a bias that is lost."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=scale)


def make_stateful(width: int = 32, *, scale: float = 0.3) -> PreTrainedModel:
    """A model of two layers without attention, which keep a state from token to token."""
    config = MambaConfig(
        vocab_size=384, hidden_size=width, state_size=4, num_hidden_layers=2, initializer_range=scale
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save_model(folder: Path, **kwargs: object) -> Path:
    """A model directory that transformers and vLLM load."""
    return save(make_model(**kwargs), folder)  # type: ignore[arg-type]


def save(model: PreTrainedModel, folder: Path) -> Path:
    """A model directory for a model that was already made."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def perturbed(model: PreTrainedModel, scale: float = 0.05, seed: int = 1) -> PreTrainedModel:
    """A copy of a model in which every weight is changed slightly."""
    copy = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter += scale * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator)
    return copy


def talkative(folder: Path) -> str:
    """A tiny model that sometimes samples its end token: completions differ in length, and some are cut."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[model.config.eos_token_id] *= 1.5
    return str(save(model, folder))
