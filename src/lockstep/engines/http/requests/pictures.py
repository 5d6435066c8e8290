"""Pictures for vLLM servers: which ones are sent, in which format, and the proof that the server's workers got the same pixels.

Each picture is sent once per server, before the first completion of its prompt. A request for one token contains it,
and the answer is dropped. vLLM keeps the picture's tensors in its cache of inputs, under the picture's digest. The
requests for completions then contain only the digest. The workers report the digest of the tensors that they have
encoded (`engines/vllm/worker.py`).

For each picture, a request contains only the index of the first placeholder and the number of placeholders. Therefore each tile of
a picture is sent as a separate picture, called a piece (`Picture.pieces`). In this module, "picture" means such a piece. Its format
is the one of vLLM's endpoint: names, dtypes, shapes and raw bytes in msgpack. No part of it is pickled.
"""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import torch

from lockstep.contract.protocol import GenerationRequest
from lockstep.engines.vllm.port.pictures import piece_places, piece_tensors
from lockstep.errors import InputError, ProofError
from lockstep.images.pictures import Picture, PromptPictures

# vLLM's msgpack extension for the bytes of a tensor.
_RAW = 3


class SentPictures:
    """The pictures that one server holds, as far as this trainer knows.

    vLLM's cache drops the pictures that were used least recently. This class relies on only half of the cache, because
    requests may reach the server in another order than the trainer sends them.
    """

    def __init__(self) -> None:
        # Bytes of each picture by digest. The picture that was used last is at the end.
        self._held: OrderedDict[str, int] = OrderedDict()
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()

    def one_at_a_time(self, pictures: PromptPictures) -> AbstractAsyncContextManager[Any]:
        """A lock that all requests with these pictures share. One request sends the pictures, and the others wait for it."""
        return self._locks.setdefault(pictures.digests, asyncio.Lock())

    def missing(self, pictures: PromptPictures, capacity: int) -> tuple[Picture, ...]:
        """The pictures that the server does not hold.

        Args:
            capacity: bytes of the server's cache of inputs.

        Raises:
            InputError: the pictures do not fit into half of the cache.
        """
        sizes = {picture.digest: _size(picture) for picture in pictures.pictures}
        if (needed := sum(sizes.values())) > capacity // 2:
            raise InputError(
                f"the pictures of a prompt have {needed} bytes, and the server's cache of inputs has {capacity} bytes; it must "
                "have twice as many: start the server with a larger --mm-processor-cache-gb, or use smaller pictures"
            )
        return tuple({p.digest: p for p in pictures.pictures if p.digest not in self._held}.values())

    def use(self, pictures: PromptPictures, capacity: int) -> None:
        """Record that a request with these pictures is being sent. The server must hold all of them."""
        for picture in pictures.pictures:
            self._held[picture.digest] = _size(picture)
            self._held.move_to_end(picture.digest)
        while sum(self._held.values()) > capacity // 2:
            self._held.popitem(last=False)

    def forget(self) -> None:
        """Assume that the server holds no picture, because it may have been started again."""
        self._held.clear()


def features(pictures: PromptPictures, sent: Collection[Picture] = ()) -> dict[str, Any]:
    """The field `features` of a request to vLLM's endpoint: the digest of each picture, and its position in the prompt.

    Args:
        sent: the pictures whose tensors are part of the request; vLLM takes the others from its cache.
    """
    tensors = {picture.digest: encoded(picture) for picture in sent}
    pictures = pictures.in_pieces
    return {
        "mm_hashes": {"image": list(pictures.digests)},
        "mm_placeholders": {"image": _places(pictures)},
        "kwargs_data": {"image": [tensors.get(digest) for digest in pictures.digests]},
    }


def encoded(picture: Picture) -> str:
    """The tensors of a picture in the format of vLLM 0.32.0: msgpack in base64."""
    rows, single = piece_tensors(picture)
    whole = {"keep_on_cpu": False, "slices": [[0, len(picture.pixel_values), None]], "dim": 0}
    item = {name: {"data": _tensor(tensor), "field": ["flat", whole]} for name, tensor in rows.items()}
    item |= {name: {"data": _tensor(t), "field": ["batched", {"keep_on_cpu": True}]} for name, t in single.items()}
    return base64.b64encode(msgspec.msgpack.encode(item)).decode()


def check_places(request: GenerationRequest, answer: Mapping[str, Any]) -> None:
    """Check that the server has put the same number of pictures into the prompt, at the same positions.

    Raises:
        ProofError: the number or a position differs.
    """
    found = {kind: places for kind, places in (answer.get("mm_placeholders") or {}).items() if places}
    expected = {} if request.pictures is None else {"image": _places(request.pictures)}
    if found != expected:
        raise ProofError(
            "echo",
            f"request {request.key}: pictures were sent for the places {expected!s:.200}, and the server reports {found!s:.200}",
            "a program between trainer and server changed the request, or this release of vLLM reads it differently",
            "install the version of vLLM that Lockstep is tested with, and remove proxies between trainer and server",
        )


def check_encoded(pictures: Sequence[Picture], workers: Sequence[Mapping[str, str | None]], url: str) -> None:
    """Check that the workers of a server have encoded the pictures that were sent.

    Args:
        workers: per worker and digest, the digest of the tensors that the worker has encoded under it. None: it has encoded none;
            the later stages of a pipeline never encode pictures.

    Raises:
        ProofError: a worker has encoded other tensors, or no worker has encoded any.
    """
    for picture in pictures:
        found = {worker.get(picture.digest) for worker in workers} - {None}
        if found != {picture.digest}:
            raise ProofError(
                "echo",
                f"the server at {url} encoded {', '.join(map(str, found)) or 'nothing'} under the digest {picture.digest}",
                "another picture was sent or kept under this digest, or its tensors were changed on their way",
                "restart the server, so that its cache of pictures is empty; if this happens again, report it with this message",
            )


def _places(pictures: PromptPictures) -> list[dict[str, int]]:
    return [{"offset": start, "length": length} for start, length in piece_places(pictures.in_pieces)]


def _tensor(tensor: torch.Tensor) -> list[Any]:
    raw = msgspec.msgpack.Ext(_RAW, tensor.contiguous().numpy().tobytes())
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw]


def _size(picture: Picture) -> int:
    rows, single = piece_tensors(picture)
    return sum(tensor.nbytes for tensor in (*rows.values(), *single.values()))
