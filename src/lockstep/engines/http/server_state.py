"""Checks of servers before a trainer uses them: they are healthy, have the options that training needs, and have equal settings.

The checks are made at the start, after a server was lost, and when a server joins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from lockstep.contract.protocol import EngineSettings
from lockstep.engines.http.server_calls import HOW_TO_START, ServerCalls
from lockstep.engines.vllm.arguments import SERVER_BACKEND
from lockstep.engines.vllm.port.settings import differing_settings, settings_from
from lockstep.errors import EngineLost, InputError, LockstepError, ProofError
from lockstep.report.waits import waiting

# Seconds that one health check may take, and seconds between two health checks.
HEALTH_LIMIT, HEALTH_EVERY = 5.0, 0.5


def await_health(server: ServerCalls, timeout: float, closed: threading.Event) -> None:
    """Wait until a server is healthy.

    Raises:
        LockstepError: it was not within `timeout` seconds.
    """
    deadline, problem = time.monotonic() + timeout, server.health_problem(min(HEALTH_LIMIT, timeout))
    with waiting(f"the server at {server.url} to be ready", timeout, lambda: problem or ""):
        while problem:
            if closed.wait(HEALTH_EVERY) or time.monotonic() > deadline or "CERTIFICATE" in problem:
                raise unreachable(server, timeout, problem)
            problem = server.health_problem(min(HEALTH_LIMIT, timeout))


def unreachable(server: ServerCalls, timeout: float, problem: str) -> LockstepError:
    """The error for a server that was waited for in vain."""
    return LockstepError(
        f"the server at {server.url} did not answer within {timeout:.0f} s; is it running ('lockstep serve MODEL')? The run can be "
        f"resumed from its last checkpoint when the server runs. The last answer: {problem}"
    )


def problem_of(server: ServerCalls, timeout: float) -> str:
    """The reason why a server that was lost cannot be used yet; empty if it can be used."""
    if problem := server.health_problem(min(HEALTH_LIMIT, timeout)):
        return problem
    try:
        read_state(server)
    except EngineLost as lost:
        # The server answered the health check and then failed. It may be stopping or starting.
        return str(lost)
    return ""


def read_state(server: ServerCalls) -> None:
    """Ask a server how it was started, and store its answer in `server`.

    Raises:
        InputError: the server was started without an option that training needs.
        EngineLost: the server does not answer, or its workers do not have our methods.
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
    server.settings, server.instance = settings_from(state["settings"]), state["instance"]
    # Stages of a pipeline may have parameters of different dtypes.
    server.loads_in = [name for worker in workers for name in worker["loads_in"]]
    server.world_size = state["world_size"]
    server.takes_priorities = state["takes_priorities"]
    server.picture_cache = state["picture_cache"]
    server.available_bytes = min(worker["available_bytes"] for worker in workers)
    server.takes_adapters = state["adapters"]


def agreed_settings(servers: Sequence[ServerCalls]) -> EngineSettings:
    """The settings that all servers have. `read_state` has asked each server before.

    Raises:
        InputError: two URLs belong to the same server.
        ProofError: two servers have different settings.
    """
    if len({server.instance for server in servers}) < len(servers):
        raise InputError("two of the servers' URLs lead to the same server; give each server once")
    first, *others = servers
    assert first.settings is not None
    for server in others:
        assert server.settings is not None
        if server.settings != first.settings:
            names = differing_settings(server.settings, first.settings)
            raise ProofError(
                "handshake",
                f"the servers at {first.url} and {server.url} differ in {', '.join(names)}",
                "they were started with different models or arguments",
                "start all servers of a run with the same command line",
            )
    return first.settings
