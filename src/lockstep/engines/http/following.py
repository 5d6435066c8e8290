"""A client of servers to which another process pushes weights. This client only requests completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from lockstep.engines.http.vllm_server import VLLMServer
from lockstep.errors import LockstepError
from lockstep.sync.wire.receivers import WeightReceiverCalls


class FollowingServer(VLLMServer):
    """Servers that hold the weights which the `VLLMServer` of another process has pushed.

    Args:
        urls, keys, timeout, key_now: as in `VLLMServer`.
        session: the `session` of the process that pushes. Answers that were sampled by any other trainer's weights are refused.
    """

    def __init__(
        self,
        urls: Sequence[str],
        keys: Sequence[str | None],
        *,
        timeout: float,
        session: str,
        key_now: Callable[[str], str | None] = lambda url: None,
    ) -> None:
        super().__init__(urls, keys, timeout=timeout, transport=lambda servers: _NoWeights(), key_now=key_now)
        self.session = session

    def follow(self, version: int) -> None:
        """Accept answers of a weight version that the other process has committed."""
        if version != self._version:
            self._stamps[self._stamp(version)] = version
            self._committed.append(version)
            self._version = version


class _NoWeights:
    """The weight transport of a client that sends no weights."""

    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]], servers: Sequence[WeightReceiverCalls], base: str = ""
    ) -> None:
        raise LockstepError("this process sends no weights to the servers; another process sends them")

    def forget(self) -> None:
        """Does nothing: this client has no agreements with the servers."""

    def close(self) -> None:
        """Does nothing: this client has no open connections for weights."""
