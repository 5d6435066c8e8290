"""Finds the earlier turn that the messages of a call extend.

There is one `Turns` per rollout. It finds the longest known beginning of a call's messages; the ids of that turn are
continued.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.contract.protocol import FinishReason
from lockstep.extras.agents.agent_messages import normal_form
from lockstep.tokens.arrays import Ids
from lockstep.tokens.chat import Message


@dataclass(frozen=True, slots=True)
class KnownTurn:
    """A sampled turn, as the end of its conversation.

    Attributes:
        messages: the conversation up to this turn and with it, as the chat template gets it.
        context_ids: (C,) the ids after which the turn was sampled.
        turn_ids: (S,) the sampled ids.
        asked: number of messages before the first sampled turn of the conversation.
        finish_reasons: the finish reason of each assistant's turn after those messages. None: it was not sampled in this rollout.
    """

    messages: tuple[Message, ...]
    context_ids: Ids
    turn_ids: Ids
    asked: int
    finish_reasons: tuple[FinishReason | None, ...]


class Turns:
    """The turns of one rollout, by the messages that they end."""

    def __init__(self) -> None:
        self._turns: dict[bytes, KnownTurn] = {}

    def add(self, turn: KnownTurn, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Remember a turn.

        Args:
            messages: the conversation up to this turn and with it, as the client knows it. Of two turns with equal messages, calls
                extend the later one.
        """
        self._turns[_digests(messages, tools)[-1]] = turn

    def longest(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> KnownTurn | None:
        """The turn whose messages are the longest beginning of `messages`, which go on after it. None: there is none."""
        for digest in reversed(_digests(messages, tools)[:-1]):
            if digest in self._turns:
                return self._turns[digest]
        return None


def _digests(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[bytes]:
    """A digest of each beginning of a conversation: of its first message, of its first two messages, and so on."""
    state = hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16)
    found = []
    for message in messages:
        # A client may send half of a character.
        text = normal_form(message).encode(errors="surrogatepass")
        state.update(len(text).to_bytes(8, "big") + text)
        found.append(state.copy().digest())
    return found
