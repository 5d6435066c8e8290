"""Checks the fields of a request that would change what is sampled, and makes the errors that an agent gets.

A run samples from one distribution and trains the same one. A field that asks for another distribution is therefore
refused, and so is every field that the gateway does not know. The client gets a `Refused` as a response in OpenAI's
error format.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.contract.sampling import Sampling


class Refused(Exception):
    """A call that is answered with an error.

    Args:
        message: what was found and what to do.
        code: OpenAI's short name of the error.
        param: the field of the request that is wrong.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_value(param: str, message: str) -> Refused:
    """400: a field has a value that cannot be used."""
    return Refused(400, message, "invalid_value", param)


def unreadable(param: str, error: Exception) -> Refused:
    """400: reading a request raised an error that nobody had thought of."""
    return bad_value(param, f"the request cannot be read: {type(error).__name__}: {error!s:.200}")


def failed(error: BaseException) -> Refused:
    """500: an answer could not be made."""
    return Refused(500, f"the answer could not be made: {type(error).__name__}", "internal_error")


def no_room(message: str) -> Refused:
    """400 with the code of a context that is too long, which agents of most frameworks know."""
    return Refused(400, message, "context_length_exceeded", "messages")


def ended() -> Refused:
    """410: the rollout is over. OpenAI's SDK does not repeat such a call."""
    return Refused(410, "this rollout has ended; calls after its end are not answered", "rollout_ended")


_logger = logging.getLogger(__name__)

# These fields do not change what is sampled. A seed would make all rollouts of a group equal if it had an effect.
_WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "stream_options", "seed",
}  # fmt: skip

# The only values that the gateway can serve, for fields that do not belong to the run's config.
_ONLY: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "background": (False,),
    "include": ([],),
    "logit_bias": ({},),
}

# Fields of the run's config, by the names that requests give them.
_OF_THE_RUN = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What a run allows its agents to ask for.

    Attributes:
        model: the name under which the policy is served. Requests may name another model, because agents often have a
            fixed name.
        sampling: the distribution that the run samples from.
    """

    model: str
    sampling: Sampling
    _told: set[str] = field(default_factory=set, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def tell(self, what: str, text: str) -> None:
        """Log a line the first time that `what` is met."""
        with self._lock:
            if what in self._told:
                return
            self._told.add(what)
        _logger.warning(text)


def check_parameters(request: Mapping[str, Any], understood: set[str], limits: RunLimits) -> None:
    """Check every field of a request, but those that are `understood`.

    Raises:
        Refused: a field asks for another distribution, or is not known.
    """
    for name, value in request.items():
        if value is None or name in understood or name in _WITHOUT_EFFECT:
            continue
        if name in _OF_THE_RUN:
            _check_of_the_run(name, value, limits.sampling)
        elif name not in _ONLY:
            raise Refused(400, f"{name} is not supported; leave it out", "unsupported_parameter", name)
        elif value not in _ONLY[name]:
            raise Refused(
                400, f"{name}={value!r:.80} is not supported; leave it out, or set it to {_ONLY[name][0]!r}",
                "unsupported_value", name,
            )  # fmt: skip


def token_limit(request: Mapping[str, Any], *names: str) -> int | None:
    """The smallest of several limits on the number of sampled tokens; None: there is no limit.

    Raises:
        Refused: a limit is not a whole number above 0.
    """
    given = {name: request[name] for name in names if request.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad_value(name, f"{name}={value!r:.80}; it must be a whole number above 0")
    return min(given.values(), default=None)


def flag(request: Mapping[str, Any], name: str) -> bool:
    """A field that is true, false, or absent (false); a `Refused` if it has another value."""
    value = request.get(name)
    if value not in (None, True, False):
        raise bad_value(name, f"{name}={value!r:.80}; it must be true or false")
    return bool(value)


def _check_of_the_run(name: str, value: Any, sampling: Sampling) -> None:
    ours = getattr(sampling, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value != ours:
        raise Refused(
            400,
            f"{name}={value!r:.80} is not the {name} of this run ({ours:g}): a run samples from one "
            f"distribution and trains the same one. Leave {name} out of the request, or change it in the "
            "run's config",
            "unsupported_value",
            name,
        )
