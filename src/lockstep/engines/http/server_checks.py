"""Checks of servers before a trainer uses them: they are healthy, have the options that training needs, and have equal settings.

`engines/http/vllm_server.py` makes these checks at its start, and again when a server has come back after it was lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.engines.http.server_calls import HOW_TO_START, ServerCalls
from lockstep.engines.protocol import EngineSettings
from lockstep.engines.vllm.arguments import SERVER_BACKEND
from lockstep.engines.vllm.settings import differing_settings, only_dtype, settings_from
from lockstep.errors import InputError, LockstepError, ProofError

# Seconds that one health check may take, and seconds between two health checks.
_HEALTH_LIMIT, HEALTH_EVERY = 5.0, 0.5


def check_servers(
    servers: Sequence[ServerCalls],
    each: Callable[[Callable[[ServerCalls], Any]], list[Any]],
    timeout: float,
    closed: threading.Event,
) -> tuple[EngineSettings, torch.dtype | None]:
    """Wait until every server is healthy, and check its options. Stores facts about each server in its `ServerCalls`.

    Args:
        each: calls a function for all servers at once.
        timeout: seconds to wait for a server.
        closed: set when the trainer closes the engine; the wait then ends.

    Returns:
        The settings that all servers have, and the dtype of all their parameters (None: there are several dtypes).

    Raises:
        LockstepError: a server did not become healthy in time.
        EngineLost: a server failed after it was healthy.
        InputError: a server was started without an option that training needs, or two URLs belong to the same server.
        ProofError: two servers have different settings.
    """
    each(lambda server: _await_health(server, timeout, closed))
    states = [_checked_state(server) for server in servers]
    if len({state["instance"] for state in states}) < len(states):
        raise InputError("two of the servers' URLs lead to the same server; give each server once")
    found = [settings_from(state["settings"]) for state in states]
    for server, settings in zip(servers, found, strict=True):
        if settings != found[0]:
            names = differing_settings(settings, found[0])
            raise ProofError(
                "handshake",
                f"the servers at {servers[0].url} and {server.url} differ in {', '.join(names)}",
                "they were started with different models or arguments",
                "start all servers of a run with the same command line",
            )
    return found[0], only_dtype([name for state in states for name in state["loads_in"]])


def _await_health(server: ServerCalls, timeout: float, closed: threading.Event) -> None:
    deadline = time.monotonic() + timeout
    while problem := server.health_problem(min(_HEALTH_LIMIT, timeout)):
        if closed.wait(HEALTH_EVERY) or time.monotonic() > deadline or "CERTIFICATE" in problem:
            raise LockstepError(
                f"the server at {server.url} did not answer within {timeout:.0f} s; is it running "
                "('lockstep serve MODEL')? The run can be resumed from its last checkpoint when the server runs. The last "
                f"answer: {problem}"
            )


def _checked_state(server: ServerCalls) -> dict[str, Any]:
    """What the server's workers report about it.

    Raises:
        InputError: the server was started without an option that training needs.
    """
    workers = server.workers("lockstep_state")
    state = workers[0]
    if state["backend"] != SERVER_BACKEND:
        raise InputError(
            f"the server at {server.url} receives weights by {state['backend']!r}, not by {SERVER_BACKEND!r}. {HOW_TO_START}"
        )
    if state["copies"] != 1:
        raise InputError(
            f"the server at {server.url} keeps {state['copies']} copies of the model (data_parallel_size), and a trainer cannot "
            "distinguish them; start one server per copy without this argument, and give all URLs"
        )
    if state["splits_prompts"]:
        raise InputError(
            f"the server at {server.url} computes prompts in parts (chunked prefill). On a CPU its engine would end when it splits "
            f"the prompt of a request with a seed. {HOW_TO_START}"
        )
    server.world_size = state["world_size"]
    server.takes_priorities = state["takes_priorities"]
    server.picture_cache = state["picture_cache"]
    server.available_bytes = min(worker["available_bytes"] for worker in workers)
    server.takes_adapters = state["adapters"]
    # Stages of a pipeline may have parameters of different dtypes.
    return {**state, "loads_in": [name for worker in workers for name in worker["loads_in"]]}
