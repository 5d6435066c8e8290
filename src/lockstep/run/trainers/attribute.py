"""One public attribute of a trainer that TRL's trainers have too: what it reads from the run, and what an assignment does.

Nothing is stored twice: an attribute reads what the run itself uses. So an assignment either changes that, or is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.errors import InputError

Read = Callable[[Any], Any]
Write = Callable[[Any, Any], None]


class Attribute:
    """A data descriptor.

    Args:
        read: gives the value for a trainer; or the name of an attribute of its config. If that config has no such attribute, the
            trainer does not have this one either (`AttributeError`).
        write: takes a new value; None: an assignment is refused.
        instead: what to do instead of an assignment that is refused, as an imperative.
    """

    def __init__(self, read: Read | str, *, write: Write | None = None, instead: str | None = None) -> None:
        self._read, self._write = read, write
        self._instead = instead or (f"set {read} in the config" if isinstance(read, str) else "")
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @property
    def acts(self) -> bool:
        """Whether an assignment changes the run."""
        return self._write is not None

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        """The value; of the class, the descriptor itself.

        Raises:
            AttributeError: the method has no such attribute.
        """
        if trainer is None:
            return self
        if callable(self._read):
            return self._read(trainer)
        try:
            return getattr(trainer.config, self._read)
        except AttributeError:
            raise AttributeError(f"{type(trainer).__name__} has no attribute {self._name!r}") from None

    def __set__(self, trainer: Any, value: Any) -> None:
        """Take a new value.

        Raises:
            AttributeError: the method has no such attribute.
            InputError: the run cannot take the value, or no other value at all.
        """
        self.__get__(trainer)
        if self._write is None:
            advice = f"{self._instead}, and make a new trainer" if self._instead else "make a new trainer"
            raise InputError(f"trainer.{self._name} cannot be changed, because the run would not follow it: {advice}")
        self._write(trainer, value)


class OnceGiven:
    """A data descriptor for what `transformers.Trainer` sets once: what was given then stays.

    Args:
        instead: what to do instead of a later assignment, as an imperative.
    """

    def __init__(self, instead: str) -> None:
        self._instead, self._name = instead, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        """What was given; of the class, the descriptor itself."""
        if trainer is None:
            return self
        try:
            return vars(trainer)[self._name]
        except KeyError:
            raise AttributeError(f"{type(trainer).__name__} has no attribute {self._name!r} yet") from None

    def __set__(self, trainer: Any, value: Any) -> None:
        """Take the value, the first time.

        Raises:
            InputError: there is a value already.
        """
        if self._name in vars(trainer) and value is not vars(trainer)[self._name]:
            raise InputError(
                f"trainer.{self._name} cannot be changed, because its rows were read when the trainer was made: {self._instead}"
            )
        vars(trainer)[self._name] = value


class Absent:
    """A descriptor for a name that TRL's trainers have and ours do not. `hasattr` is False.

    Args:
        why: the reason, and what to use instead.
    """

    def __init__(self, why: str) -> None:
        self.why, self._name = why, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        """Raises:
        AttributeError: always, with the reason.
        """
        owner = kind if trainer is None else type(trainer)
        raise AttributeError(f"{owner.__name__ if owner else 'the trainer'} has no {self._name}: {self.why}")
