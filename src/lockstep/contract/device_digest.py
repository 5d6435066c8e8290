"""A keyed digest of tensors that a GPU computes where the tensors lie. Only 16 bytes per tensor go to the host.

The digest is arithmetic on integers, so that a CPU and a GPU give the same number. It is a tree of sums of products:

- The bytes of a tensor, in row-major order, are words of 32 bits. Zeros fill the last row of `_ROW` words.
- Each row becomes two numbers of 64 bits. Each is the sum over the row of word x multiplier, modulo 2^64. The two numbers use
  different multipliers, and every place of a row has its own.
- The numbers of all rows are the words of the next level, which has other multipliers, until one row is left.
- A digest of name, dtype and shape is added.

SHAKE-256 makes the multipliers from the key. Whatever a change of a tensor is, multipliers drawn at random miss it with a chance of
at most 2^-64 (docs/internals/sync.md has the argument).
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

from lockstep.errors import LockstepError
from lockstep.to_device import sent

# 32-bit words per row, and levels of rows. Each level has 1/1024 of the words of the one below: four are enough for 16 TiB.
_ROW, _LEVELS = 4096, 4
# Two numbers of 64 bits per row.
_LANES = 2
# Bytes of a tensor that are multiplied at a time. Their products take four times this memory.
CHUNK = 8 << 20
KEY_BITS = 128

Named = tuple[str, torch.Tensor]


_drawn: set[int] = set()


def new_key() -> int:
    """A random key that this process has not had before.

    Raises:
        LockstepError: the system's source of randomness repeats itself.
    """
    key = secrets.randbits(KEY_BITS)
    if key in _drawn:
        raise LockstepError(
            "this machine has drawn the same random key of 128 bits twice, so that its source of randomness repeats itself: "
            "restart the machine or the container, and do not restore a process from a snapshot"
        )
    _drawn.add(key)
    return key


def key_for(tensors: Iterable[torch.Tensor]) -> int | None:
    """A new key if one of these tensors lies on a GPU; None: they lie in main memory, where xxh3 is faster."""
    return new_key() if any(tensor.is_cuda for tensor in tensors) else None


def device_digests(named: Sequence[Named], key: int) -> torch.Tensor:
    """The digests of tensors that lie on one device.

    Nothing waits for the device: the digests are computed in the order of the caller's stream. Beside a contiguous tensor they take
    at most 48 MB of memory. Other tensors are copied first.

    Args:
        named: names and tensors of one device, of any dtype and shape.
        key: from 0 to 2^128 - 1. Digests are comparable only under one key.

    Returns:
        (tensors, 2) int64 on the device.
    """
    if not named:
        return torch.empty(0, _LANES, dtype=torch.int64)
    device = named[0][1].device
    multipliers = _on_device(key, device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    with torch.no_grad():
        contents = torch.stack([_content(tensor.detach(), multipliers) for _, tensor in named])
        return contents + sent(torch.tensor([_outline(n, t, key) for n, t in named]), device)


def digest_texts(digests: torch.Tensor) -> list[str]:
    """Digests as hex texts. They come to the host in one copy."""
    return [row.tobytes().hex() for row in digests.cpu().numpy()]


def _content(tensor: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
    """(2,) int64: the digest of the bytes alone."""
    words = tensor.contiguous().flatten().view(torch.uint8)
    for level in multipliers:
        parts = [_row_sums(part, level) for part in words.split(CHUNK)]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(rows) == 1:
            return rows[0]
        words = rows.flatten().view(torch.uint8)
    raise ValueError(f"a tensor of {tensor.nbytes} bytes is too large for a digest")


def _row_sums(part: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """(rows, 2) int64 of bytes; the last row may be short."""
    row_bytes = 4 * _ROW
    missing = -len(part) % row_bytes if len(part) else row_bytes
    if missing:
        part = torch.nn.functional.pad(part, (0, missing))
    elif part.storage_offset() % 4 or part.data_ptr() % 4:
        # A view that begins in the middle of a word.
        part = part.clone()
    return (part.view(torch.int32).view(-1, 1, _ROW) * level).sum(-1)


def _outline(name: str, tensor: torch.Tensor, key: int) -> list[int]:
    outline = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
    digest = hashlib.blake2b(outline, digest_size=8 * _LANES, key=key.to_bytes(KEY_BITS // 8, "little")).digest()
    return np.frombuffer(digest, dtype="<i8").tolist()


@lru_cache(maxsize=4)
def _on_device(key: int, device: torch.device, stream: int) -> torch.Tensor:
    """(levels, 2, row) int64: the multipliers. Another stream gets its own copy, because it does not wait for this stream."""
    found = hashlib.shake_256(key.to_bytes(KEY_BITS // 8, "little")).digest(8 * _LEVELS * _LANES * _ROW)
    return sent(torch.frombuffer(bytearray(found), dtype=torch.int64).view(_LEVELS, _LANES, _ROW), device)
