"""Environments for the tests. It imports nothing of Lockstep: a process of its own loads it too."""

from __future__ import annotations

import os
import random
import threading
from typing import Any, Literal

# Beyond the time limit of a test: a wait that does not end early is seen.
NEVER = 3600.0


class Guess:
    """Guess a number; the answer is the column `answer`, or drawn from the seed."""

    def __init__(self) -> None:
        self.made_in = threading.get_ident()
        self.calls = 0

    def reset(self, answer: int | None = None, seed: int = 0, **row: Any) -> str:
        self.answer = random.Random(seed).randint(0, 9) if answer is None else answer
        self.seed, self.row, self.calls, self.right = seed, row, 0, False
        return " The number has one digit."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: What you guess.
        """
        self.calls += 1
        self.right = self.right or number == self.answer
        if number < 0:
            raise ValueError("below 0")
        return "right" if number == self.answer else "higher" if number < self.answer else "lower"

    async def hint(self, kind: Literal["low", "high"] = "low") -> str:
        """Ask for a bound.

        Args:
            kind: Which bound.
        """
        return str(self.answer - 1 if kind == "low" else self.answer + 1)

    def thread(self) -> str:
        """Tell the thread."""
        return str(threading.get_ident() == self.made_in)

    def leave(self) -> str:
        """End the process."""
        os._exit(7)

    def hang(self) -> str:
        """Never come back."""
        threading.Event().wait(NEVER)
        return "never"

    def get_reward(self) -> float:
        return 1.0 if self.right else 0.0

    def _secret(self) -> str:
        return str(self.answer)


class Spoken:
    """Answers each turn as the user, as often as the row says. It may have a tool too."""

    def reset(self, turns: int = 2, how: str = "", seed: int = 0, **row: Any) -> str:
        self.left, self.how, self.seed = turns, how, seed
        self.heard: list[str] = []
        return " Speak."

    def next_user_message(self, answer: str) -> Any:
        self.heard.append(answer)
        if self.how == "raises":
            raise RuntimeError("lost for words")
        if self.how == "hangs":
            threading.Event().wait(NEVER)
        if self.how == "a number":
            return 3
        if self.how == "long":
            return "word " * 10_000
        self.left -= 1
        return None if self.left < 0 else [{"type": "text", "text": f"and {self.left}?<|end|>"}]

    def get_reward(self) -> float:
        return float(len(self.heard))


class SpokenGuess(Spoken):
    """Has a tool beside its words."""

    def multiply(self, a: int, b: int) -> int:
        """The product of two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a * b


def counted(start: int, name: str) -> Any:
    """Makes an environment with arguments."""

    class Counted(Quiet):
        def get_reward(self) -> float:
            return start + len(name)

    return Counted()


class Later(Guess):
    """Gives its reward from a coroutine."""

    async def get_reward(self) -> float:  # type: ignore[override]
        return 0.5


class Quiet:
    """Neither text nor reward."""

    def reset(self, **row: Any) -> None:
        self.row = row

    def look(self) -> str:
        """Look."""
        return "nothing"


class Broken:
    """Does in `reset` or `get_reward` what the row says."""

    def reset(self, how: str = "", **row: Any) -> Any:
        self.how = how
        if how == "reset raises":
            raise RuntimeError("no board")
        if how == "reset leaves":
            raise SystemExit(2)
        if how == "reset hangs":
            threading.Event().wait(NEVER)
        return {"a picture": [{"type": "image"}], "a number": 3}.get(how)

    def get_reward(self) -> Any:
        if self.how == "reward raises":
            raise RuntimeError("no score")
        if self.how == "reward hangs":
            threading.Event().wait(NEVER)
        return {
            "text": "good",
            "infinite": float("inf"),
            "nan": float("nan"),
            "none": None,
            "true": True,
        }.get(self.how, 0.25)


class NeverMade:
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class NeverReset:
    def look(self) -> str:
        """Look."""
        return "nothing"


def named_quiet() -> Quiet:
    return Quiet()
