"""Sends weights to servers on the trainer's own GPU, within the memory of the GPU.

The trainer copies each chunk into a buffer on the GPU, which the workers have mapped into their own process (CUDA
IPC). They load from it in turns, as from shared memory; a small segment of shared memory (`shared_memory.py`) has the
counters. The buffer stays for the run.

A handle of the buffer goes to the workers as JSON. They check each of its fields and unpickle nothing. PyTorch's two
functions that make a handle and map it again are called here alone: `_share_cuda_` and `_new_shared_cuda`. vLLM 0.32.0
has an engine for CUDA IPC too. It is not used: over HTTP it takes handles only as a pickle, and it loads whatever the
handle says, without a comparison.

**Not run on a GPU yet.** Tests run it on the pretend GPU, with stand-ins for the two functions.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lockstep.errors import InputError, one_line
from lockstep.weights.wire.network import identity_of
from lockstep.weights.wire.shared_memory import NoRoom, Segment, SharedMemoryTransport
from lockstep.weights.wire.stream import WeightReceiverCalls

NAME = "cuda_ipc"
# The beginning of PyTorch's handle of memory from cudaMalloc: its version, and a letter. Then come the 64 bytes of
# CUDA. Another letter stands for an expandable segment, whose handle contains files of the process instead.
_KIND, _CUDA_BYTES = b"\x02c", 64
# The file in which PyTorch counts who uses the memory, and the number of counters in it. PyTorch writes to the
# counter that a handle names without a look at its number.
COUNTER_FILE, COUNTERS = re.compile(rb"/torch_\d+_\d+_\d+"), 10_000
_TEST_BYTES = 32


class Handle(NamedTuple):
    """What another process needs to map a buffer of a GPU, in JSON types; bytes are hexadecimal.

    Attributes:
        gpu: UUID of the GPU.
        memory: CUDA's handle of the allocation in which the buffer is.
        size: bytes of the buffer.
        offset: where the buffer begins in the allocation, in bytes.
        counter_file, counter: PyTorch's file of counters, and the number of the counter of this handle.
        event: CUDA's handle of an event after which the memory may be used.
        waits: whether the event must be waited for.
    """

    gpu: str
    memory: str
    size: int
    offset: int
    counter_file: str
    counter: int
    event: str
    waits: bool


class CudaIPCTransport(SharedMemoryTransport):
    """The trainer's end of the transport, with one buffer on the GPU that it shares with all workers.

    The buffer has `chunks.CHUNK_BYTES`, or the size of the largest tensor if that is larger. A push may take `timeout`
    seconds.
    """

    _name, _to_host = NAME, False

    def __init__(self, timeout: float, device: torch.device) -> None:
        super().__init__(timeout)
        self._device = device
        self.buffer: torch.Tensor | None = None

    def close(self) -> None:
        super().close()
        self.buffer = None

    def shared_buffer(self, size: int, servers: int) -> tuple[torch.Tensor | None, list[dict[str, Any]]]:
        # A worker of a failed push may still read the buffer, but then its server does not serve what it has read. So
        # the buffer is used again: memory that a killed process had mapped is never given back to the allocator.
        if self.buffer is None or self.buffer.numel() < size:
            self.buffer = None
            try:
                self.buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError as error:
                raise NoRoom(
                    f"the GPU has no room for a buffer of {size >> 20} MiB, through which weights go to the server"
                ) from error
        return self.buffer, [{"buffer": list(exported(self.buffer))} for _ in range(servers)]


def exported(buffer: torch.Tensor) -> Handle:
    """A handle of a buffer, if CUDA can share this memory. Each process that maps the buffer needs its own."""
    try:
        _, memory, size, offset, counter_file, counter, event, waits = _share(buffer.untyped_storage())
    except RuntimeError as error:
        raise NoRoom(f"CUDA cannot share memory of the GPU with the server ({one_line(error)})") from error
    if memory[: len(_KIND)] != _KIND:
        raise NoRoom(
            "CUDA cannot share memory of expandable segments with the server (PYTORCH_CUDA_ALLOC_CONF has "
            "expandable_segments:True)"
        )
    return Handle(
        identity_of(buffer.device),
        memory.hex(),
        size,
        offset,
        counter_file.decode(),
        counter,
        event.hex(),
        waits,
    )


def mapped(handle: Sequence[object], device: torch.device) -> torch.Tensor:
    """The trainer's buffer, mapped into this process: (bytes,) uint8.

    A handle whose fields are well-formed and which names memory that the trainer does not have cannot be told from a
    right one. Only a program with the server's key can send one.

    Args:
        handle: the fields of `Handle`, from another process.
        device: this process's GPU.

    Raises:
        ValueError: a field of the handle is not what it must be, or the buffer is on another GPU.
        RuntimeError: CUDA cannot map the memory.
    """
    found = _checked(handle, device)
    storage = _open(
        torch.cuda.current_device() if device.index is None else device.index,
        bytes.fromhex(found.memory),
        found.size,
        found.offset,
        found.counter_file.encode(),
        found.counter,
        bytes.fromhex(found.event),
        found.waits,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def open_segment(name: str, size: int, handle: Sequence[object] | None, device: torch.device) -> Segment:
    """The worker's end of a trainer's segment, with the buffer whose handle came with it.

    Raises:
        ValueError: a name or a handle is not what it must be, or belongs to another user or GPU.
        RuntimeError: CUDA cannot map the memory.
    """
    return Segment(name, size, None if handle is None else mapped(handle, device))


def _checked(handle: Sequence[object], device: torch.device) -> Handle:
    kinds = (str, str, int, int, str, int, str, bool)
    if len(handle) != len(kinds) or any(type(f) is not kind for f, kind in zip(handle, kinds, strict=True)):
        raise ValueError(
            f"{list(handle)!s:.200} is no handle of a GPU's memory: it needs {', '.join(Handle._fields)}"
        )
    found = Handle(*handle)  # type: ignore[arg-type]
    if found.gpu != identity_of(device):
        raise ValueError(
            f"the trainer's buffer is on the GPU {found.gpu}, and this worker computes on {device}"
        )
    memory, event = _bytes(found.memory), _bytes(found.event)
    if memory[: len(_KIND)] != _KIND or len(memory) != len(_KIND) + _CUDA_BYTES or len(event) != _CUDA_BYTES:
        raise ValueError(f"{found.memory!r:.200} and {found.event!r:.200} are no handles of CUDA")
    if not COUNTER_FILE.fullmatch(found.counter_file.encode()) or not 0 <= found.counter < COUNTERS:
        raise ValueError(f"{found.counter_file!r:.200}, {found.counter} is no counter of PyTorch")
    whole = torch.cuda.get_device_properties(device).total_memory
    if found.size <= 0 or not 0 <= found.offset <= whole - found.size:
        raise ValueError(
            f"{found.size} bytes from byte {found.offset} are not in the GPU's {whole} bytes of memory"
        )
    return found


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text) if re.fullmatch(r"[0-9a-f]*", text) and len(text) % 2 == 0 else b""


def why_not(servers: Sequence[WeightReceiverCalls], gpu: torch.device) -> str:
    """Why the servers cannot load weights from this process's GPU, tested with a small buffer; empty: they can."""
    own = identity_of(gpu)
    for server in servers:
        if [found["gpu"] for found in server.workers("lockstep_device")] != [own]:
            return f"the server at {server.url} does not compute on the trainer's GPU alone"
    secret = secrets.token_bytes(_TEST_BYTES)
    buffer = torch.frombuffer(bytearray(secret), dtype=torch.uint8).to(gpu)
    for server in servers:
        try:
            handle = exported(buffer)
        except NoRoom as error:
            return str(error)
        (found,) = server.workers("lockstep_maps", json.dumps(handle))
        if found["read"] != secret.hex():
            return (
                f"the server at {server.url} cannot map memory of the trainer's GPU ({found['problem']:.200})"
            )
    return ""


def read_test_buffer(handle: Sequence[object], device: torch.device) -> dict[str, str]:
    """The worker's answer to `why_not`: the bytes of a small buffer, or the reason why it cannot be mapped."""
    try:
        return {"read": bytes(mapped(handle, device)[:_TEST_BYTES].tolist()).hex(), "problem": ""}
    except (ValueError, RuntimeError) as error:
        return {"read": "", "problem": one_line(error)}


def check_shared(servers: Sequence[WeightReceiverCalls], gpu: torch.device) -> None:
    """Check that all servers can load weights from this process's GPU."""
    if problem := why_not(servers, gpu):
        raise InputError(f"vllm_weight_transport={NAME}, but {problem}; use auto, shared_memory or gloo")


def _share(storage: torch.UntypedStorage) -> tuple[int, bytes, int, int, bytes, int, bytes, bool]:
    return storage._share_cuda_()


def _open(*fields: object) -> torch.UntypedStorage:
    return torch.UntypedStorage._new_shared_cuda(*fields)
