"""A digest of names and arrays, for proofs that two programs have the same values.

The digest of what was sampled is compared with that of what a loss uses. The digest is xxh3-128. It costs about as
much as reading the memory once. It finds faults, but it does not protect against forgery.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash


def digest_of(*parts: str | npt.NDArray[Any]) -> str:
    """Hex digest of texts and arrays, in the order in which they are given. It also depends on the number of bytes of each."""
    digest = xxhash.xxh3_128()
    for part in parts:
        # xxhash reads the memory of an array itself, without a copy.
        data = memoryview(part.encode()) if isinstance(part, str) else np.ascontiguousarray(part).data
        digest.update(data.nbytes.to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
