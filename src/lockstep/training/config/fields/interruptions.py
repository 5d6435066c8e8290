"""The fields that say when a run interrupts thinking, and with which text.

`OnlineConfig` inherits the fields. `training/config/interruption.py` turns them into ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.errors import InputError
from lockstep.training.config.checks import check_bounds
from lockstep.training.config.option import COUNT, Bounds, option

if TYPE_CHECKING:
    pass

_INTERRUPTION = "\n\nThe time for thinking is over. I will now give my final answer.\n</think>\n\n"


@dataclass
class InterruptionFields:
    """The fields of forced-length interruptions (ScaleRL, arXiv 2510.13786)."""

    max_thinking_length: int | None = option(
        None,
        "Number of tokens after which a completion that still thinks is interrupted and continues to its answer; unset: never.",
        group="sampling",
        bounds=COUNT,
    )
    min_thinking_length: int | None = option(
        None,
        "If set, that number is drawn between this and max_thinking_length; unset: always max_thinking_length.",
        group="sampling",
    )
    interruption: str = option(
        _INTERRUPTION,
        "Text that is inserted after such a completion's tokens, and not learned from; contains end_of_thinking.",
        group="sampling",
    )
    end_of_thinking: str = option(
        "</think>", "Text that ends the thinking of a completion; best a single token.", group="sampling"
    )

    def check_interruption(self, limit: int, stop: list[str]) -> None:
        """Check the fields.

        Args:
            limit: largest number of tokens of a completion.
            stop: strings that end a completion.

        Raises:
            InputError: a completion could not be interrupted, or could not continue after the interruption.
        """
        if self.max_thinking_length is None:
            if self.min_thinking_length is not None:
                raise InputError(f"min_thinking_length={self.min_thinking_length} needs max_thinking_length beside it")
            return
        check_bounds(self, {"min_thinking_length": Bounds(1, self.max_thinking_length)})
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
