"""The transport digest: a description of tensors down to their bytes, made by the same code at both ends of a push.

The sending end is `sync/source.py`, the receiving end is each engine; `sync/push.py` compares the two. xxh3 reads memory at its
full speed (540 MB in 0.02 s on two cores), so that every byte of every push is covered. It finds faults, not forgeries: whoever
can change the weights on purpose can also change the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from lockstep.engines.protocol import TensorSpec

# xxhash releases the interpreter's lock while it reads.
_POOL = ThreadPoolExecutor(2, thread_name_prefix="lockstep-digest")


def tensor_specs(named: Sequence[tuple[str, torch.Tensor]]) -> tuple[TensorSpec, ...]:
    """Name, dtype, shape and byte digest of each tensor."""
    digests = _POOL.map(tensor_digest, [tensor for _, tensor in named])
    return tuple(
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest)
        for (name, tensor), digest in zip(named, digests, strict=True)
    )


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hex xxh3-128 of a tensor's elements in row-major order."""
    flat = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)
