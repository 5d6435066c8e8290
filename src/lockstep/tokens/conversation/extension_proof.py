"""Proves at start, on random conversations, that conversations of a chat template and a tokenizer can be extended in ids.

It runs once per `Extension`. Each case is a kind of conversation: what the assistant did, and what follows. The proof
renders the whole conversation, and takes from its ids the part that a model would have sampled. Then
`Continuation.next` continues the conversation after this part. With an `Insert`, the sampled and the inserted ids must
together be the template's ids of the whole conversation. With a `Branch`, the ids of the branch must be the template's
ids of the whole conversation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.errors import InputError
from lockstep.tokens.arrays import Ids, joined
from lockstep.tokens.chat import Message
from lockstep.tokens.conversation.continuation import EARLIER_DIFFERS, Branch, Continuation, Insert
from lockstep.tokens.conversation.turns import Conventions, made_up_call, tool_call_field

EXTENDS, BRANCHES, REFUSED = "extends", "branches", "refused"
CALLS = ("call, result", "text and call, result", "two calls, results", "thinking and call, result", "answer, result")
USER_TURN = "answer, user"
CASES = (USER_TURN, "thinking, user", *CALLS)
_PIECES = ("tell me", " ", "\n", "é", "日本", "🙂", "a  b", ".\n\n", "12 + 34", "\t", "<b>", "{}", "I'm", "\u00a0x")
_DRAWS = 6


def proven_cases(continuation: Continuation) -> dict[str, str]:
    """The outcome of each case that the template supports: "extends", "branches: reason" or "refused: reason"."""
    return {case: _outcome(continuation, case) for case in CASES if _applies(continuation.reader.conventions, case)}


def _applies(conventions: Conventions, case: str) -> bool:
    if "thinking" in case and conventions.thinking_field is None:
        return False
    return conventions.shows_calls if "call" in case else case != "answer, result" or not conventions.shows_calls


def _outcome(continuation: Continuation, case: str) -> str:
    if "two calls" in case and continuation.reader.conventions.max_calls == 1:
        return f"{REFUSED}: the template shows one tool call per turn"
    try:
        outcomes = [_proven(continuation, "thinking" in case, *drawn) for drawn in drawn(continuation, case)]
    except InputError as error:
        return f"{REFUSED}: {error}"
    return next((outcome for outcome in outcomes if outcome != EXTENDS), EXTENDS)


def drawn(continuation: Continuation, case: str) -> Iterator[tuple[list[Message], Message, list[Message]]]:
    """Random conversations of a case: the messages before a turn, the turn, and the messages that follow it."""
    conventions, draw = continuation.reader.conventions, random.Random(case)
    for _ in range(_DRAWS):
        question, answer, thought, result = ("".join(draw.choices(_PIECES, k=draw.randint(0, 6))) for _ in range(4))
        calls = [
            made_up_call(conventions, "look_up", {"city": f"P{n} é日本", "count": n}, n)
            for n in range(1 + ("two" in case))
        ]
        last: Message = {"role": "assistant", "content": f"w{answer}n"}
        if conventions.thinking_field is not None and ("thinking" in case or conventions.thinks_first):
            last[conventions.thinking_field] = f"n{thought}t"
        if "call" in case:
            last["content"] = last["content"] if "text" in case else ""
            last["tool_calls"] = [tool_call_field(conventions, call) for call in calls]
        results = [continuation.reader.result(call, result) for call in calls]
        yield (
            [{"role": "user", "content": f"q{question}"}],
            last,
            results if "result" in case else [{"role": "user", "content": result}],
        )


def _proven(
    continuation: Continuation, thinks: bool, asked: list[Message], last: Message, follow: Sequence[Message]
) -> str:
    """The outcome of one conversation.

    Raises:
        InputError: the template refuses the conversation, or the ids are not those of the template.
    """
    template = continuation.template
    before = template.text(asked)
    text, at = continuation.rendered(asked, last, follow)
    # A template may hide the thinking of earlier turns. A model samples the turn as the template shows it while it is the last one.
    own, end = continuation.rendered(asked, last, ()) if thinks else (text, at)
    if not own.startswith(before):
        return f"{BRANCHES}: {EARLIER_DIFFERS}"
    context, whole, suffix = template.ids(before), template.ids(text), template.ids(text[at:])
    cut = len(whole) - len(suffix)
    if not np.array_equal(whole[cut:], suffix):
        raise InputError(
            "the tokenizer encodes the end of a conversation differently alone than within the conversation"
        )
    # The tokenizer may join the end of the prompt with the start of the turn. Then only the texts can be compared.
    joins = not np.array_equal(whole[: len(context)], context) or own[:end] != text[:at]
    turn = template.ids(own[len(before) : end]) if joins else whole[len(context) : cut]

    def is_whole(sampled: Ids, step: Insert | Branch) -> bool:
        ids = step.ids if isinstance(step, Branch) else joined([context, sampled, step.ids])
        return (
            template.tokenizer.decode(ids) == template.tokenizer.decode(whole) if joins else np.array_equal(ids, whole)
        )

    steps = []
    for sampled in (turn, joined([turn, suffix[:1]])):
        step = continuation.next(asked, context, sampled, follow)
        if not is_whole(sampled, step):
            raise InputError(
                "the sampled and the inserted ids together are not the template's rendering of the whole conversation"
            )
        steps.append(step)
    _check_calls(continuation, turn, last)
    return next((f"{BRANCHES}: {step.reason}" for step in steps if isinstance(step, Branch)), EXTENDS)


def _check_calls(continuation: Continuation, turn: Ids, last: Message) -> None:
    if not last.get("tool_calls") or not continuation.reader.reads_calls:
        return
    read = continuation.reader.read(turn).message
    calls, found = (
        [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        for message in (last, read)
    )
    if calls != found:
        raise InputError(f"the calls {calls} are read as {found}: name another format with tool_format")
    if read["content"].split() != last["content"].split():
        raise InputError("the template does not show the text of a turn before its tool calls")
