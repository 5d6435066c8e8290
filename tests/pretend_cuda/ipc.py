"""Pushes over CUDA IPC between two processes that have the pretend GPU.

A CPU build of PyTorch has no CUDA IPC. **Stand-ins** take the place of the two functions that
`weights/wire/cuda_ipc.py` calls, `_share_cuda_` and `_new_shared_cuda`: a file that both processes map stands for the
GPU's memory. Everything else is the code that would run beside a GPU.

The second process is a fork: what it would import is a seventh of the suite's time. CUDA itself does not survive a
fork.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

Result = dict[str, Any]
_KIND = b"\x02c"
_CHUNK = 1 << 15


def stand_in(folder: Path) -> None:
    """Put files of a folder in the place of memory that CUDA shares."""
    import torch

    map_file = torch.ops.pretend_cuda.map_file
    known: dict[tuple[int, int], bytes] = {}

    def share(storage: torch.UntypedStorage) -> tuple[object, ...]:
        key = storage.data_ptr(), storage.nbytes()
        if key not in known:
            name = secrets.token_hex(16)
            (folder / name).write_bytes(bytes(storage.nbytes()))
            map_file(torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage), str(folder / name), True)
            known[storage.data_ptr(), storage.nbytes()] = name.encode()
            key = storage.data_ptr(), storage.nbytes()
        handle = _KIND + known[key].ljust(64, b"\0")
        return 0, handle, storage.nbytes(), 0, b"/torch_1_2_3", 0, bytes(64), True

    def new(*fields: Any) -> torch.UntypedStorage:
        _, handle, size, offset, *_ = fields
        assert [type(f) for f in fields] == [int, bytes, int, int, bytes, int, bytes, bool]
        path = folder / handle[2:].rstrip(b"\0").decode()
        if not path.exists() or path.stat().st_size < offset + size:
            raise RuntimeError("CUDA error: invalid resource handle (pretend)")
        found = torch.empty(size, dtype=torch.uint8, device="cuda")
        map_file(found, str(path), False)
        return found.untyped_storage()

    torch.UntypedStorage._share_cuda_ = share  # type: ignore[method-assign]
    torch.UntypedStorage._new_shared_cuda = staticmethod(new)  # type: ignore[assignment, method-assign]


def crossed(log: Any) -> int:
    """The bytes that have left the device."""
    return sum(size for (kind, *_), size in log.sizes.items() if kind in ("d2h", "d2h_async"))


def waits_of_slots(log: Any) -> int:
    """How often the host has waited for its stream before it told the other process of a chunk."""
    return sum(
        n
        for (kind, _, place, _), n in log.events.items()
        if kind == "sync" and "wire/shared_memory.py" in place
    )


# ---- the second process: a server's worker -----------------------------------------------------------------------


class Worker:
    """Does what a server's worker does in a push (`engines/vllm/port/receive.py`).

    A dictionary stands for vLLM's model.
    """

    def __init__(self) -> None:
        import torch

        from lockstep.contract.tensors import HeldWeights
        from pretend_cuda import LOG

        self._device, self._log, self._held = torch.device("cuda", 0), LOG, HeldWeights()
        self._found: dict[str, torch.Tensor] = {}

    def init_transfer(self, info: dict[str, Any]) -> None:
        from lockstep.weights.wire.cuda_ipc import open_segment

        self._segment = open_segment(info["segment"], info["bytes"], info.get("buffer"), self._device)

    def update_weights(self, info: dict[str, Any]) -> Any:
        from lockstep.contract.tensors import begin_specs, one_push

        self._log.clear()
        self._held.open()
        taken = self._held.accepts_base(info["base"])
        names = {
            "push": info["push"],
            "worker": info["rank"],
            "workers": info["size"],
            "timeout": info["timeout"],
        }
        loaded = []
        with one_push(int(info["digest_key"], 16) if info["digest_key"] else None, remembers=False):
            for arrived in self._segment.pieces(info["chunks"], **names):
                if taken:
                    loaded.append((begin_specs(arrived), [name for name, _ in arrived]))
                    self._found |= {name: tensor.clone() for name, tensor in arrived}
                    loaded[-1][0].settle()
        for begun, written in loaded:
            self._held.add(begun(), written, written)
        found = self._held.close(self._found)
        seen = {
            "chunks": len(info["chunks"]),
            "waits": waits_of_slots(self._log),
            "crossed": crossed(self._log),
        }
        return {"tensors": [list(spec) for spec in found.tensors], "refused": found.unknown_base, **seen}

    def lockstep_device(self) -> dict[str, str]:
        from lockstep.weights.wire.network import identity_of

        return {"gpu": identity_of(self._device)}

    def lockstep_sees(self, name: str) -> dict[str, str | None]:
        from lockstep.weights.wire.shared_memory import read_test_file

        return {"read": read_test_file(name)}

    def lockstep_maps(self, handle: str) -> dict[str, str]:
        from lockstep.weights.wire.cuda_ipc import read_test_buffer

        return read_test_buffer(json.loads(handle), self._device)

    def contents(self) -> dict[str, str]:
        """The bytes of each tensor, as the host reads them."""
        return {name: _bytes_of(tensor) for name, tensor in self._found.items()}


def _bytes_of(tensor: Any) -> str:
    import torch

    return bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()).hex()


def _work(calls: Connection) -> None:
    """Answer the calls of the first process."""
    worker = Worker()
    while True:
        name, given = calls.recv()
        try:
            answer = {"answer": getattr(worker, name)(*given)}
        except Exception as error:  # noqa: BLE001 - the first process raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        calls.send(answer)


# ---- the first process: the trainer ------------------------------------------------------------------------------


class Server:
    """The calls to the worker of the second process: a `WeightReceiverCalls`."""

    url, world_size, available_bytes = "http://127.0.0.1:1", 1, 1 << 40

    def __init__(self) -> None:
        # Both begin before the first push: a later fork would know what pushes leave in this process.
        self._now, self._later = self._started(), self._started()
        self.last: Result = {}

    def _started(self) -> tuple[Any, Connection]:
        forks = get_context("fork")
        ours, theirs = forks.Pipe()
        process = forks.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def call(self, name: str, *given: Any) -> Any:
        from lockstep.errors import EngineLost

        _, calls = self._now
        calls.send((name, given))
        found = calls.recv()
        if "error" in found:
            raise EngineLost(found["error"], lambda: None)
        return found["answer"]

    def init_transfer(self, info: dict[str, Any]) -> None:
        self.call("init_transfer", info)

    def update_weights(self, info: dict[str, Any]) -> None:
        self.last = self.call("update_weights", info)

    def workers(self, method: str, *args: str) -> list[Any]:
        return [self.call(method, *args)]

    def kill(self) -> None:
        process, _ = self._now
        process.kill()
        process.join()

    def restart(self) -> None:
        """The process is killed, and another one takes its place."""
        self.kill()
        self._now = self._later


class Engine:
    """An engine whose weights are in the second process."""

    wire_dtype = None

    def __init__(self, server: Server, transport: Any) -> None:
        self._server, self._transport = server, transport

    def begin_update(self) -> None: ...

    def load(self, tensors: Iterable[Any], base: str = "") -> Any:
        from lockstep.contract.tensors import LoadedWeights, TensorSpec

        self._transport.send(tensors, [self._server], base)
        found = self._server.last
        specs = tuple(
            TensorSpec(name, dtype, tuple(shape), digest) for name, dtype, shape, digest in found["tensors"]
        )
        return LoadedWeights(specs, (), unknown_base=found["refused"])

    def reset_caches(self) -> bool:
        return True

    def commit_version(self, version: int) -> None: ...


def pushed(folder: Path) -> Result:
    """Pushes on the device to a second process over the transport that `auto` chooses, and handles that are refused."""
    from lockstep.weights.wire import shared_memory
    from lockstep.weights.wire.stream import chunks

    folder.mkdir()
    stand_in(folder)
    server = Server()
    # The model has many chunks of this size, and one tensor that is larger.
    with patch.object(shared_memory, "chunks", partial(chunks, limit=_CHUNK)):
        result = _pushes(server)
    result["refused"], result["fallback"] = _refused(server), _fallback(server)
    server.kill()
    return result


def _pushes(server: Server) -> Result:
    import torch
    from tiny import make_model

    from lockstep.weights.push import push_weights
    from lockstep.weights.wire.transport import choose_transport
    from pretend_cuda import LOG

    result: Result = {"pushes": []}
    transport = choose_transport("auto", [server], "127.0.0.1", 0, 60.0)
    result["chosen"] = type(transport.used).__name__
    for dtype, count in ((torch.float32, 4), (torch.bfloat16, 3)):
        model, engine = make_model().to("cuda", dtype), Engine(server, transport)
        for version in range(count):
            LOG.clear()
            record = push_weights(model, engine, version)
            seen = {"crossed": crossed(LOG), "waits": waits_of_slots(LOG)}
            own = {name: _bytes_of(p) for name, p in model.state_dict().items()}
            result["pushes"].append(
                {
                    "equal": server.call("contents").items() >= own.items(),
                    "bytes": record.bytes,
                    "sent": record.sent_bytes,
                    "in full": record.in_full,
                    "tensors": record.tensors,
                    "trainer": seen,
                    "worker": {name: server.last[name] for name in ("crossed", "waits", "chunks")},
                }
            )
            with torch.no_grad():
                if version == 0:
                    model.model.layers[1].self_attn.k_proj.weight[0, :3] += 1
                if version == 2 and dtype == torch.float32:
                    # The server dies and comes back, and the trainer drops its agreements, as in a recovery.
                    buffer = transport.used.buffer.data_ptr()
                    server.restart()
                    transport.forget()
    result["same buffer"] = transport.used.buffer.data_ptr() == buffer
    transport.close()
    return result


def _refused(server: Server) -> dict[str, str]:
    """What the worker says of handles that no trainer makes, by what is wrong with each."""
    import torch

    from lockstep.weights.wire.cuda_ipc import Handle, exported

    whole = torch.cuda.get_device_properties(0).total_memory
    buffer = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    right = exported(buffer)
    forged: dict[str, Any] = {
        "right": right,
        "another gpu": right._replace(gpu="GPU-1"),
        "no hex": right._replace(memory="zz" + right.memory[2:]),
        "odd hex": right._replace(memory=right.memory[:-1]),
        "short memory": right._replace(memory=right.memory[:-2]),
        "expandable": right._replace(memory="0265" + right.memory[4:]),
        "short event": right._replace(event=right.event[2:]),
        "no bytes": right._replace(size=0),
        "negative": right._replace(size=-4096),
        "beyond the memory": right._replace(offset=whole - 4095),
        "before the memory": right._replace(offset=-1),
        "larger than the memory": right._replace(size=whole + 1),
        "true as a size": [*right[:2], True, *right[3:]],
        "a path": right._replace(counter_file="/etc/passwd"),
        "counter too large": right._replace(counter=10_000),
        "counter below 0": right._replace(counter=-1),
        "a number as a flag": [*right[:7], 1],
        "too few": list(right[:7]),
        "too many": [*right, 1],
        "unknown memory": right._replace(memory="0263" + "41" * 64),
        "larger than the file": right._replace(size=8192),
    }
    assert len(Handle._fields) == len(right)
    found = {what: server.call("lockstep_maps", json.dumps(handle)) for what, handle in forged.items()}
    return {what: answer["problem"] or answer["read"] for what, answer in found.items()}


def _fallback(server: Server) -> dict[str, Any]:
    """What `auto` chooses, and what `cuda_ipc` says, where memory of the GPU cannot be shared."""
    import torch

    from lockstep.errors import InputError
    from lockstep.weights.wire import transport as module
    from lockstep.weights.wire.transport import choose_transport

    works: Callable[..., Any] = torch.UntypedStorage._share_cuda_

    def chosen() -> list[str]:
        with patch.object(module._logger, "info") as said:
            try:
                choose_transport("cuda_ipc", [server], "127.0.0.1", 0, 60.0)
                refused = ""
            except InputError as error:
                refused = str(error)
            used = type(choose_transport("auto", [server], "127.0.0.1", 0, 60.0).used).__name__
        return [used, *(call.args[0] for call in said.call_args_list), refused]

    def expandable(storage: Any) -> Any:
        _, handle, *rest = works(storage)
        return 0, b"\x02e" + handle[2:], *rest

    def fails(storage: Any) -> Any:
        raise RuntimeError("CUDA error: operation not supported (pretend)")

    def elsewhere(storage: Any) -> Any:
        _, _, *rest = works(storage)
        return 0, _KIND + b"A" * 64, *rest

    found = {}
    for share in (expandable, fails, elsewhere):
        with patch.object(torch.UntypedStorage, "_share_cuda_", share):
            found[share.__name__] = chosen()
    with patch.object(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(uuid="GPU-1")):
        found["another gpu"] = chosen()
    return found
