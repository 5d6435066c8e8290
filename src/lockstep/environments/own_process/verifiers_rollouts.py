"""Runs rollouts of one environment of verifiers (`environments/verifiers.py`). It imports nothing of Lockstep.

Each line of JSON on standard input is a request for rows or for one rollout. The program answers each request with a line of JSON,
in any order. Rollouts run concurrently in one event loop, as verifiers runs them. The environment's output goes to standard error.
The program ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from typing import Any

MODEL = "policy"


def main(name: str, arguments: str) -> None:
    """Load the environment, then answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    questions = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer, default=str) + "\n")
        answers.flush()

    try:
        environment = _loaded(name, json.loads(arguments))
    except BaseException as error:  # noqa: BLE001 - the other side raises it
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True})
    asyncio.run(_answer_all(environment, questions, say))


def _loaded(name: str, arguments: dict[str, Any]) -> Any:
    try:
        import verifiers

        load_environment = verifiers.load_environment
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{sys.executable} has no verifiers with load_environment ({error}): run pip install 'verifiers<0.2' there, or name "
            "another Python with python="
        ) from error
    where, colon, function = name.rpartition(":")
    if not colon:
        return load_environment(name, **arguments)
    spec = importlib.util.spec_from_file_location("environment", where)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module in {where}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["environment"] = module
    spec.loader.exec_module(module)
    return getattr(module, function)(**arguments)


async def _answer_all(environment: Any, questions: Any, say: Any) -> None:
    loop, running = asyncio.get_running_loop(), set()
    while line := await loop.run_in_executor(None, questions.readline):
        task = asyncio.create_task(_answer(environment, json.loads(line), say))
        running.add(task)
        task.add_done_callback(running.discard)
    # End at once, because the threads of rollouts may hang, and nobody reads their results any more.
    os._exit(0)


async def _answer(environment: Any, asked: dict[str, Any], say: Any) -> None:
    try:
        found = (
            _rows(environment, **asked["rows"]) if "rows" in asked else await _reward(environment, **asked["rollout"])
        )
        say({"number": asked["number"], "result": found})
    except BaseException as error:  # noqa: BLE001 - the other side raises it
        say({"number": asked["number"], "error": f"{type(error).__name__}: {error}"})


def _rows(environment: Any, size: int, seed: int | None, evaluation: bool) -> list[dict[str, Any]]:
    found = (environment.get_eval_dataset if evaluation else environment.get_dataset)(n=size, seed=seed)
    return [dict(row) for row in found]


async def _reward(environment: Any, base_url: str, given: dict[str, Any]) -> float:
    from verifiers.types import ClientConfig

    # No retries, because the gateway would refuse the same call again.
    client = ClientConfig(api_base_url=base_url, api_key_var="LOCKSTEP_NO_KEY", max_retries=0)
    found = await environment.run_rollout(given, client, MODEL, {})
    if found.get("error"):
        raise RuntimeError(str(found["error"]))
    return float(found["reward"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
