"""The tokens that end a completion: the same tokens that vLLM uses. All modules that need them call this function."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokenizer's end token, then the end tokens of the model's generation config, each once."""
    ids = [tokenizer.eos_token_id]
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids += configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))
