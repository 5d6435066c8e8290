"""Running servers for people with a trainer of their own: `lockstep.engines.connect(url)`.

Four calls: `update_weights`, `generate`, `score` and `verify`. The first brings the servers to a model's weights and proves it; the
others refuse to work with servers that do not hold them. Above `sync/` and `parity/`, below `training/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from lockstep.engines.protocol import Completion, EngineSettings, GenerationRequest, RequestKey
from lockstep.engines.server_calls import ServerCalls
from lockstep.engines.transport import WeightTransport
from lockstep.engines.vllm_server import VLLMServer
from lockstep.errors import ProofError
from lockstep.parity.gap import GapStats
from lockstep.parity.handshake import check_settings, expected_settings
from lockstep.parity.module_probe import ProbeRecord
from lockstep.parity.proven_push import ProvenPusher
from lockstep.parity.rescoring import Precision
from lockstep.server.keys import key_for
from lockstep.sync.push import SyncRecord
from lockstep.sync.transport import choose_transport


class Connection:
    """Servers that hold a trainer's weights. Made by `connect`.

    Attributes:
        engine: the servers behind the engine protocol, for trainers that prove for themselves.
    """

    def __init__(self, engine: VLLMServer) -> None:
        self.engine = engine
        self._model: PreTrainedModel | None = None
        self._pusher: ProvenPusher | None = None

    @property
    def version(self) -> int | None:
        """The version that the servers serve; None before the first update and after a loss."""
        return self.engine.version

    def settings(self) -> EngineSettings:
        """What the servers run with."""
        return self.engine.settings()

    def update_weights(self, model: PreTrainedModel, version: int) -> SyncRecord:
        """Bring the servers to a model's weights, and prove every module that they then run.

        The model is only read. Requests that are running go on with the new weights; their tokens carry the version of each.

        Args:
            model: a causal language model of the servers' kind, in any dtype.
            version: a number of the caller's, larger each time.

        Raises:
            ProofError: servers and model are not of one kind, or something else than was sent is in use.
            EngineLost: a server went away; call its `recover()` and update again.
        """
        if model is not self._model:
            check_settings(expected_settings(model, None, self.settings().dtype, min_model_len=2), self.settings())
            self._pusher = ProvenPusher(model, self.engine, self.settings().dtype, Precision(None))
            self._model = model
        assert self._pusher is not None
        return self._pusher.push(version, every_module=True).push

    def generate(self, requests: Sequence[GenerationRequest]) -> dict[RequestKey, Completion]:
        """Answer every request, by key.

        Raises:
            InputError: a prompt does not fit the context; no request has been started then.
            ProofError: no weights were given yet, or an answer is not what was asked for.
            EngineLost: a server went away; call its `recover()`, update the weights and ask again.
        """
        return self.engine.generate(requests)

    def score(self, sequences: Mapping[str, Sequence[int]]) -> dict[str, tuple[float, ...]]:
        """Log-probs at temperature 1 of every id but the first of each sequence.

        Raises:
            InputError: a sequence has fewer than two ids, or fills the context.
            ProofError, EngineLost: as `generate`.
        """
        return self.engine.score({name: tuple(ids) for name, ids in sequences.items()})

    def verify(self) -> tuple[ProbeRecord, GapStats]:
        """Prove that the servers compute with the weights that the model has now: every module, and a few whole sequences.

        Returns:
            The probe's errors by weight, and the gap on the sequences.

        Raises:
            ProofError: they do not; names the layers, or the gap.
        """
        if self._pusher is None or self.version is None:
            raise ProofError(
                "version",
                "the servers were asked to prove weights that nobody gave them",
                "no update was made yet, or a server was lost since",
                "call update_weights first",
            )
        return self._pusher.probe(self.version), self._pusher.score_canary(self.version)

    def close(self) -> None:
        """Let go of the servers, which stay up."""
        self.engine.close()


def connect(
    url: str | Sequence[str],
    *,
    key_file: str | None = None,
    timeout: float = 600.0,
    transport: str = "auto",
    group_host: str = "127.0.0.1",
    group_port: int = 0,
) -> Connection:
    """Connect to running servers (`lockstep serve MODEL`, or vLLM's own with the same arguments).

    Args:
        url: base URL, or several: requests go to the least busy, weights to all.
        key_file: file with the servers' key. Default: the variable LOCKSTEP_SERVER_KEY, or what a server on this machine left.
        timeout: seconds that any one call may take, and that a server is waited for.
        transport: `shared_memory` (one machine), `gloo` (TCP), or `auto`: the fastest that all servers can take part in.
        group_host: this machine's address as servers elsewhere reach it; gloo listens there and nowhere else.
        group_port: port where gloo meets the servers; 0: a free one.

    Raises:
        InputError: a key cannot be read or is refused, the transport cannot be used, or a server was started without what
            training needs; says what to change.
        LockstepError: a server did not answer in time.
    """
    urls = [url] if isinstance(url, str) else list(url)
    keys = [key_for(url, key_file) for url in urls]

    def choose(servers: Sequence[ServerCalls]) -> WeightTransport:
        return choose_transport(transport, servers, group_host, group_port, timeout)

    return Connection(VLLMServer(urls, keys, timeout=timeout, transport=choose))
