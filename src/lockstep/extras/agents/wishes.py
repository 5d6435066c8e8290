"""What a request asks of its turn beyond the messages: a tool call, at most one call, JSON, an end at further strings.

None of it changes the distribution that the turn is sampled from. Other servers force a required call or JSON by a grammar. A run
samples all its turns from one distribution and trains the same one, so here the model is free: what it samples is what is learned
from. A turn that lacks what was asked for is answered as it is, and counted (`Counts.unmet`). An agent meets such a turn like any
other malformed answer, and the reward says whether the model does better next time.

They are read from a request. `extras/agents/recording.py` answers by them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.extras.agents.parameters import RunLimits
from lockstep.extras.agents.refusals import bad_value

# OpenAI takes four stop strings. More would make the search for them in each answer slow.
_MOST_STOPS = 16


@dataclass(frozen=True, slots=True)
class Wishes:
    """The wishes of one call.

    Attributes:
        reads_calls: whether tool calls in the turn are given as calls. Otherwise they stay text.
        call: the function that must be called; the empty text: any function; None: none must be.
        one_call: whether the answer may have one tool call at most. Further calls of the turn are left out of the answer.
        is_json: whether the content must be JSON.
        logprobs: whether the answer tells the log-prob of each sampled id.
        stop: strings that end the turn. They are not part of the answer's text.
    """

    reads_calls: bool = False
    call: str | None = None
    one_call: bool = False
    is_json: bool = False
    logprobs: bool = False
    stop: tuple[str, ...] = ()

    def are_met(self, content: str, called: Sequence[str]) -> bool:
        """Whether a turn has what was asked for.

        Args:
            content: its text outside thinking and calls.
            called: names of the functions that it calls, in order.
        """
        if self.call is not None and not (self.call in called if self.call else called):
            return False
        if self.one_call and len(called) > 1:
            return False
        return not self.is_json or bool(called) or _is_json(content)

    def before_stop(self, text: str) -> str:
        """The text before the first stop string."""
        return text[: min((found for stop in self.stop if (found := text.find(stop)) >= 0), default=len(text))]


NO_WISHES = Wishes()


def read_wishes(request: Mapping[str, Any], limits: RunLimits, has_tools: bool) -> Wishes:
    """The wishes of a request of either API.

    Args:
        has_tools: whether the request offers tools.

    Raises:
        Refused: a field has a value that has no meaning.
    """
    reads_calls, call = _tool_choice(request.get("tool_choice"), has_tools)
    parallel = request.get("parallel_tool_calls")
    if parallel not in (None, True, False):
        raise bad_value("parallel_tool_calls", "parallel_tool_calls must be true or false")
    logprobs = request.get("logprobs")
    if logprobs not in (None, True, False):
        raise bad_value("logprobs", "logprobs must be true or false")
    wishes = Wishes(
        reads_calls=reads_calls,
        call=call,
        one_call=parallel is False,
        is_json=_wants_json(request),
        logprobs=bool(logprobs),
        stop=(*limits.sampling.stop, *_stop(request.get("stop"), limits.sampling.stop)),
    )
    _tell(request, wishes, limits)
    return wishes


def _tool_choice(given: Any, has_tools: bool) -> tuple[bool, str | None]:
    """Whether calls are read, and the function that must be called."""
    if given in (None, "auto", "none"):
        return has_tools and given != "none", None
    name: Any = "" if given == "required" else None
    if isinstance(given, Mapping) and given.get("type") == "function":
        # The chat completions API has the name in an object of its own.
        name = given.get("function", given)
        name = name.get("name") if isinstance(name, Mapping) else None
    if not isinstance(name, str) or (given != "required" and not name):
        raise bad_value(
            "tool_choice",
            f"tool_choice={given!r:.80}; it must be 'auto', 'none', 'required', or a function by its name: "
            "{'type': 'function', 'function': {'name': …}}",
        )
    if not has_tools:
        raise bad_value("tool_choice", "tool_choice asks for a tool call, and the request offers no tools")
    return True, name


def _wants_json(request: Mapping[str, Any]) -> bool:
    """Whether `response_format` (chat completions) or `text.format` (responses) asks for JSON."""
    text = request.get("text")
    given = request.get("response_format")
    if text is not None:
        if not isinstance(text, Mapping) or set(text) - {"format", "verbosity"} or text.get("verbosity") is not None:
            raise bad_value("text", f"text={text!r:.80} is not supported; only its field format is")
        given = text.get("format")
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind not in (None, "text", "json_object", "json_schema"):
        raise bad_value("response_format" if text is None else "text", f"the format {given!r:.80} is not supported")
    return kind in ("json_object", "json_schema")


def _stop(given: Any, of_run: Sequence[str]) -> tuple[str, ...]:
    """The stop strings of a request that the run does not have.

    Raises:
        Refused: they are not texts, or too many.
    """
    found = [given] if isinstance(given, str) else given if given is not None else []
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise bad_value("stop", f"stop={given!r:.80}; it must be a text or a list of texts that are not empty")
    if len(found) > _MOST_STOPS:
        raise bad_value("stop", f"stop has {len(found)} strings; at most {_MOST_STOPS} are supported")
    return tuple(dict.fromkeys(text for text in found if text not in of_run))


def _is_json(content: str) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def _tell(request: Mapping[str, Any], wishes: Wishes, limits: RunLimits) -> None:
    if wishes.call is not None:
        limits.tell(
            "tool_choice",
            f"an agent asks for tool_choice={request['tool_choice']!r:.80}: nothing forces the call, because the run samples all "
            "turns from one distribution. Turns without it are answered as they are (agent/unmet counts them)",
        )
    if wishes.is_json:
        limits.tell(
            "response_format",
            "an agent asks for JSON: nothing forces it, because the run samples all turns from one distribution. Turns whose text "
            "is no JSON are answered as they are (agent/unmet counts them)",
        )
    if request.get("seed") is not None:
        limits.tell(
            "seed",
            "an agent sends a seed: it has no effect, because each call has a seed of its own that follows from the rollout's",
        )
