"""The transport digest: a description of tensors down to their bytes, made by the same code at both ends of a push.

The sending end is `sync/source.py`, the receiving end is each engine; `sync/push.py` compares the two. xxh3 reads memory at its
full speed (540 MB in 0.02 s on two cores), so that every byte of every push is covered. It finds faults, not forgeries: whoever
can change the weights on purpose can also change the program.

Within one process a tensor may arrive as the very memory that was sent. `one_push` lets such memory be read once; anything that was
copied, converted or changed in between is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import xxhash

from lockstep.engines.protocol import TensorSpec

# xxhash releases the interpreter's lock while it reads.
_POOL = ThreadPoolExecutor(2, thread_name_prefix="lockstep-digest")

# Bytes that are read while they are used. Enough for both threads; tensors that were made for the push are alive together up to
# here.
_TOGETHER = 16 << 20

_read_in_this_push: ContextVar[dict[object, Future[str]] | None] = ContextVar("read_in_this_push", default=None)


@contextmanager
def one_push() -> Iterator[None]:
    """Inside, memory that has been digested and not written to since is not read again.

    Only for tensors that stay alive: the memory of one that was made to be sent may be given to the next.
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
    """Begin `tensor_specs` beside whatever else is done with the tensors, and give what waits for them.

    Until that has returned the tensors must not change.
    """
    known = _read_in_this_push.get()
    known = {} if known is None else known
    reading: list[Future[str]] = []
    for _, tensor in named:
        identity = _identity(tensor)
        if identity not in known:
            known[identity] = _POOL.submit(tensor_digest, tensor)
        reading.append(known[identity])
    # Not the tensors themselves, which may be done with before they have been read.
    outlines = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in named]
    return lambda: tuple(TensorSpec(*o, digest.result()) for o, digest in zip(outlines, reading, strict=True))


def described(
    tensors: Iterable[tuple[str, torch.Tensor]], specs: list[TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same stream, some of it read ahead; the descriptions of all of it are in `specs` when it ends."""
    held: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        held.append((name, tensor))
        if sum(t.nbytes for _, t in held) >= _TOGETHER:
            yield from _described(held, specs)
    yield from _described(held, specs)


def _described(held: list[tuple[str, torch.Tensor]], specs: list[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a list holds, which it then no longer does, read while it is used."""
    finish = begin_specs(held)
    held.reverse()
    while held:
        yield held.pop()
    specs += finish()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hex xxh3-128 of a tensor's elements in row-major order."""
    flat = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)


def _identity(tensor: torch.Tensor) -> object:
    """Equal only for views of one memory that nothing has written to in between (as autograd counts writes)."""
    writes = object() if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(), writes)
