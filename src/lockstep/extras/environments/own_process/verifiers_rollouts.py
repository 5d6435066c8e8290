"""Runs rollouts of one environment of verifiers (`extras/environments/verifiers.py`). It imports nothing of Lockstep.

Each line of JSON on standard input is a request for rows or for one rollout. The program answers each request with a
line of JSON, in any order. Rollouts run concurrently in one event loop, as verifiers runs them. The environment's
output goes to standard error. The program ends when its standard input ends.
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
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer, default=str) + "\n")
        answers.flush()

    try:
        environment = _load_environment(name, json.loads(arguments))
    except BaseException as error:  # noqa: BLE001 - the other side raises it
        send({"error": f"{type(error).__name__}: {error}"})
        return
    send({"ready": True})
    asyncio.run(_answer_all(environment, requests, send))


def _load_environment(name: str, arguments: dict[str, Any]) -> Any:
    try:
        import verifiers

        load_environment = verifiers.load_environment
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{sys.executable} has no verifiers with load_environment ({error}): run pip install "
            "'verifiers<0.2' there, or name another Python with python="
        ) from error
    path, colon, function = name.rpartition(":")
    if not colon:
        return load_environment(name, **arguments)
    spec = importlib.util.spec_from_file_location("environment", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module in {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["environment"] = module
    spec.loader.exec_module(module)
    return getattr(module, function)(**arguments)


async def _answer_all(environment: Any, requests: Any, send: Any) -> None:
    loop, running = asyncio.get_running_loop(), set()
    while line := await loop.run_in_executor(None, requests.readline):
        task = asyncio.create_task(_answer(environment, json.loads(line), send))
        running.add(task)
        task.add_done_callback(running.discard)
    # End at once, because the threads of rollouts may hang, and nobody reads their results any more.
    os._exit(0)


async def _answer(environment: Any, request: dict[str, Any], send: Any) -> None:
    try:
        if "rows" in request:
            result: Any = _rows(environment, **request["rows"])
        else:
            result = await _reward(environment, **request["rollout"])
        send({"number": request["number"], "result": result})
    except BaseException as error:  # noqa: BLE001 - the other side raises it
        send({"number": request["number"], "error": f"{type(error).__name__}: {error}"})


def _rows(environment: Any, size: int, seed: int | None, evaluation: bool) -> list[dict[str, Any]]:
    rows = (environment.get_eval_dataset if evaluation else environment.get_dataset)(n=size, seed=seed)
    return [dict(row) for row in rows]


async def _reward(environment: Any, base_url: str, row: dict[str, Any]) -> float:
    from verifiers.types import ClientConfig

    # No retries, because the gateway would refuse the same call again.
    client = ClientConfig(api_base_url=base_url, api_key_var="LOCKSTEP_NO_KEY", max_retries=0)
    state = await environment.run_rollout(row, client, MODEL, {})
    if state.get("error"):
        raise RuntimeError(str(state["error"]))
    return float(state["reward"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
