"""Games of textarena as environments.

textarena seeds Python's random numbers for the whole process. Therefore each game runs in a separate process
(`own_process/textarena_game.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.rollouts.programs.environments import ProcessEnvironment, in_process

_PROGRAM = Path(__file__).with_name("own_process") / "textarena_game.py"


def game(
    name: str, *, python: str | None = None, unfinished: float = 0.0, **options: Any
) -> Callable[[], ProcessEnvironment]:
    """A factory of one game for one player. Each turn of the model is a move, and the game answers as the user.

    The reward is that of the game. It is logged under the game's name.

    Args:
        name: textarena's name of the game, for example `GuessTheNumber-v0`.
        python: path of a Python that has textarena; None: the trainer's Python, with
            `pip install 'lockstep-rl[textarena]'`.
        unfinished: the reward of a game that the rollout did not end, because it ran out of tokens.
        options: passed to `textarena.make`, as JSON types.

    Returns:
        The factory. If that Python has no textarena, or textarena has no such game, the run ends at its start with an
        `InputError`.
    """
    arguments = {"name": name, "unfinished": float(unfinished), "options": options}
    return in_process(f"{_PROGRAM}:make_game", python, arguments)
