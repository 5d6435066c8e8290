"""What a server says of itself before it gets weights: that it is healthy, how it was started, and with which settings it runs.

`engines/http/vllm_server.py` asks at the start, after a server was lost, and when a server joins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from lockstep.engines.http.server_calls import HOW_TO_START, ServerCalls
from lockstep.engines.protocol import EngineSettings
from lockstep.engines.vllm.arguments import SERVER_BACKEND
from lockstep.engines.vllm.settings import differing_settings, settings_from
from lockstep.errors import EngineLost, InputError, LockstepError, ProofError

HEALTH_LIMIT, HEALTH_EVERY = 5.0, 0.5


def await_health(server: ServerCalls, timeout: float, closed: threading.Event) -> None:
    """Wait until a server is healthy.

    Raises:
        LockstepError: it was not within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while ailment := server.ailment(min(HEALTH_LIMIT, timeout)):
        if closed.wait(HEALTH_EVERY) or time.monotonic() > deadline or "CERTIFICATE" in ailment:
            raise unreachable(server, timeout, ailment)


def unreachable(server: ServerCalls, timeout: float, ailment: str) -> LockstepError:
    """The error for a server that was waited for in vain."""
    return LockstepError(
        f"the server at {server.url} did not answer within {timeout:.0f} s; is it running ('lockstep serve MODEL')? The run can be "
        f"resumed from its last checkpoint once it is. The last answer: {ailment}"
    )


def ailment_of(server: ServerCalls, timeout: float) -> str:
    """Why a server that was lost cannot be used yet; empty if it can."""
    if ailment := server.ailment(min(HEALTH_LIMIT, timeout)):
        return ailment
    try:
        read_state(server)
    except EngineLost as lost:
        # It was healthy only for a moment: it may be stopping or starting.
        return str(lost)
    return ""


def read_state(server: ServerCalls) -> None:
    """Ask a server how it was started, and keep its answer in `server`.

    Raises:
        InputError: it was started without something that training needs.
        EngineLost: it does not answer, or its workers do not know our methods.
    """
    workers = server.workers("lockstep_state")
    state = workers[0]
    if state["backend"] != SERVER_BACKEND:
        raise InputError(
            f"the server at {server.url} takes weights by {state['backend']!r}, not by {SERVER_BACKEND!r}. {HOW_TO_START}"
        )
    if state["copies"] != 1:
        raise InputError(
            f"the server at {server.url} keeps {state['copies']} copies of the model (data_parallel_size), which a trainer "
            "cannot tell apart; start as many servers without it, and give all URLs"
        )
    if state["splits_prompts"]:
        raise InputError(
            f"the server at {server.url} computes prompts in parts (chunked prefill), and on a CPU its engine ends when a "
            f"prompt of a request with a seed is split. {HOW_TO_START}"
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
    """The settings of servers that have said how they were started.

    Raises:
        InputError: two of the URLs lead to the same server.
        ProofError: the servers run with different settings.
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
