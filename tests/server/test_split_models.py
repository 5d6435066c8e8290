"""A real server whose model is split over two workers: the same tokens, all bytes to both, a probe of modules.

When its supervisor is killed, all its processes end.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import VLLM
from servers import Server, connect, descendants, serve
from test_in_flight import gap_by_version
from tiny import make_model, perturbed
from transformers import PreTrainedModel

from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import LockstepError
from lockstep.watch.modules import ModuleProbe, check_probe
from lockstep.weights.push import push_weights
from lockstep.weights.source import PlainSource
from lockstep.weights.wire.stream import chunks

pytestmark = VLLM
KINDS = [pytest.param("untied", marks=pytest.mark.long), pytest.param("tied", marks=pytest.mark.release)]

REQUESTS = [GenerationRequest(RequestKey(f"p{i}", 0), (7, 8, 9 + i), Sampling(16), 50 + i) for i in range(6)]


@pytest.fixture(scope="module", params=KINDS)
def split(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    model = request.getfixturevalue(f"{request.param}_dir")
    with serve(model, tmp_path_factory.mktemp("split"), "--tensor_parallel_size", "2") as running:
        yield request.param, running


def check_whole(engine: VLLMServer, model: PreTrainedModel, version: int) -> None:
    """Push weights, probe every module, and compare the log-probs of what is sampled."""
    push_weights(model, engine, version)
    probe = ModuleProbe(model, engine, torch.float32)
    record = probe.measure(version, every=True)
    check_probe(record, version)
    assert not record.unreached
    assert probe.reached() == 1.0
    assert gap_by_version({version: model}, list(engine.generate(REQUESTS).values())) < 1e-3


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "nccl"])
def test_a_split_model_gets_every_weight_and_is_probed_whole(
    split: tuple[str, Server], transport: str
) -> None:
    kind, server = split
    first = make_model("llama", tied=True) if kind == "tied" else make_model()
    engine = connect(server.url, transport=transport)
    for version, model in enumerate([first, perturbed(first, scale=0.5), perturbed(first, scale=0.7)]):
        check_whole(engine, model, version)
    # With other weights the probe fails for every part, so the probe can fail.
    assert ModuleProbe(first, engine, torch.float32).measure(9, every=True).failed
    with torch.no_grad():
        first.load_state_dict(model.state_dict())
        rows = first.model.layers[1].self_attn.k_proj.weight
        rows[-1] *= 1.01
    assert ModuleProbe(first, engine, torch.float32).measure(9, every=True).failed == [
        "model.layers.1.self_attn.k_proj.weight"
    ]
    engine.close()


class Ends(PlainSource):
    """Weights whose reading fails half-way, as when the trainer runs out of memory."""

    def tensor(self, name: str) -> torch.Tensor:
        if name == self.names[len(self.names) // 2]:
            raise RuntimeError("out of memory, by design")
        return super().tensor(name)


def test_after_a_push_that_the_trainer_gave_up_both_workers_take_the_next(
    split: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, server = split
    model = make_model("llama", tied=True) if kind == "tied" else make_model()
    engine = connect(server.url, transport="shared_memory")
    push_weights(model, engine, 0)
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.weights.wire.shared_memory.chunks", lambda tensors: chunks(tensors, 40_000))
        patch.setattr("lockstep.weights.push.weights_of", Ends)
        with pytest.raises(
            LockstepError, match="could not prepare the weights for the push: out of memory, by design"
        ):
            push_weights(model, engine, 1)
    assert engine.version is None
    moved = perturbed(model, scale=0.5)
    push_weights(moved, engine, 2)
    check_probe(ModuleProbe(moved, engine, torch.float32).measure(2, every=True), 2)
    assert gap_by_version({2: moved}, list(engine.generate(REQUESTS).values())) < 1e-3
    engine.close()


# The last test of this file, because it kills the server.
@pytest.mark.timeout(1800)
def test_a_killed_supervisor_takes_a_server_of_two_workers_with_it(split: tuple[str, Server]) -> None:
    _, server = split
    pids = descendants(server.supervisor.pid)
    assert {"api", "core", "worker"} <= server.processes.keys()
    check_sockets(pids)
    server.supervisor.kill()
    server.supervisor.wait()
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"of {pids}, {left} are left"
        time.sleep(0.1)


def check_sockets(pids: list[int]) -> None:
    """The sockets between the server's processes are in folders that only this user can open."""
    own = {
        os.readlink(file)[8:-1]
        for pid in pids
        for file in Path(f"/proc/{pid}/fd").iterdir()
        if is_socket(file)
    }
    rows = [line.split() for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]]
    files = [Path(row[7]) for row in rows if row[6] in own and len(row) > 7 and row[7].startswith("/")]
    assert files
    assert {stat.S_IMODE(file.parent.stat().st_mode) for file in files} == {0o700}


def is_socket(file: Path) -> bool:
    try:
        return os.readlink(file).startswith("socket:")
    except OSError:
        return False


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
