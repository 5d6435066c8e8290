"""Pictures for vLLM servers: what is sent, how it is written, and the proof that the server's workers got these very pixels.

`engines/http/server_requests.py` uses it. A picture is sent once per server, before the first completion of its prompt: in a
request for one token, whose answer is dropped. vLLM keeps the picture's tensors in its cache of inputs, under the picture's digest.
All completions then name the digest alone. The workers report the digest of what they encoded (`sync/vllm/worker.py`).

A request says of a picture only where its first placeholder is and how many there are. Therefore each tile of a picture is sent as
a picture of its own (`Picture.pieces`), and everything here is about such pieces. A piece is written as vLLM's endpoint expects it:
names, dtypes, shapes and raw bytes in msgpack. Nothing in it is pickled.
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

from lockstep.engines.protocol import GenerationRequest
from lockstep.engines.vllm.pictures import piece_places, piece_tensors
from lockstep.errors import InputError, ProofError
from lockstep.images.pictures import Picture, PromptPictures

# vLLM's msgpack extension for the bytes of a tensor.
_RAW = 3


class SentPictures:
    """The pictures that one server holds, as far as this trainer knows.

    vLLM's cache drops the pictures that were used least recently. This class counts on half of it, so that requests that overtake
    each other on their way do not matter.
    """

    def __init__(self) -> None:
        # Bytes of each picture by digest, the one that was used last at the end.
        self._held: OrderedDict[str, int] = OrderedDict()
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()

    def one_at_a_time(self, pictures: PromptPictures) -> AbstractAsyncContextManager[Any]:
        """A lock that all requests with these pictures share, so that one of them sends the pictures and the others wait for it."""
        return self._locks.setdefault(pictures.digests, asyncio.Lock())

    def missing(self, pictures: PromptPictures, capacity: int) -> tuple[Picture, ...]:
        """The pictures that the server does not hold.

        Args:
            capacity: bytes of the server's cache of inputs.

        Raises:
            InputError: the pictures do not fit into the half of the cache that is counted on.
        """
        sizes = {picture.digest: _size(picture) for picture in pictures.pictures}
        if (needed := sum(sizes.values())) > capacity // 2:
            raise InputError(
                f"the pictures of a prompt have {needed} bytes, and the server's cache of inputs has {capacity}; it must have "
                "twice as many: start the server with a larger --mm-processor-cache-gb, or use smaller pictures"
            )
        return tuple({p.digest: p for p in pictures.pictures if p.digest not in self._held}.values())

    def use(self, pictures: PromptPictures, capacity: int) -> None:
        """Note that a request with these pictures is sent now, and that the server holds all of them."""
        for picture in pictures.pictures:
            self._held[picture.digest] = _size(picture)
            self._held.move_to_end(picture.digest)
        while sum(self._held.values()) > capacity // 2:
            self._held.popitem(last=False)

    def forget(self) -> None:
        """Hold nothing to be there: the server may have been started again."""
        self._held.clear()


def features(pictures: PromptPictures, sent: Collection[Picture] = ()) -> dict[str, Any]:
    """The field `features` of a request to vLLM's endpoint: where each picture is in the prompt, and which one it is.

    Args:
        sent: the pictures whose tensors are sent along; vLLM takes the others from its cache.
    """
    tensors = {picture.digest: encoded(picture) for picture in sent}
    pictures = pictures.in_pieces
    return {
        "mm_hashes": {"image": list(pictures.digests)},
        "mm_placeholders": {"image": _places(pictures)},
        "kwargs_data": {"image": [tensors.get(digest) for digest in pictures.digests]},
    }


def encoded(picture: Picture) -> str:
    """The tensors of a picture for vLLM 0.32.0: msgpack in base64."""
    rows, single = piece_tensors(picture)
    whole = {"keep_on_cpu": False, "slices": [[0, len(picture.pixel_values), None]], "dim": 0}
    item = {name: {"data": _tensor(tensor), "field": ["flat", whole]} for name, tensor in rows.items()}
    item |= {name: {"data": _tensor(t), "field": ["batched", {"keep_on_cpu": True}]} for name, t in single.items()}
    return base64.b64encode(msgspec.msgpack.encode(item)).decode()


def check_places(request: GenerationRequest, answer: Mapping[str, Any]) -> None:
    """Check that the server put as many pictures into the prompt as were sent, and each into its place.

    Raises:
        ProofError: it did not.
    """
    found = {kind: places for kind, places in (answer.get("mm_placeholders") or {}).items() if places}
    due = {} if request.pictures is None else {"image": _places(request.pictures)}
    if found != due:
        raise ProofError(
            "echo",
            f"request {request.key}: pictures were sent for the places {due!s:.200}, and the server reports {found!s:.200}",
            "a program between trainer and server changed the request, or this release of vLLM reads it in another way",
            "install the version of vLLM that Lockstep is tested with, and remove proxies between trainer and server",
        )


def check_encoded(pictures: Sequence[Picture], workers: Sequence[Mapping[str, str | None]], url: str) -> None:
    """Check that the workers of a server have encoded the pictures that were sent.

    Args:
        workers: for each worker and digest, the digest of the tensors that the worker has encoded under it; None: it has encoded
            none, as the later stages of a pipeline.

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
                "restart the server, so that it keeps no picture; if this happens again, report it with this message",
            )


def _places(pictures: PromptPictures) -> list[dict[str, int]]:
    return [{"offset": start, "length": length} for start, length in piece_places(pictures.in_pieces)]


def _tensor(tensor: torch.Tensor) -> list[Any]:
    raw = msgspec.msgpack.Ext(_RAW, tensor.contiguous().numpy().tobytes())
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw]


def _size(picture: Picture) -> int:
    rows, single = piece_tensors(picture)
    return sum(tensor.nbytes for tensor in (*rows.values(), *single.values()))
