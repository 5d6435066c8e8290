"""The keyed digest of a device equals arithmetic on Python's integers, for every dtype, and sees every change."""

from __future__ import annotations

import hashlib
import itertools
import json

import numpy as np
import pytest
import torch

from lockstep.contract import tensors as device_digest
from lockstep.contract.tensors import device_digests, digest_texts

KEY = 0x0123456789ABCDEF0123456789ABCDEF
_ALL = 1 << 64
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int64,
    torch.float64,
)


def text(tensor: torch.Tensor, name: str = "w", key: int = KEY) -> str:
    return digest_texts(device_digests([(name, tensor)], key))[0]


def by_hand(tensor: torch.Tensor, name: str = "w", key: int = KEY) -> str:
    """The definition, without PyTorch and without fixed widths."""
    row, raw = 4096, tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    secret = key.to_bytes(16, "little")
    stream = hashlib.shake_256(secret).digest(8 * 4 * 2 * row)
    multipliers = [int.from_bytes(stream[i : i + 8], "little") for i in range(0, len(stream), 8)]
    for level in itertools.count():
        raw += bytes(-len(raw) % (4 * row) if raw else 4 * row)
        words = np.frombuffer(raw, "<i4").tolist()
        sums = []
        for start in range(0, len(words), row):
            for lane in range(2):
                factors = multipliers[(2 * level + lane) * row :][:row]
                sums.append(
                    sum(w * m for w, m in zip(words[start : start + row], factors, strict=True)) % _ALL
                )
        if len(sums) == 2:
            break
        raw = b"".join(value.to_bytes(8, "little") for value in sums)
    outline = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
    added = hashlib.blake2b(outline, digest_size=16, key=secret).digest()
    parts = [int.from_bytes(added[i : i + 8], "little") for i in (0, 8)]
    return b"".join(((s + a) % _ALL).to_bytes(8, "little") for s, a in zip(sums, parts, strict=True)).hex()


def of_bytes(count: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> torch.Tensor:
    raw = torch.randint(
        0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)


def halves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views of a (40, 6) tensor of which no element is where a contiguous tensor has it."""
    return [
        tensor.T,
        tensor[1::3],
        tensor[:, 1:4],
        tensor[3:, 5],
        tensor[:1].expand(7, 6),
        tensor.flatten()[1:],
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_digest_is_the_definition_for_every_dtype_size_and_view(dtype):
    tensors = [of_bytes(count, dtype) for count in (0, 1, 2, 3, 5, 63, 4096, 16384, 16385)]
    # A whole row that begins in the middle of a word.
    tensors += [of_bytes(16384 // dtype.itemsize + 1, dtype)[1:]]
    tensors += [
        of_bytes(1, dtype)[0],
        of_bytes(0, dtype).view(0, 3),
        *halves(of_bytes(240, dtype).view(40, 6)),
    ]
    found = digest_texts(device_digests([("w", tensor) for tensor in tensors], KEY))
    assert found == [by_hand(tensor) for tensor in tensors]


def test_chunks_and_levels_give_the_digest_of_the_definition(monkeypatch):
    # 1500 rows need a third level. Chunks of one row and of several rows give the same digest.
    large = of_bytes(1500 * 16384 + 7)
    whole = text(large)
    assert whole == by_hand(large)
    monkeypatch.setattr(device_digest, "CHUNK", 16384 * 7)
    assert text(large) == whole


def test_every_flipped_bit_is_seen():
    tensor = of_bytes(257)
    flipped = tensor.repeat(8 * len(tensor), 1)
    for bit in range(8 * len(tensor)):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    digests = device_digests([("w", tensor)] + [("w", row) for row in flipped], KEY)
    # One by one the two numbers differ too, so that each of them alone sees the change.
    assert len(set(digests[:, 0].tolist())) == len(set(digests[:, 1].tolist())) == 1 + len(flipped)


def test_the_highest_bits_of_words_are_seen_in_every_row_and_level():
    """An odd multiplier modulo 2^64 would keep them; a digest of 32 bits, or with a single multiplier, would not."""
    tensor = torch.zeros(1030, 4096, dtype=torch.int32)
    before = text(tensor)
    for row, column in ((0, 0), (0, 4095), (511, 7), (1029, 4095)):
        changed = tensor.clone()
        changed[row, column] = -(1 << 31)
        assert text(changed) != before
    # Two changes whose sum is 0 in every word-wise sum.
    changed = tensor.clone()
    changed[3, 5] = changed[3, 6] = -(1 << 31)
    assert text(changed) != before


def test_exchanged_tensors_rows_and_shards_and_other_outlines_are_seen():
    tensor = of_bytes(64 * 4096, torch.int32).view(64, 4096)
    before = text(tensor)
    rows = tensor.clone()
    rows[[3, 40]] = tensor[[40, 3]]
    assert before not in (
        text(rows),
        text(tensor.roll(32, 0)),
        text(tensor.roll(1, 1)),
        text(tensor.roll(2048, 1)),
    )
    # The same bytes under another name, dtype or shape.
    assert before not in (text(tensor, "v"), text(tensor.view(torch.float32)), text(tensor.view(4096, 64)))
    one, other = of_bytes(10), of_bytes(10, seed=1)
    sent = digest_texts(device_digests([("a", one), ("b", other)], KEY))
    assert set(sent).isdisjoint(digest_texts(device_digests([("a", other), ("b", one)], KEY)))
    # Zeros at the end, where a row is filled with zeros.
    assert len({text(torch.zeros(n, dtype=torch.uint8)) for n in (0, 1, 3, 4, 5, 16383, 16384, 16385)}) == 8


def test_another_key_gives_other_digests_also_of_zeros():
    for tensor in (torch.zeros(5), torch.empty(0), of_bytes(100)):
        assert len({text(tensor, key=key) for key in (0, 1, 1 << 127, KEY, (1 << 128) - 1)}) == 5


def test_both_numbers_of_a_digest_depend_on_every_multiplier():
    """A unit in one word gives that word's multiplier: all of them differ, and none is small."""
    units = torch.eye(4096, dtype=torch.int32)
    digests = device_digests([("w", row) for row in units[::97]], KEY)
    outline = device_digests([("w", torch.zeros(4096, dtype=torch.int32))], KEY)
    multipliers = (digests - outline).flatten().tolist()
    assert len(set(multipliers)) == len(multipliers)
    assert min(map(abs, multipliers)) > 1 << 48
