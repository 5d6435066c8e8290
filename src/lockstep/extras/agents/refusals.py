"""Errors that an agent gets, in OpenAI's error format.

The modules of the gateway raise `Refused`, and the client gets it as a response.
"""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """A call that is answered with an error.

    Args:
        status: HTTP status.
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
