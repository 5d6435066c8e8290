"""Descriptions of tensors: name, dtype, shape, and a digest of all bytes. Sender and receiver of a push use the same code.

`sync/source.py` describes the tensors that are sent, and each engine describes the tensors that arrive. `sync/push.py` compares the
two descriptions. The digest is xxh3. It reads 540 MB in 0.02 s on two cores, so that it can cover every byte of every push. The
digest finds faults. It does not find forgeries: whoever can change the weights on purpose can also change the program.

Within one process the engine may receive the same memory that the trainer sends. Inside `one_push`, such memory is read only once.
Memory that was copied, converted or changed in between is read again.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import xxhash

from lockstep.engines.protocol import TensorSpec
from lockstep.models.cuda import read_after, written_so_far

# Two threads, because xxhash releases the interpreter lock while it reads.
_POOL = ThreadPoolExecutor(2, thread_name_prefix="lockstep-digest")

# Bytes of a group of tensors. The tensors of a group are digested while the caller uses them. A group of this size keeps both
# threads busy. It also bounds the memory of tensors that are made only for the push.
_GROUP_BYTES = 16 << 20

# Bytes of a GPU's tensor that are on the host at a time, per thread.
_PINNED_BYTES = 32 << 20
_OF_THREAD = threading.local()

_read_in_this_push: ContextVar[dict[object, Future[str]] | None] = ContextVar("read_in_this_push", default=None)


@contextmanager
def one_push() -> Iterator[None]:
    """Inside the context, memory that was already digested is not read again, unless it was written to.

    Use it only for tensors that stay alive. A tensor that is made only for the push may be freed, and the next tensor may get the
    same memory.
    """
    token = _read_in_this_push.set({})
    try:
        yield
    finally:
        _read_in_this_push.reset(token)


def tensor_specs(named: Sequence[tuple[str, torch.Tensor]]) -> tuple[TensorSpec, ...]:
    """Name, dtype, shape and byte digest of each tensor."""
    return begin_specs(named)()


def begin_specs(named: Sequence[tuple[str, torch.Tensor]]) -> Callable[[], tuple[TensorSpec, ...]]:
    """Begin `tensor_specs` in the background. Returns a function that waits for the result.

    The tensors must not change until that function has returned.
    """
    known = _read_in_this_push.get()
    known = {} if known is None else known
    reading: list[Future[str]] = []
    written = written_so_far(tensor for _, tensor in named)
    for _, tensor in named:
        identity = _identity(tensor)
        if identity not in known:
            known[identity] = _POOL.submit(read_after, written, tensor_digest, tensor)
        reading.append(known[identity])
    # The result holds no reference to the tensors, because the caller may free them before it waits for the digests.
    outlines = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in named]
    return lambda: tuple(TensorSpec(*o, digest.result()) for o, digest in zip(outlines, reading, strict=True))


def described(
    tensors: Iterable[tuple[str, torch.Tensor]], specs: list[TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same tensors, and append their descriptions to `specs`. `specs` is complete when the iterator ends.

    The iterator reads up to `_GROUP_BYTES` ahead.
    """
    held: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        held.append((name, tensor))
        if sum(t.nbytes for _, t in held) >= _GROUP_BYTES:
            yield from _described(held, specs)
    yield from _described(held, specs)


def _described(held: list[tuple[str, torch.Tensor]], specs: list[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a list and empty the list. The tensors are digested while they are used."""
    finish = begin_specs(held)
    held.reverse()
    while held:
        yield held.pop()
    specs += finish()


def digest_of_all(specs: tuple[TensorSpec, ...]) -> str:
    """Hex digest of a whole set of weights. Equal digests mean equal names, dtypes, shapes and bytes, in the same order."""
    return hashlib.blake2b(json.dumps(specs).encode(), digest_size=16).hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hex xxh3-128 of a tensor's elements in row-major order."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if not flat.is_cuda:
        return xxhash.xxh3_128_hexdigest(flat.cpu().numpy().data)
    found, buffer = xxhash.xxh3_128(), _pinned()
    for part in flat.split(len(buffer)):
        found.update(buffer[: len(part)].copy_(part).numpy().data)
    return found.hexdigest()


def _pinned() -> torch.Tensor:
    """This thread's buffer for bytes of a GPU. Into pinned memory they come eight times as fast (docs/internals/speed.md)."""
    if not hasattr(_OF_THREAD, "buffer"):
        _OF_THREAD.buffer = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    return _OF_THREAD.buffer


def codes_digest(codes: torch.Tensor, scales: torch.Tensor) -> str:
    """The digest of a module's (outputs, inputs) codes and of its scales, one float32 number per output."""
    return f"{tensor_digest(codes)} {tensor_digest(scales.float().flatten())}"


def _identity(tensor: torch.Tensor) -> object:
    """A key for `one_push`. Two keys are equal only for the same view of the same memory without a write in between.

    Autograd's version counter shows writes. Inference tensors have no counter, so that their keys are never equal.
    """
    writes = object() if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(), writes)
