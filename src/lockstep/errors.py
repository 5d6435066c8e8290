"""The errors that Lockstep raises on purpose. They carry everything a reader needs in the message itself."""

from __future__ import annotations

from collections.abc import Callable


class LockstepError(RuntimeError):
    """Something that Lockstep refuses to go on with."""


class InputError(LockstepError, ValueError):
    """Bad input from outside: a config field, a dataset, a model directory, a reward function."""


class Interrupted(LockstepError):
    """The run was asked to stop, has saved, and can be continued."""


class EngineLost(LockstepError):
    """An engine that served does not answer, or not in order, any more. It may come back, with other weights.

    Args:
        message: which engine, what was asked of it, and what happened.
        recover: waits, bounded, until it answers again; raises `LockstepError` if it does not. What it served before is void.
        refused: whether it did answer, with an error of its own.
    """

    def __init__(self, message: str, recover: Callable[[], None], *, refused: bool = False) -> None:
        self.recover = recover
        self.refused = refused
        super().__init__(message)


class ProofError(LockstepError):
    """A proof of agreement between trainer and engine failed.

    Args:
        check: which proof failed, by the name it has in the receipt (`echo`, `version`, `handshake`, `gap`, …).
        found: what was measured, with the numbers.
        cause: the likely cause, in a sentence.
        fix: the setting or action that mends it.
    """

    def __init__(self, check: str, found: str, cause: str, fix: str) -> None:
        self.check = check
        self.found = found
        self.cause = cause
        self.fix = fix
        super().__init__(f"proof '{check}' failed: {found}\n  likely cause: {cause}\n  what to do: {fix}")
