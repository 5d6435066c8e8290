"""The tokens that end a completion. All modules that need them call `end_ids`. Every request names them (`Sampling.end_ids`)."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.model_files import load_files


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokenizer's end token, then the end tokens of the model's generation config, each once.

    Ids of the generation config that the model cannot sample are left out.
    """
    ids = _listed(tokenizer.eos_token_id)
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    vocabulary = model.config.get_text_config().vocab_size
    ids += [i for i in _listed(configured) if i < vocabulary]
    return tuple(dict.fromkeys(int(i) for i in ids))


def directory_end_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The end tokens that a model directory names.

    Args:
        tokenizer: the tokenizer of the directory.
    """
    try:
        configured = load_files(GenerationConfig, path).eos_token_id
    except OSError:
        # The directory has no generation config.
        configured = None
    return {tokenizer.eos_token_id, *_listed(configured)}


def _listed(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
