"""A server of OpenEnv for the tests: a number to guess. It runs in the Python that has OpenEnv, and writes its port."""

from __future__ import annotations

import random
import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class Guess(Action):
    """Guess the number."""

    number: int = Field(description="What you guess.")


class Word(Action):
    """Say a word."""

    text: str


class Seen(Observation):
    hint: str = ""


class Number(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, limit: int = 9, **_: Any) -> Seen:
        self._number = random.Random(seed).randint(0, limit)
        return Seen(hint=f" 0 to {limit}")

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Seen:
        found = action.number if isinstance(action, Guess) else len(action.text)
        hint = "right" if found == self._number else "higher" if found < self._number else "lower"
        return Seen(hint=hint, reward=1.0 if hint == "right" else -0.25, done=hint == "right")

    @property
    def state(self) -> State:
        return State(episode_id="game", step_count=0)


if __name__ == "__main__":
    action = {"guess": Guess, "word": Word}[sys.argv[1]]
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    app = create_fastapi_app(Number, action, Seen, max_concurrent_envs=16)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
