"""Running servers for users who wrote their own trainer: `lockstep.engines.connect(url)`.

There are four calls: `update_weights`, `generate`, `score` and `verify`. `update_weights` loads a model's weights into the
servers and proves it. The others refuse to work with servers that do not hold these weights. This module is above `sync/` and
`parity/` and below `training/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from lockstep.engines.http.server_calls import ServerCalls, check_urls
from lockstep.engines.http.transport import WeightTransport
from lockstep.engines.http.vllm_server import VLLMServer
from lockstep.engines.protocol import Completion, EngineSettings, GenerationRequest, RequestKey
from lockstep.errors import InputError, ProofError
from lockstep.parity.gap import GapStats
from lockstep.parity.handshake import check_settings, expected_settings
from lockstep.parity.module_probe import ProbeRecord
from lockstep.parity.proven_push import ProvenPusher
from lockstep.parity.rescoring import Precision
from lockstep.server.keys import key_for
from lockstep.sync.push import SyncRecord
from lockstep.sync.wire.transport import choose_transport


class Connection:
    """Servers that hold a trainer's weights. Made by `connect`.

    Attributes:
        engine: the servers behind the engine protocol, for trainers that run the proofs themselves.
    """

    def __init__(self, engine: VLLMServer, *, enable_lora: bool = False) -> None:
        self.engine, self._enable_lora = engine, enable_lora
        self._model: PreTrainedModel | None = None
        self._pusher: ProvenPusher | None = None

    @property
    def version(self) -> int | None:
        """The version that the servers serve. None before the first update and after a server was lost."""
        return self.engine.version

    def settings(self) -> EngineSettings:
        """The settings that the servers run with."""
        return self.engine.settings()

    def update_weights(self, model: PreTrainedModel, version: int) -> SyncRecord:
        """Load a model's weights into the servers, and prove every module that the servers then run.

        The model is only read. Running requests continue with the new weights; each of their tokens carries its weight version.
        With `enable_lora`, running requests end with the adapter that they began with.

        Args:
            model: a causal language model of the same kind as the servers' model, in any dtype.
            version: a number that the caller chooses; it must grow with each update.

        Raises:
            ProofError: servers and model are not of the same kind, or the weights in use differ from those that were sent.
            EngineLost: a server was lost; call the error's `recover()` and update again.
        """
        if model is not self._model:
            check_settings(expected_settings(model, None, self.settings().dtype, min_model_len=2), self.settings())
            self._pusher = ProvenPusher(
                model, self.engine, self.settings().dtype, Precision(None), adapter_alone=self._enable_lora
            )
            self._model = model
        assert self._pusher is not None
        return self._pusher.push(version, every_module=True).push

    def generate(self, requests: Sequence[GenerationRequest]) -> dict[RequestKey, Completion]:
        """Answer every request. The result is keyed by request.

        Raises:
            InputError: a prompt does not fit the context; then no request has been started.
            ProofError: the servers have received no weights yet, or an answer does not match its request.
            EngineLost: a server was lost; call the error's `recover()`, update the weights and ask again.
        """
        return self.engine.generate(requests)

    def score(self, sequences: Mapping[str, Sequence[int]]) -> dict[str, tuple[float, ...]]:
        """Log-probs at temperature 1 of every id of each sequence, except the first id.

        Raises:
            InputError: a sequence has fewer than two ids, or fills the context.
            ProofError, EngineLost: as in `generate`.
        """
        return self.engine.score({name: tuple(ids) for name, ids in sequences.items()})

    def verify(self) -> tuple[ProbeRecord, GapStats]:
        """Prove that the servers compute with the model's current weights: every module, and a few whole sequences.

        Returns:
            The probe's errors per weight, and the parity gap on the sequences.

        Raises:
            ProofError: they do not. The message names the layers, or the gap.
        """
        if self._pusher is None or self.version is None:
            raise ProofError(
                "version",
                "the servers were asked to prove weights that they never received",
                "no update was made yet, or a server was lost since then",
                "call update_weights first",
            )
        return self._pusher.probe(self.version), self._pusher.score_canary(self.version)

    def close(self) -> None:
        """Disconnect from the servers. They keep running."""
        self.engine.close()


def connect(
    url: str | Sequence[str],
    *,
    key_file: str | None = None,
    timeout: float = 600.0,
    generation_timeouts: float = 1.0,
    transport: str = "auto",
    deltas: bool = True,
    group_host: str = "127.0.0.1",
    group_port: int = 0,
    enable_lora: bool = False,
    run: str = "",
) -> Connection:
    """Connect to running servers (`lockstep serve MODEL`, or vLLM's own server with the same arguments).

    Args:
        url: one base URL or several. Requests go to the least busy server, weights to all.
        key_file: file with the servers' key. Default: the variable LOCKSTEP_SERVER_KEY, or the key that a server on this
            machine saved.
        timeout: seconds that any call may take, and that the trainer waits for a server.
        generation_timeouts: how many of these time limits one request for a completion may take.
        transport: `shared_memory` (one machine), `gloo` (TCP), or `auto`: the fastest that all servers support.
        deltas: whether gloo sends servers in half precision only the elements of the weights that changed. This process and each
            worker then keep a copy of the weights in main memory, if there is room for it.
        group_host: this machine's address as servers on other machines reach it. Gloo listens on it and on no other.
        group_port: port that gloo listens on; 0 means a free port.
        enable_lora: send the adapter of a model alone, to vLLM's own LoRA. The server needs `--enable_lora`. Several runs may
            share it.
        run: a name of letters and digits. When a run comes back under its name, its old adapters leave the servers. Default: a
            new name.

    Raises:
        InputError: a key cannot be read or is refused, the transport cannot be used, or a server was started without an
            option that training needs. The message says what to change.
        LockstepError: a server did not answer in time.
    """
    urls = [url] if isinstance(url, str) else list(url)
    check_urls("url", urls)
    if not 0 < timeout < math.inf:
        raise InputError(f"timeout={timeout}; it must be a number of seconds above 0")
    keys = [key_for(url, key_file) for url in urls]

    def choose(servers: Sequence[ServerCalls]) -> WeightTransport:
        return choose_transport(transport, servers, group_host, group_port, timeout, deltas=deltas)

    if run and not run.isalnum():
        raise InputError(f"run={run!r}; it must consist of letters and digits")
    engine = VLLMServer(urls, keys, timeout=timeout, transport=choose, generation_timeouts=generation_timeouts, run=run)
    return Connection(engine, enable_lora=enable_lora)
