"""Digests of pushes on this device: what they are, where the host waits, and the bytes that reach main memory.

`runs.py` calls it on the pretend GPU, and `test_runs.py` reads the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lockstep.contract import tensors as device_digest
from lockstep.contract.tensors import (
    HeldWeights,
    LoadedWeights,
    device_digests,
    digest_texts,
    key_of,
    one_push,
    tensor_specs,
)
from lockstep.weights.push import push_weights
from lockstep.weights.wire.network import NCCLTransport
from lockstep.weights.wire.shared_memory import SharedMemoryTransport
from lockstep.weights.wire.stream import WHOLE, Named, views
from pretend_cuda import LOG, WAITS

DEVICE = torch.device("cuda")
_KEY = 7


class Counted:
    """What a block of code lets the host wait for, by place; bytes that came from the device; operations there."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.bytes = self.operations = 0


@contextmanager
def counted() -> Iterator[Counted]:
    found, events, size, operations = Counted(), Counter(LOG.events), LOG.copied("d2h"), LOG.kernels()
    try:
        yield found
    finally:
        found.operations, found.bytes = LOG.kernels() - operations, LOG.copied("d2h") - size
        for (kind, _, place, _), count in (LOG.events - events).items():
            found.waits[place] += count if kind in WAITS else 0


class HoldsNothing:
    """An engine that describes what it loads. Its `load` is given by a subclass."""

    wire_dtype: torch.dtype | None = None

    def __init__(self) -> None:
        self.held = HeldWeights()
        self.keys: list[int | None] = []

    def begin_update(self) -> None:
        self.held.open()

    def reset_caches(self) -> bool:
        return True

    def commit_version(self, version: int) -> None: ...

    def _describe(self, arrived: list[Named]) -> None:
        specs = tensor_specs(arrived)
        self.keys += [key_of(spec.digest) for spec in specs[:1]]
        names = [name for name, _ in arrived]
        self.held.add(specs, names, names)


class InProcess(HoldsNothing):
    """Gets the trainer's tensors by reference, or copies of them."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self._copies = copies

    def load(self, tensors: Iterable[Named], base: str = "") -> LoadedWeights:
        if self.held.accepts_base(base):
            self._describe([(name, tensor.clone() if self._copies else tensor) for name, tensor in tensors])
        return self.held.close(())


class OverNCCL(HoldsNothing):
    """A server that gets every byte of an NCCL push at once, without NCCL. It is its own transport's only server."""

    url, world_size, available_bytes = "http://127.0.0.1:1", 1, 0

    def __init__(self) -> None:
        super().__init__()
        self.transport = _Delivered("127.0.0.1", 0, 20.0, DEVICE)
        self.info: dict[str, Any] = {}

    def update_weights(self, info: dict[str, Any]) -> None:
        self.info = info

    def load(self, tensors: Iterable[Named], base: str = "") -> LoadedWeights:
        if not self.held.accepts_base(base):
            return self.held.close(())
        self.transport.send(tensors, [self], base)  # type: ignore[list-item]
        arrived, raw = [], iter(self.transport.raw)
        for places in self.info["chunks"]:
            counts = next(raw).view(torch.int64).cpu().tolist()
            meta = views(torch.empty(1 << 30, dtype=torch.uint8, device="meta"), places)
            for (name, like), count in zip(meta, counts, strict=True):
                own = next(raw)
                if count == WHOLE:
                    arrived.append((name, own.view(like.dtype).view(like.shape)))
        key = self.info["digest_key"]
        with one_push(int(key, 16) if key else None, remembers=False):
            self._describe(arrived)
        return self.held.close(())


class _Delivered(NCCLTransport):
    def _broadcast(
        self, listener: Any, size: Any, secret: Any, raw: Iterable[torch.Tensor], pending: Any
    ) -> None:
        listener.close()
        self.raw = [part.clone() for part in raw]


class OverSharedMemory(HoldsNothing):
    """A server's worker in this process, behind real shared memory."""

    def __init__(self) -> None:
        super().__init__()
        from test_transports import Worker

        class Loading(Worker):
            def take(_, arrived: Any) -> None:
                self._describe([(name, tensor.clone()) for name, tensor in arrived])

        self.transport, self.worker = SharedMemoryTransport(20.0), Loading()

    def load(self, tensors: Iterable[Named], base: str = "") -> LoadedWeights:
        if self.held.accepts_base(base):
            self.transport.send(tensors, [self.worker], base)
        return self.held.close(())


def _changes(model: Any) -> list[Callable[[], Any]]:
    """What happens to a model before each of five pushes: nothing, nothing, a part of a layer, everything, nothing."""
    last = next(p for p in reversed(list(model.parameters())) if p.requires_grad)
    return [
        lambda: None,
        lambda: None,
        lambda: last.data.view(-1)[-3:].add_(1),
        lambda: [p.data.mul_(1.5) for p in model.parameters() if p.requires_grad],
        lambda: None,
    ]


def _pushes(model: Any, engine: Any) -> dict[str, Any]:
    rows = []
    for version, change in enumerate(_changes(model)):
        change()
        with counted() as found:
            record = push_weights(model, engine, version)
        rows.append(
            {
                "waits": dict(found.waits),
                "bytes": found.bytes,
                "sent": record.sent_bytes,
                "full": record.in_full,
            }
        )
    keys = [key for key in engine.keys if key is not None]
    return {"pushes": rows, "keys": len(keys), "different": len(set(keys))}


def _dtypes() -> dict[str, bool]:
    """Whether each dtype, size and view has the same digest on the device as in main memory."""
    from test_device_digest import DTYPES, halves, of_bytes

    found = {}
    for dtype in DTYPES:
        hosts = [of_bytes(count, dtype) for count in (0, 1, 3, 4096, 16385)] + [of_bytes(1, dtype)[0]]
        devices = [tensor.to(DEVICE) for tensor in hosts]
        host = of_bytes(240, dtype).view(40, 6)
        hosts, devices = hosts + halves(host), devices + halves(host.to(DEVICE))
        one, other = (digest_texts(device_digests([("w", t) for t in own], _KEY)) for own in (hosts, devices))
        found[str(dtype)] = one == other
    return found


def _launches() -> dict[str, int]:
    """Operations on the device for the digest of one tensor, by its MiB."""
    found = {}
    for size in (1, 8, 64):
        tensor = torch.zeros(size << 20, dtype=torch.uint8, device=DEVICE)
        device_digests([("w", tensor)], _KEY)
        with counted() as of_one:
            device_digests([("w", tensor)], _KEY)
        found[str(size)] = of_one.operations
    return found


def measured(folder: Path) -> dict[str, Any]:
    """All of it, as JSON types."""
    from peft import LoraConfig, get_peft_model
    from tiny import make_model

    # So that tiny tensors have several chunks.
    device_digest.CHUNK = 1 << 15
    whole = make_model()
    size = sum(p.nbytes for p in whole.parameters())
    adapted = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    found = {
        "by reference": _pushes(make_model().to(DEVICE), InProcess(copies=False)),
        "by copies": _pushes(make_model().to(DEVICE), InProcess(copies=True)),
        "merged": _pushes(adapted.to(DEVICE), InProcess(copies=True)),
        "nccl": _pushes(make_model().to(DEVICE), OverNCCL()),
        "shared memory": _pushes(make_model().to(DEVICE), OverSharedMemory()),
    }
    device_digest.CHUNK = 8 << 20
    return {"pushes": found, "size": size, "dtypes": _dtypes(), "launches": _launches()}
