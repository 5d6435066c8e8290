"""Environments of OpenEnv: each rollout has its own session with a running OpenEnv server.

OpenEnv's client needs other versions of some packages than vLLM does. Therefore it runs in a separate process
(`own_process/openenv_session.py`), with a Python that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.rollouts.programs.environments import ProcessEnvironment, in_process

_PROGRAM = Path(__file__).with_name("own_process") / "openenv_session.py"


def server(
    base_url: str,
    *,
    python: str | None = None,
    name: str = "OpenEnv",
    answer: str | None = None,
    shown: str | None = None,
    columns: Sequence[str] = (),
) -> Callable[[], ProcessEnvironment]:
    """A factory of sessions with an OpenEnv server. The reward is the sum of the rewards of all steps.

    Args:
        base_url: address of the server. The server must allow as many sessions as rollouts run at a time
            (`max_concurrent_envs`).
        python: path of a Python that has `openenv`; None: the Python of the trainer.
        name: the name under which rewards are logged. Two servers of a run need two names.
        answer: the field of an action that receives the text of the model's turn. Then the observation becomes the
            user's next message. None: the model gets a tool `step`, whose parameters are the fields of an action.
        shown: the field of an observation that the model reads; None: the observation as JSON.
        columns: columns of a row that are passed to the server's `reset`, beside `seed`.

    Returns:
        The factory. If that Python has no OpenEnv, or the server does not answer, the run ends at its start with an
        `InputError`.
    """
    arguments = {
        "base_url": base_url,
        "name": name,
        "answer": answer,
        "shown": shown,
        "columns": list(columns),
    }
    return in_process(f"{_PROGRAM}:make_session", python, arguments)
