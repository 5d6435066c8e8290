"""When a run interrupts thinking, and by what: its fields, and what they are in a tokenizer's ids.

Comes from: `training/config.py`, which inherits the fields. Goes to: `rollouts/interruptions.py`, through `training/sampling.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.rollouts.interruptions import Interruption
from lockstep.training.trl_fields import check_bounds, doc

if TYPE_CHECKING:
    from lockstep.training.config import OnlineConfig

_INTERRUPTION = "\n\nThe time for thinking is over. I will now give my final answer.\n</think>\n\n"


@dataclass
class InterruptionFields:
    """The fields of forced-length interruptions (ScaleRL, arXiv 2510.13786)."""

    max_thinking_length: int | None = field(
        default=None,
        metadata=doc(
            "Tokens after which a completion that still thinks is interrupted and goes on to its answer; unset: never."
        ),
    )
    min_thinking_length: int | None = field(
        default=None,
        metadata=doc(
            "Draw the tokens after which it is between this and max_thinking_length; unset: always the latter."
        ),
    )
    interruption: str = field(
        default=_INTERRUPTION,
        metadata=doc("What is put behind such a completion's tokens, and not learned from; holds end_of_thinking."),
    )
    end_of_thinking: str = field(
        default="</think>", metadata=doc("What a completion that has ended its thinking holds; best a single token.")
    )

    def check_interruption(self, limit: int, stop: list[str]) -> None:
        """Check the fields.

        Args:
            limit: most tokens of a completion.
            stop: strings that end one.

        Raises:
            InputError: a completion could not be interrupted, or could not go on from there.
        """
        if self.max_thinking_length is None:
            if self.min_thinking_length is not None:
                raise InputError(f"min_thinking_length={self.min_thinking_length} needs max_thinking_length beside it")
            return
        check_bounds(self, {"max_thinking_length": (1, None), "min_thinking_length": (1, self.max_thinking_length)})
        if self.max_thinking_length >= limit:
            raise InputError(
                f"max_thinking_length={self.max_thinking_length} leaves nothing for an answer within the {limit} tokens of a "
                "completion: lower it, or raise the limit"
            )
        if not self.end_of_thinking.strip():
            raise InputError(f"end_of_thinking={self.end_of_thinking!r}; it must be the text that ends thinking")
        if self.end_of_thinking not in self.interruption:
            raise InputError(
                f"interruption={self.interruption!r} does not hold end_of_thinking={self.end_of_thinking!r}: the completion "
                "would go on thinking"
            )
        for string in stop:
            if string in self.end_of_thinking:
                raise InputError(
                    f"stop_strings: {string!r} ends every completion where its thinking ends ({self.end_of_thinking!r}); leave "
                    "it out, or leave max_thinking_length out"
                )


def interruption_of(config: OnlineConfig, tokenizer: PreTrainedTokenizerBase) -> Interruption | None:
    """What thinking is interrupted by, in ids; None where it never is.

    Raises:
        InputError: the tokenizer makes no tokens of a field's text or an end token, or leaves no room for an answer.
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
    """Check the fields as far as a tokenizer is needed for it, and say where an end of thinking may be missed.

    Raises:
        InputError: as `interruption_of`.
    """
    found = interruption_of(config, tokenizer)
    if found is not None and len(found.end_ids) > 1:
        print(
            f"lockstep: end_of_thinking={config.end_of_thinking!r} is {len(found.end_ids)} tokens of this tokenizer; a completion "
            "that spells it by others is taken for one that still thinks",
            flush=True,
        )
