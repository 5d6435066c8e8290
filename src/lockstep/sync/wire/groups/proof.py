"""Proves to both ends of a push over gloo or NCCL that the other end knows the secret of this push.

torch's store and the connections of gloo and NCCL have no authentication: any program that reaches the port can write
into the store, or connect before a server does. Therefore the trainer makes a secret per push. The servers get it in
the call that announces the push. Every address in the store is signed with the secret. Before the first weight is
sent, both ends of each connection of gloo, and all ranks of a group of NCCL, prove that they know the secret. The
weights are not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_DIGEST_BYTES = 32
_LOOK_EVERY = 0.002
_UNKNOWN_PROGRAM = (
    "another program took part in this push, so no weights were sent. Only the trainer and its servers should reach "
    "vllm_group_host and its ports: between machines use a tunnel or a private network"
)


def new_secret() -> str:
    """A secret for one push."""
    return secrets.token_hex(_DIGEST_BYTES)


class SignedStore(dist.Store):
    """A view of a store in which every value is signed. A value that another program wrote is refused.

    It polls the store, because a torch store that waits for a value blocks all other threads.

    Args:
        timeout: seconds to wait for a value at most.
        prefix: beginning of every key in the store, so that several groups can use one store.

    Raises:
        RuntimeError: from `get`, for a value without this push's signature.
    """

    def __init__(self, store: dist.Store, secret: str, timeout: float, prefix: str = "") -> None:
        super().__init__()
        self._store, self._secret, self._timeout, self._prefix = store, secret, timeout, prefix
        self._ended = False

    def end(self) -> None:
        """Make every wait for a value raise an error, now and later."""
        self._ended = True

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value with its signature."""
        data, key = value.encode() if isinstance(value, str) else bytes(value), self._prefix + key
        self._store.set(key, (_proof(self._secret, key, data) + data).hex())

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it without its signature."""
        self.wait([key])
        key = self._prefix + key
        try:
            found = bytes.fromhex(self._store.get(key).decode())
        except ValueError:
            found = b""
        signature, data = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
        if not hmac.compare_digest(signature, _proof(self._secret, key, data)):
            raise RuntimeError(_UNKNOWN_PROGRAM)
        return data

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value."""
        limit, keys = (
            self._timeout if timeout is None else timeout.total_seconds(),
            [self._prefix + key for key in keys],
        )
        deadline = time.monotonic() + limit
        while self._ended or not self._store.check(keys):
            if self._ended:
                raise RuntimeError("the push has ended")
            if time.monotonic() > deadline:
                raise RuntimeError(f"a worker did not connect within {limit:.0f} s")
            time.sleep(_LOOK_EVERY)


def authenticate(group: dist.ProcessGroup, secret: str, rank: int, size: int) -> None:
    """Exchange proofs over the connection between each two ranks. Every rank calls.

    Raises:
        RuntimeError: the other end of a connection does not know the secret, or is gone.
    """
    others = [other for other in range(size) if other != rank]
    found = {other: torch.zeros(_DIGEST_BYTES, dtype=torch.uint8) for other in others}
    own = {other: torch.tensor(list(_proof(secret, _direction(rank, other))), dtype=torch.uint8) for other in others}
    work = [group.send([own[other]], other, 0) for other in others]
    work += [group.recv([found[other]], other, 0) for other in others]
    for each in work:
        each.wait()
    for other in others:
        if not hmac.compare_digest(bytes(found[other].tolist()), _proof(secret, _direction(other, rank))):
            raise RuntimeError(_UNKNOWN_PROGRAM)


def prove(group: dist.ProcessGroup, secret: str, rank: int, size: int, device: torch.device) -> None:
    """Give every rank of a group a proof of this rank, in one operation of the group. Every rank calls.

    For groups that cannot send from one rank to another without a further connection.

    Args:
        device: the device that the group uses.

    Raises:
        RuntimeError: a rank does not know the secret, or is gone.
    """
    own = torch.tensor(list(_proof(secret, f"rank {rank} of a device")), dtype=torch.uint8, device=device)
    found = [torch.zeros_like(own) for _ in range(size)]
    group.allgather([found], [own]).wait()
    for other, proof in enumerate(found):
        if not hmac.compare_digest(_proof(secret, f"rank {other} of a device"), bytes(proof.tolist())):
            raise RuntimeError(_UNKNOWN_PROGRAM)


def _direction(sender: int, receiver: int) -> str:
    return f"rank {sender} to rank {receiver}"


def _proof(secret: str, subject: str, data: bytes = b"") -> bytes:
    return hmac.digest(secret.encode(), subject.encode() + b"\0" + data, "sha256")
