"""One game of textarena in a separate process (`extras/environments/textarena.py`). It imports nothing of Lockstep."""

from __future__ import annotations

import random
import sys
from typing import Any

try:
    import numpy
    import textarena
except ImportError as error:
    raise ImportError(
        f"{sys.executable} cannot import textarena ({error}): run pip install textarena there, or name "
        "another Python with python="
    ) from error


class _Game:
    def __init__(self, name: str, unfinished: float, options: dict[str, Any]) -> None:
        try:
            game = textarena.make(name, **options)
        except ValueError as error:
            raise ValueError(f"textarena has no game {name!r} ({error})") from error
        # The wrappers repeat the whole game in every observation, and the conversation already contains it.
        while isinstance(game, textarena.Wrapper):
            game = game.env
        self._name, self._game, self._unfinished, self._done = name, game, unfinished, False

    def reset(self, seed: int = 0, **row: Any) -> str:
        """Begin a game. All random numbers of the game come from the seed."""
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        try:
            self._game.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise ValueError(f"{self._name} is not a game for one player ({error})") from error
        self._done = False
        return self._new_text()

    def next_user_message(self, answer: str) -> str | None:
        """Make a move. Returns the game's answer to it; None: the game is over."""
        self._done, _ = self._game.step(action=answer)
        return None if self._done else self._new_text()

    def get_reward(self) -> float:
        """The reward of the game if it is over, otherwise `unfinished`."""
        rewards, _ = self._game.close()
        return float(rewards[0]) if self._done and rewards else self._unfinished

    def _new_text(self) -> str:
        """The game's messages since the last move, without the player's own words."""
        _, observation = self._game.get_observation()
        player_action = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(str(text).strip() for _, text, kind in observation if kind is not player_action)


def make_game(name: str, unfinished: float, options: dict[str, Any]) -> _Game:
    """The game, as an object of a class with its name, under which rewards are logged."""
    game_class: type[_Game] = type(name, (_Game,), {})
    return game_class(name, unfinished, options)
