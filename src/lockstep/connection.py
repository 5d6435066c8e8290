"""A connection to running servers, for users with their own trainer: `lockstep.engines.connect(url)`.

It has four methods: `update_weights`, `generate`, `score` and `verify`. `update_weights` loads a model's weights into
the servers and proves that they hold them. The other methods raise an error if a server does not hold these weights.
This module uses `weights/` and `watch/`, and does not use `learn/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from lockstep.contract.protocol import Completion, EngineSettings, GenerationRequest, RequestKey
from lockstep.engines.servers.calls import ServerCalls, check_urls
from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import InputError, ProofError
from lockstep.extensions import PUSHES, load
from lockstep.models.arithmetic import Precision
from lockstep.server.keys import key_for
from lockstep.watch.gap import GapStats
from lockstep.watch.modules import ProbeRecord
from lockstep.watch.push import ProvenPusher, PushExtension
from lockstep.watch.settings import check_settings, expected_settings
from lockstep.weights.push import SyncRecord
from lockstep.weights.wire.transport import WeightTransport, choose_transport


class Connection:
    """A connection to servers that hold a trainer's weights. `connect` makes it.

    Attributes:
        engine: the servers behind the engine protocol, for trainers that run the proofs themselves.
    """

    def __init__(self, engine: VLLMServer, *, enable_lora: bool = False) -> None:
        self.engine, self._enable_lora = engine, enable_lora
        self._model: PreTrainedModel | None = None
        self._pusher: ProvenPusher | None = None

    @property
    def version(self) -> int | None:
        """The weight version that the servers use. None before the first update and after a server was lost."""
        return self.engine.version

    def settings(self) -> EngineSettings:
        """The settings that the servers run with."""
        return self.engine.settings()

    def update_weights(self, model: PreTrainedModel, version: int) -> SyncRecord:
        """Load a model's weights into the servers, and prove every module that the servers then run.

        The model is not changed. Running requests continue with the new weights, and each token has the version of
        the weights that sampled it. With `enable_lora`, a running request keeps the adapter that it began with.

        Args:
            model: a causal language model of the same kind as the servers' model, in any dtype.
            version: number of the weights, chosen by the caller. It must be larger at each update.

        Raises:
            ProofError: servers and model are not of the same kind, or the weights in use differ from those that were
                sent.
            EngineLost: a server was lost; call the error's `recover()` and update again.
        """
        if model is not self._model:
            settings = self.settings()
            check_settings(expected_settings(model, None, settings.dtype, min_model_len=2), settings)
            extension = load(PUSHES["vllm_enable_lora"]) if self._enable_lora else PushExtension
            self._pusher = ProvenPusher(
                model, self.engine, settings.dtype, Precision(None), extension=extension
            )
            self._model = model
        assert self._pusher is not None
        return self._pusher.push(version, every_module=True).push

    def generate(self, requests: Sequence[GenerationRequest]) -> dict[RequestKey, Completion]:
        """Answer every request. Returns the completions by key.

        Raises:
            InputError: a prompt does not fit the context. No request has then been started.
            ProofError: the servers have received no weights yet, or an answer does not match its request.
            EngineLost: a server was lost; call the error's `recover()`, update the weights and ask again.
        """
        return self.engine.generate(requests)

    def score(self, sequences: Mapping[str, Sequence[int]]) -> dict[str, tuple[float, ...]]:
        """Log-probs at temperature 1 of every id of each sequence, except the first id.

        Raises:
            InputError: a sequence has fewer than two ids, or fills the whole context.
            ProofError: the servers have received no weights yet, or an answer does not match its request.
            EngineLost: a server was lost.
        """
        return self.engine.score({name: tuple(ids) for name, ids in sequences.items()})

    def verify(self) -> tuple[ProbeRecord, GapStats]:
        """Prove that the servers compute with the model's current weights.

        The proof covers every module and a few whole sequences.

        Returns:
            The probe's errors per weight, and the parity gap on the sequences.

        Raises:
            ProofError: the servers compute with other weights. The message names the layers, or the gap.
        """
        if self._pusher is None or self.version is None:
            raise ProofError(
                "version",
                "verify was called before the servers had received weights",
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
        url: one base URL or several. Each request goes to the least busy server; weights go to all servers.
        key_file: file with the servers' key. Default: the variable LOCKSTEP_SERVER_KEY, or the key that a server on
            this machine saved.
        timeout: seconds that a call may take, and seconds to wait for a server.
        generation_timeouts: the time limit of one request for a completion, as a multiple of `timeout`.
        transport: `shared_memory` (one machine), `cuda_ipc` (one GPU), `gloo` (TCP), `nccl` (from GPU to GPU), or
            `auto`: the fastest one that all servers support, without `nccl`. `cuda_ipc` and `nccl` have not been run
            on a GPU yet.
        deltas: whether gloo sends only the elements that have changed, to servers in half precision. This process and
            each worker then keep a copy of the weights in main memory, if there is room for it.
        group_host: the address at which servers on other machines reach this machine. This process listens on this
            address only.
        group_port: port on which workers meet this process; 0 means a free port.
        enable_lora: send only the adapter of a model, and let vLLM's own LoRA apply it. The servers need
            `--enable_lora`. Several runs may share a server.
        run: name of the run, of letters and digits. If a run connects again with the same name, its old adapters are
            removed from the servers. Default: a new name.

    Raises:
        InputError: a key cannot be read or is refused, the transport cannot be used, or a server was started without an
            option that training needs. The message says what to change.
        LockstepError: a server did not answer in time.
    """
    urls = [url] if isinstance(url, str) else list(url)
    check_urls("url", urls, "several of them in a list")
    if not 0 < timeout < math.inf:
        raise InputError(f"timeout={timeout}; it must be a number of seconds above 0")
    keys = [key_for(url, key_file) for url in urls]

    def choose(servers: Sequence[ServerCalls]) -> WeightTransport:
        return choose_transport(transport, servers, group_host, group_port, timeout, deltas=deltas)

    if run and not run.isalnum():
        raise InputError(f"run={run!r}; it must consist of letters and digits")
    engine = VLLMServer(
        urls,
        keys,
        timeout=timeout,
        transport=choose,
        generation_timeouts=generation_timeouts,
        run=run,
        key_now=lambda url: key_for(url, key_file),
    )
    return Connection(engine, enable_lora=enable_lora)
