"""The sampling distribution of a run, as engines take it.

It is made from a config. Requests have it, and the proofs score the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError
from lockstep.training.config.online_config import OnlineConfig


def sampling_of(
    config: OnlineConfig, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], banned_ids: Sequence[int] = ()
) -> Sampling:
    """The sampling distribution of a run.

    Args:
        end_ids: the ids that end a completion (`tokens/end.py`).
        banned_ids: ids that must not be sampled, beside those that the config bans.

    Raises:
        InputError: a bad word has no tokens.
    """
    return Sampling(
        max_tokens=config.completion_limit,
        temperature=config.temperature,
        stop=tuple(config.stop_strings or ()),
        bad_words=(*bad_word_ids(config.bad_words or (), tokenizer), *((token,) for token in banned_ids)),
        end_ids=tuple(end_ids),
        **config.filter_values(),
    )


def bad_word_ids(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], ...]:
    """The ids of each bad word, at the beginning of a text and within it, by vLLM's rule.

    With a space before it, a word counts if the space changes its first token and not the number of its tokens.

    Raises:
        InputError: a word has no tokens.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        if not plain:
            raise InputError(f"bad_words has {word!r}, which has no tokens")
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return tuple(found)
