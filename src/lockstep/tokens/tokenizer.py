"""Loads the tokenizer, and checks that trainer and engine use one vocabulary.

`models/resolve.py` gives the path. `tokens/chat.py` makes ids with the tokenizer, and rewards get text that it decodes.
Embeddings are never resized. If there is no pad token, an existing token becomes the pad token.
"""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.errors import InputError, one_line
from lockstep.model_files import load_files
from lockstep.tokens.arrays import Ids

_logger = logging.getLogger(__name__)

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with its pad token set.

    Raises:
        InputError: the model has no tokenizer, or the tokenizer has no end-of-sequence token.
    """
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        # Without this check, transformers would make an empty tokenizer of the model's type.
        raise InputError(
            f"model {path} comes without a usable tokenizer: none of {', '.join(_VOCABULARY_FILES)} is there"
        )
    try:
        tokenizer = load_files(AutoTokenizer, path)
    except StrictDataclassError as error:
        # transformers reads the model's config too.
        raise InputError(f"the config.json of model {path} is wrong: {one_line(error)}") from error
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        # Which of these errors transformers raises depends on the missing file.
        raise InputError(f"model {path} comes without a usable tokenizer: {type(error).__name__}: {error}") from error
    return guard_tokenizer(tokenizer)


def guard_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Use the end-of-sequence token as the pad token if there is none. The vocabulary does not change.

    Raises:
        InputError: there is no end-of-sequence token either.
    """
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no end-of-sequence token; completions could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def embedding_rows(model: PreTrainedModel) -> int:
    """Number of token ids that the model can embed."""
    return int(model.get_input_embeddings().weight.shape[0])


def fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the tokenizer's special ids have embeddings, and write the pad id into the model's config.

    Usually the tokenizer is smaller than the embedding, whose rows are padded to a round number. A larger tokenizer has tokens
    without an embedding, which neither the model nor an engine can compute with. Some published models have one that no text gives
    (Gemma 3: the token of an image). Therefore a prompt that has such a token is refused (`check_embedded`), and not the tokenizer.

    Raises:
        InputError: the model cannot embed the pad token or the end token.
    """
    rows = embedding_rows(model)
    for title, needed in (("pad", tokenizer.pad_token_id), ("end-of-sequence", tokenizer.eos_token_id)):
        if needed is not None and needed >= rows:
            raise InputError(
                f"the tokenizer's {title} token has id {needed} but the model embeds only {rows} tokens: give the tokenizer a "
                "token that the model has (embeddings are never resized here: the engine would keep the old vocabulary)"
            )
    if beyond := sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= rows):
        _logger.warning(
            f"the tokenizer has {len(beyond)} tokens that the model cannot embed ({beyond[0][1]!r} with id {beyond[0][0]} first; "
            f"the model embeds {rows}): a prompt with one of them is refused"
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    if model.generation_config is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def check_embedded(ids: Ids, rows: int, what: str) -> None:
    """Refuse ids that a model has no embedding for.

    Args:
        ids: (n,) at least one id.
        rows: number of ids that the model embeds.
        what: where the ids come from, for the message.

    Raises:
        InputError: an id has no embedding.
    """
    if (largest := int(ids.max())) >= rows:
        raise InputError(
            f"{what} has token id {largest} but the model embeds only {rows} tokens: take the text of that token out, or remove "
            "the token from the tokenizer (embeddings are never resized here: the engine would keep the old vocabulary)"
        )
