"""The errors that Lockstep raises on purpose. They carry everything a reader needs in the message itself."""

from __future__ import annotations


class LockstepError(RuntimeError):
    """Something that Lockstep refuses to go on with."""


class InputError(LockstepError, ValueError):
    """Bad input from outside: a config field, a dataset, a model directory, a reward function."""


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
