"""A client of servers whose weights another process pushes. It asks for completions and never sends weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lockstep.engines.http.transport import WeightReceiverCalls
from lockstep.engines.http.vllm_server import VLLMServer
from lockstep.errors import LockstepError


class FollowingServer(VLLMServer):
    """Servers that hold the weights of another process's `VLLMServer`.

    Args:
        urls, keys, timeout: as in `VLLMServer`.
        session: the other client's `session`. Answers of any other trainer's weights are refused.
    """

    def __init__(self, urls: Sequence[str], keys: Sequence[str | None], *, timeout: float, session: str) -> None:
        super().__init__(urls, keys, timeout=timeout, transport=lambda servers: _NoWeights())
        self.session = session

    def follow(self, version: int) -> None:
        """Expect answers of a version that the other process has committed."""
        if version != self._version:
            self._stamps[self._stamp(version)] = version
            self._committed.append(version)
            self._version = version


class _NoWeights:
    """The transport of a client that sends no weights."""

    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]], servers: Sequence[WeightReceiverCalls], base: str = ""
    ) -> None:
        raise LockstepError("this client of the servers sends no weights: the process that owns them does")

    def forget(self) -> None:
        """Nothing was agreed."""

    def close(self) -> None:
        """Nothing is open."""
