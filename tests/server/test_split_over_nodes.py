"""A real server whose model is split over two hosts by vLLM's `--nnodes`: all bytes reach both, both are proven.

A worker that dies on the second host brings the server down and up again as a whole. It is run before a release.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import VLLM
from hosts import Host, can_make_hosts, hosts
from servers import KEY, Server, descendants, free_port, serve
from test_split_models import REQUESTS, check_whole
from tiny import make_model, perturbed

from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import EngineLost
from lockstep.weights.wire.transport import choose_transport

pytestmark = [
    *VLLM,
    pytest.mark.release,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not can_make_hosts(), reason="only root can make network namespaces"),
]


def test_a_model_that_is_split_over_two_hosts_is_pushed_probed_and_comes_back(
    untied_dir: str, tmp_path: Path
) -> None:
    with ExitStack() as held:
        trainer, *places = held.enter_context(hosts("trainer", "one", "two"))
        first, second = served(untied_dir, tmp_path, places, held)
        first.await_health()
        trainer.do(lambda: learn_of(first, second, trainer))


def served(model: str, folder: Path, places: list[Host], held: ExitStack) -> list[Server]:
    """The same command on both hosts, except for the number of the node."""
    together = ["--tensor_parallel_size", "2", "--nnodes", "2", "--master_addr", places[0].address]
    together += ["--master_port", str(free_port()), "--distributed_executor_backend", "mp"]
    port, found = free_port(), []
    for number, host in enumerate(places):
        (own := folder / str(number)).mkdir()
        words = [*together, "--node_rank", str(number)]
        found.append(held.enter_context(serve(model, own, *words, port=port, host=host, await_health=False)))
    return found


def learn_of(first: Server, second: Server, trainer: Host) -> None:
    """What a trainer on a third host finds."""
    engine = VLLMServer(
        [first.url],
        [KEY],
        timeout=60.0,
        transport=lambda found: choose_transport("gloo", found, trainer.address, 0, 60.0),
    )
    model = make_model()
    for version in range(2):
        check_whole(engine, model, version)
        model = perturbed(model, scale=0.5)
    for pid in descendants(second.supervisor.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost) as lost:
        engine.generate(REQUESTS)
    before = second.log.read_text().count("is ready")
    lost.value.recover()
    check_whole(engine, model, 2)
    assert second.log.read_text().count("is ready") > before
    engine.close()
