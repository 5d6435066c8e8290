"""Turns a config's interruption fields into token ids.

It takes a config and its tokenizer. The result goes to the program that interrupts rollouts
(`rollouts/programs/interruptions.py`).
"""

from __future__ import annotations

import logging

from transformers import PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.rollouts.programs.interruptions import Interruption
from lockstep.training.config.online_config import OnlineConfig

_logger = logging.getLogger(__name__)


def interruption_of(config: OnlineConfig, tokenizer: PreTrainedTokenizerBase) -> Interruption | None:
    """The interruption of thinking, in token ids; None if thinking is never interrupted.

    Raises:
        InputError: the tokenizer makes no tokens, or an end token, from a field's text; or no tokens are left for an answer.
    """
    if config.max_thinking_length is None:
        return None
    ids = {}
    for name in ("interruption", "end_of_thinking"):
        text = getattr(config, name)
        ids[name] = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids[name] or tokenizer.eos_token_id in ids[name]:
            why = "an end token, and a completion ends there" if ids[name] else "no tokens"
            raise InputError(f"{name}={text!r}: the tokenizer makes {why}; give other text")
    found = Interruption(
        config.max_thinking_length, ids["interruption"], ids["end_of_thinking"], config.min_thinking_length
    )
    found.check_room(config.completion_limit)
    return found


def check_end_of_thinking(config: OnlineConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the fields that need a tokenizer, and tell the user if an end of thinking may be missed.

    Raises:
        InputError: a field's text gives no tokens or an end token, or no tokens are left for an answer.
    """
    found = interruption_of(config, tokenizer)
    if found is not None and len(found.end_ids) > 1:
        _logger.warning(
            f"end_of_thinking={config.end_of_thinking!r} is {len(found.end_ids)} tokens of this tokenizer; a "
            "completion that writes it with other tokens counts as still thinking"
        )
