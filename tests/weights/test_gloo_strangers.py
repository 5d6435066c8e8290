"""Programs that were not asked connect to a push over gloo: they get no weights, and break at most this push."""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_transports import Worker, arrived_whole, weights

from lockstep.weights.wire.groups import FROM_SENDER, Meeting, gloo_group, ready_key
from lockstep.weights.wire.network import GlooTransport

REFUSED = "another program took part in this push, so no weights were sent"
LIMIT = 20.0


def listening() -> set[str]:
    """The addresses at which this process listens, in the kernel's hexadecimal form."""
    own = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(file))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text(encoding="utf-8").splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


class Watching(Worker):
    """Notes where this process listens before it connects and while weights arrive: it holds both ends of the push."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[str] = set()

    def update_weights(self, info: dict[str, Any]) -> None:
        self.addresses |= listening()
        super().update_weights(info)

    def take(self, arrived: Any) -> None:
        self.addresses |= listening()
        super().take(arrived)


def test_a_push_listens_on_loopback_and_after_it_nothing_listens() -> None:
    before, worker = listening(), Watching()
    GlooTransport("127.0.0.1", 0, LIMIT).send(weights(0), [worker])
    assert worker.addresses - before <= {"0100007F"}
    assert worker.addresses
    assert listening() <= before


class Preceded(Worker):
    """Before it connects, a stranger has connected and sent what it likes, and keeps its connection."""

    def __init__(self, words: bytes) -> None:
        super().__init__()
        self._words = words
        self.strangers: list[socket.socket] = []

    def update_weights(self, info: dict[str, Any]) -> None:
        for _ in range(3):
            stranger = socket.create_connection((info["host"], info["port"]))
            stranger.sendall(self._words)
            self.strangers.append(stranger)
        super().update_weights(info)


@pytest.mark.parametrize(
    "words", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64], ids=["nothing", "HTTP", "bytes"]
)
def test_a_stranger_that_connects_first_and_talks_does_not_stop_the_push(words: bytes) -> None:
    worker, sent = Preceded(words), weights(0)
    GlooTransport("127.0.0.1", 0, LIMIT).send(sent, [worker])
    assert arrived_whole(worker, sent)
    for stranger in worker.strangers:
        stranger.close()


class Forged(Worker):
    """Before it connects, a stranger has replaced the addresses that the trainer wrote into the store."""

    def update_weights(self, info: dict[str, Any]) -> None:
        store = dist.TCPStore(info["host"], info["port"], is_master=False, timeout=timedelta(seconds=LIMIT))
        store.set(ready_key(info["rank"]), "")
        deadline = time.monotonic() + LIMIT
        while not (keys := [key for key in store.list_keys() if "rank" in key or "/0" in key]):
            assert time.monotonic() < deadline, store.list_keys()
            time.sleep(0.01)
        for key in keys:
            store.set(key, store.get(key)[::-1])
        super().update_weights(info)


def test_an_address_that_a_stranger_wrote_is_refused_and_the_next_push_arrives() -> None:
    transport, worker = GlooTransport("127.0.0.1", 0, 2.0), Forged()
    with pytest.raises(RuntimeError, match=REFUSED):
        transport.send(weights(0), [worker])
    assert not worker.found
    after, sent = Worker(), weights(1)
    transport.send(sent, [after])
    assert arrived_whole(after, sent)


class Impostor(Worker):
    """Takes a worker's place in the connections of gloo, as a program can that connects to the trainer's port first."""

    def __init__(self) -> None:
        super().__init__()
        self.got = torch.full((4 * 1500,), 7, dtype=torch.uint8)

    def update_weights(self, info: dict[str, Any]) -> None:
        limit = timedelta(seconds=LIMIT)
        store = dist.TCPStore(
            info["host"], info["port"], is_master=False, timeout=limit, wait_for_workers=False
        )
        store.set(ready_key(info["rank"]), "")
        meeting = Meeting(store, info["secret"], info["rank"], info["size"], info["host"], 1.0, lambda: None)
        group = gloo_group(meeting.signed(), meeting)
        said = group.send([torch.zeros(32, dtype=torch.uint8)], 0, 0)
        group.recv([torch.zeros(32, dtype=torch.uint8)], 0, 0).wait()
        said.wait()
        with suppress(RuntimeError):
            group.broadcast([self.got], FROM_SENDER).wait()


def test_a_program_without_the_secret_gets_no_weights() -> None:
    impostor = Impostor()
    with pytest.raises(RuntimeError, match=REFUSED):
        GlooTransport("127.0.0.1", 0, LIMIT).send([("t", torch.zeros(1500))], [impostor])
    assert impostor.got.eq(7).all()


def test_a_worker_takes_nothing_from_a_trainer_without_the_secret() -> None:
    class Misled(Worker):
        def update_weights(self, info: dict[str, Any]) -> None:
            with closing(self.receiver.receive({**info, "secret": "another"}, info["chunks"])) as coming:
                next(coming)

    with pytest.raises(RuntimeError, match=REFUSED):
        GlooTransport("127.0.0.1", 0, 2.0).send(weights(0), [Misled()])
