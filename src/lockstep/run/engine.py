"""The engine of a run: started or found as the config asks, with servers that join and leave.

Engines are started and found only here; what only servers can do is asked by `isinstance(engine, VLLMServer)`.

Servers change between two generations, before and after a push, on the rank that holds the engine, as the file of
`vllm_server_url_file` says. A server that joins is at first an engine of its own. It passes what servers pass at the
start: the checks of its settings, a push of all weights, a probe of every module, and the canary. It gets the weights
that the others have just got. Therefore the next push can send all servers what changed.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.config.contradictions import UNUSABLE
from lockstep.config.run import OnlineConfig
from lockstep.connection import connect
from lockstep.contract.protocol import Engine
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers.server import VLLMServer
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.engines.vllm.arguments import refuse_family, told_by_vllm, usual_sequences
from lockstep.engines.vllm.in_process import VLLMInProcess, whole_arguments
from lockstep.engines.vllm.start import TransportChoice, build_settings, vllm_installed
from lockstep.errors import EngineLost, InputError, LockstepError
from lockstep.extensions import ENGINES, asked
from lockstep.model_files import load_files
from lockstep.models.adapters import causal_model
from lockstep.models.parameters import checkpoint_tensors
from lockstep.models.policy import BAD_FILES, context_length
from lockstep.models.resolve import resolve_model
from lockstep.private_caches import expanded
from lockstep.progress import busy
from lockstep.rollouts.ahead import GenerationsAhead
from lockstep.rollouts.driver import Driver
from lockstep.safe_text import without_secrets
from lockstep.shards.passes import BrokenPass
from lockstep.tokens.chat import directory_end_ids, load_tokenizer
from lockstep.watch.engine import Proofs
from lockstep.watch.settings import check_settings, expected_settings
from lockstep.weights.wire.transport import choose_transport

_logger = logging.getLogger(__name__)


def start_engine(
    config: OnlineConfig,
    model_path: str,
    tokenizer: PreTrainedTokenizerBase,
    max_model_len: int,
    policy: PreTrainedModel,
    ranks: int = 1,
) -> Engine:
    """Start vLLM here, connect to servers in server mode, or start transformers where vLLM is missing."""
    further: dict[str, Any] = {}
    for arguments_for in asked(ENGINES, config):
        further |= arguments_for(policy)
    if config.vllm_mode == "server":
        urls = config.server_urls
        with busy(f"connecting to {', '.join(urls)}"):
            return connect_servers(config, urls)
    workers = config.vllm_tensor_parallel_size
    on_vllm = vllm_installed() if config.use_vllm is None else config.use_vllm
    if on_vllm:
        # The longest sequence is known now.
        check_positions(causal_model(policy).config.get_text_config(), max_model_len, by_capacity=True)
    if ranks > 1 and on_vllm:
        check_beside_ranks(ranks, workers, "vllm_tensor_parallel_size", "vllm_mode")
    return start_here(
        model_path,
        tokenizer,
        use_vllm=config.use_vllm,
        vllm_arguments={
            **_arguments_of(config, further),
            "transport": transport_here(
                config.vllm_weight_transport, config.vllm_server_timeout, deltas=config.vllm_weight_deltas
            ),
        },
        use_cpu=config.use_cpu,
        dtype=config.engine_torch_dtype,
        fp32_head=config.engine_head_dtype != config.engine_torch_dtype,
        max_model_len=max_model_len,
        max_num_seqs=config.vllm_max_num_seqs,
        timeout=config.generation_timeout,
    )


def _arguments_of(config: OnlineConfig, further: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that only `VLLMInProcess` takes, as far as a config says them."""
    return {
        "gpu_memory_utilization": config.vllm_gpu_memory_utilization,
        "seed": config.seed,
        "tensor_parallel_size": config.vllm_tensor_parallel_size,
        "sleep_level": config.sleep_level,
        "quantization": config.vllm_quantization,
        "engine_kwargs": {
            # With "vllm", vLLM would refuse the families that it runs through transformers only.
            "model_impl": "auto" if config.vllm_model_impl == "vllm" else config.vllm_model_impl,
            **further,
            **(config.vllm_engine_kwargs or {}),  # type: ignore[dict-item]
        },
    }


def check_engine_arguments(config: OnlineConfig, model: str) -> None:
    """Let vLLM build its settings from `vllm_engine_kwargs`, before a model is loaded.

    The longest sequence is not known yet. What vLLM refuses both for the shortest that is possible and for the
    longest is wrong.
    """
    if not config.vllm_engine_kwargs or not (
        vllm_installed() if config.use_vllm is None else config.use_vllm
    ):
        return
    path = resolve_model(model)
    try:
        longest = context_length(load_files(AutoConfig, path))
    except BAD_FILES:
        # Loading the model says what is wrong.
        return
    with busy("reading vllm_engine_kwargs"):
        shortest = config.context_limit or config.completion_limit + 1
        longest = shortest if longest is None else longest
        for length in {longest, min(shortest, longest)}:
            arguments = whole_arguments(
                path,
                dtype=config.engine_torch_dtype,
                fp32_head=config.engine_head_dtype != config.engine_torch_dtype,
                max_model_len=length,
                max_num_seqs=config.vllm_max_num_seqs or usual_sequences(),
                **_arguments_of(config, {}),
            )
            try:
                return build_settings(arguments)
            except InputError:
                raise
            except (*UNUSABLE, AssertionError) as error:
                refused = error
    said = without_secrets(config.vllm_engine_kwargs)
    raise InputError(f"vllm_engine_kwargs={said} cannot be used: {told_by_vllm(refused)}") from refused


def refuse_before_loading(config: OnlineConfig, model: str) -> None:
    """Refuse a model that the engine of a config does not run as the trainer does, before either has loaded it.

    So it is if already the shortest prompts make sequences whose positions would differ (`check_positions`).
    """
    elsewhere = config.vllm_mode == "server"
    on_vllm = elsewhere or (vllm_installed() if config.use_vllm is None else config.use_vllm)
    path = resolve_model(model)
    if on_vllm:
        refuse_family(path, elsewhere=elsewhere)
    try:
        found = load_files(AutoConfig, path)
    except BAD_FILES:
        # Loading the model says what is wrong.
        return
    # A prompt has at least one token, and vLLM gets room for one more.
    longest = config.completion_limit + 1
    if on_vllm and not elsewhere:
        longest = config.context_limit or longest + 1
    check_positions(
        found.get_text_config(), min(longest, context_length(found) or longest), by_capacity=on_vllm
    )


def check_beside_ranks(ranks: int, workers: int, size_field: str, mode_field: str) -> None:
    """Check that vLLM does not run in one of several trainer processes: its `workers` must be processes of their own.

    `size_field` and `mode_field` are the fields that set these, for the error.
    """
    if workers == 1:
        raise InputError(
            f"{ranks} trainer processes: vLLM in one of them would wait for the others in their process "
            f"group. Set {size_field}: {ranks}, which splits one engine over {ranks} devices in processes "
            f"of its own; or start 'lockstep serve MODEL' and set {mode_field}: server"
        )
    if workers != ranks:
        _logger.warning(
            f"{ranks} trainer processes share one engine, which is split over {workers} devices "
            f"({size_field}). It is slower, and leaves devices idle, if these numbers differ; several "
            f"engines need 'lockstep serve' and {mode_field}: server"
        )


def transport_here(name: str, timeout: float, *, deltas: bool = True) -> TransportChoice:
    """Chooses how weights reach vLLM's workers on this machine. The arguments are those of `choose_transport`."""
    return lambda workers: choose_transport(name, workers, "127.0.0.1", 0, timeout, deltas=deltas)


def connect_servers(config: OnlineConfig, urls: Sequence[str]) -> VLLMServer:
    """Connect to servers as a config says."""
    return connect(
        urls,
        key_file=config.vllm_server_key_file,
        timeout=config.vllm_server_timeout,
        generation_timeouts=config.generation_timeout / config.vllm_server_timeout,
        transport=config.vllm_weight_transport,
        deltas=config.vllm_weight_deltas,
        group_host=config.vllm_group_host,
        group_port=config.vllm_group_port,
        run=_run_name(config.output_dir) if config.vllm_enable_lora else "",
    ).engine


def _run_name(output_dir: str | None) -> str:
    """The same for a run that is resumed, and another one for every other run."""
    place = f"{socket.gethostname()}\x1f{Path(output_dir or '').absolute()}"
    return hashlib.blake2b(place.encode(), digest_size=6).hexdigest()


def start_here(
    model_path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    use_vllm: bool | None,
    vllm_arguments: Mapping[str, Any],
    use_cpu: bool = False,
    **common: Any,
) -> Engine:
    """Start an engine in this process.

    Args:
        use_vllm: True for vLLM, False for transformers, None for vLLM where it is installed.
        vllm_arguments: arguments that only `VLLMInProcess` takes.
        use_cpu: whether the transformers engine leaves a GPU to others.
        common: arguments that both engines take.
    """
    if vllm_installed() if use_vllm is None else use_vllm:
        refuse_family(model_path)
        with busy("starting vLLM"):
            return VLLMInProcess(model_path, **vllm_arguments, **common)
    if vllm_arguments.get("tensor_parallel_size", 1) > 1 or vllm_arguments.get("sleep_level"):
        raise InputError(
            "vLLM is not installed here, and only vLLM can be split over devices or sleep: leave the tensor "
            "parallel size and sleep mode out"
        )
    why = "use_vllm is false" if use_vllm is False else "vLLM is not installed here"
    _logger.info(f"engine: transformers ({why}); the proofs are the same, generation is slower")
    return TransformersEngine(model_path, tokenizer, **common, use_cpu=use_cpu)


def generations_ahead(engine: Engine, driver: Driver, limit: float) -> GenerationsAhead:
    """The generations that the engine samples while the trainer learns from earlier ones (`max_staleness`).

    `limit` is in seconds, for one generation.
    """
    # An engine in this process samples a generation when it is begun, and the trainer waits for it.
    at_once = not isinstance(engine, VLLMServer)
    if at_once:
        _logger.info("max_staleness saves no time without a server: engine and trainer take turns")
    return GenerationsAhead(driver, limit, at_once=at_once)


def shake_hands(
    engine: Engine,
    model: PreTrainedModel,
    model_path: str,
    dtype: torch.dtype,
    min_model_len: int,
    head_dtype: torch.dtype | None = None,
    sampling: Sampling | None = None,
    *,
    pictures: bool = False,
    scores_first: bool = False,
    quantization: str | None = None,
) -> None:
    """Compare the engine's effective settings with what training assumes.

    Args:
        dtype, head_dtype: the dtypes that the engine and its output head must compute in; None: the same.
        sampling: the distribution that the engine must sample from; None if any engine can.
        pictures: whether requests will have pictures.
        scores_first: whether a server must answer a proof before the requests that wait to be generated.
        quantization: the scheme in which the engine must hold the weights in 8 bits; None: in `dtype`.
    """
    settings = engine.settings()
    config = causal_model(model).config.get_text_config()
    if settings.engine == "vllm":
        _check_runnable(model, min_model_len)
        check_positions(config, settings.max_model_len, by_capacity=True)
    else:
        check_positions(config, min_model_len, by_capacity=False)
    # A server may keep the same model under another path; its config is compared field by field.
    path = None if isinstance(engine, VLLMServer) else model_path
    if scores_first and isinstance(engine, VLLMServer) and not engine.scores_first:
        raise InputError(
            "max_staleness needs a server that answers a proof before what waits to be generated: start it "
            "with 'lockstep serve MODEL', or with --scheduling-policy priority"
        )
    expected = expected_settings(
        model, path, dtype, min_model_len, head_dtype, sampling, pictures=pictures, quantization=quantization
    )
    check_settings(expected, settings)


def check_directory(path: str, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> None:
    """Refuse settings for which vLLM uses the tokenizer of its model directory, if the trainer was given another one.

    Every request names its end tokens. But vLLM searches stop strings in a text that it decodes itself, and a grammar
    and the smallest length treat the end tokens of its directory as ends.
    """
    texts = [name for name in ("stop", "grammar") if getattr(sampling, name)]
    ends = [name for name in ("min_tokens", "grammar") if getattr(sampling, name)]
    if not (texts or ends):
        return
    of_directory = load_tokenizer(path)
    advice = (
        "save the tokenizer and the generation config into a copy of the model's directory, and train that"
    )
    if texts and (other := set(tokenizer.get_vocab().items()) ^ set(of_directory.get_vocab().items())):
        raise InputError(
            f"{texts[0]} is set, which vLLM applies with the tokenizer of {path}; {min(other)[0]!r} is "
            f"another token there than in processing_class: {advice}"
        )
    if ends and (other_ends := directory_end_ids(path, of_directory) - set(sampling.end_ids)):
        raise InputError(
            f"{ends[0]} is set, for which vLLM also takes the end tokens of {path}; {sorted(other_ends)} do "
            f"not end a completion in training: {advice}"
        )


def check_positions(config: PreTrainedConfig, longest: int, *, by_capacity: bool) -> None:
    """Refuse sequences whose positions engine and trainer would encode differently.

    A model with longrope has other factors for sequences that are longer than its original context. The trainer knows
    the whole sequence. If vLLM was started for longer sequences, it uses the other factors for all sequences. The
    transformers engine begins a completion with the one kind and ends it with the other.

    Args:
        longest: tokens of the longest sequence; `by_capacity`: for which vLLM was started.
    """
    for rope in _ropes(config):
        border = int(
            rope.get("original_max_position_embeddings")
            or getattr(config, "max_position_embeddings", None)
            or longest
        )
        if rope.get("rope_type") == "longrope" and longest > border:
            how = (
                f"vLLM takes sequences of {longest} tokens"
                if by_capacity
                else f"sequences may have {longest} tokens"
            )
            raise InputError(
                f"this model's positions (longrope) have other factors in sequences of more than {border} "
                f"tokens, and {how}: engine and trainer would use different ones. Set vllm_max_model_length "
                f"to {border} or less (a server: --max-model-len)"
            )
        others = {"alpha", "max_trained_positions"} & rope.keys()
        if rope.get("rope_type") == "dynamic" and by_capacity and others:
            raise InputError(
                f"vLLM computes this model's positions (dynamic) with {min(others)}, which transformers "
                "does not read: set use_vllm to false"
            )


def _ropes(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """The parameters of the rotary embedding; of each kind of layers, if they differ."""
    found = getattr(config, "rope_parameters", None) or {}
    return [found, *(value for value in found.values() if isinstance(value, Mapping))]


def _check_runnable(model: PreTrainedModel, longest: int) -> None:
    """Refuse models that vLLM 0.32 does not compute or load as transformers 5 does (`make families`)."""
    inner = causal_model(model)
    checkpoint_tensors(inner)
    config = model.config.get_text_config()
    ties = getattr(inner.config, "tie_word_embeddings", False)
    if ties and inner._tied_weights_keys and not inner.all_tied_weights_keys:
        raise InputError(
            "the config ties the head to the embedding (tie_word_embeddings), and the files have another "
            "head: transformers computes with that head, and vLLM with the embedding. Set "
            "tie_word_embeddings to false in config.json"
        )
    window = getattr(config, "sliding_window", None)
    if config.model_type == "cohere2" and window is not None and window < longest:
        raise InputError(
            f"Cohere2 attends within {window} tokens in some layers; vLLM lets them see one token more than "
            f"transformers does, and sequences may have {longest} tokens: set vllm_max_model_length to "
            f"{window} or less"
        )


def server_changes(
    engine: Engine, config: OnlineConfig, check: Callable[[Engine], None], proofs: Proofs
) -> ServerChanges | None:
    """The servers of an engine; None if it is no server. The arguments are those of `ServerChanges`."""
    return ServerChanges(engine, config, check, proofs) if isinstance(engine, VLLMServer) else None


class ServerChanges:
    """The servers that a run has, beside those that it should have. `check` compares an engine's settings."""

    def __init__(
        self, engine: VLLMServer, config: OnlineConfig, check: Callable[[Engine], None], proofs: Proofs
    ) -> None:
        self._engine, self._config, self._check, self._proofs = engine, config, check, proofs
        self._file = expanded(config.vllm_server_url_file) if config.vllm_server_url_file else None
        self._wanted: Sequence[str] = engine.members
        self._written = self._written_at()
        # Servers that failed on their way in. They are tried again when the file has been written again.
        self._refused: set[str] = set()
        self._joined: list[str] = []
        self._refusals: dict[str, str] = {}
        self._told: set[str] = set()
        engine.is_wanted = lambda url: url in self._read()

    @property
    def count(self) -> int:
        """Number of servers that the engine has."""
        return len(self._engine.members)

    def before_push(self) -> None:
        """Let servers leave that the file does not name any more."""
        self._leave(self._read())

    def after_push(self, version: int) -> None:
        """Let servers join that answer and that the run should have, and write down what has changed.

        `version` is that of the weights that the engine's servers have just got.
        """
        wanted = self._read()
        absent = [url for url in wanted if url not in self._engine.members and url not in self._refused]
        if absent:
            healthy = self._engine.healthy(absent)
            for url in healthy:
                self._try(url, wanted, version)
            for url in set(absent) - set(healthy):
                self._tell(
                    f"the server at {url} does not answer; it joins the run when it does", _logger.info
                )
            # What had to stay until another server has joined.
            self._leave(wanted)
        left, self._engine.servers.left = self._engine.servers.left, {}
        if left or self._joined or self._refusals:
            changes = {"joined": self._joined, "left": left, "refused": self._refusals}
            self._proofs.note_servers(version, {**changes, "servers": list(self._engine.members)})
            self._joined, self._refusals = [], {}

    def _leave(self, wanted: Sequence[str]) -> None:
        gone = [url for url in self._engine.members if url not in wanted]
        if gone and len(gone) == len(self._engine.members):
            self._tell(
                f"{self._file} names none of the servers of the run; they stay until another server has joined",
                _logger.warning,
            )
        elif gone:
            self._engine.leave(gone, f"{self._file} does not name it any more")

    def _try(self, url: str, wanted: Sequence[str], version: int) -> None:
        """Let one server join, or refuse it."""
        engine, joining = self._engine, None
        try:
            with busy(f"proving the server at {url}"):
                joining = connect_servers(self._config, [url])
                joining.name_versions_as(engine)
                self._check(joining)
                self._proofs.prove_joining(joining, version)
                engine.take(joining, [*wanted, *(own for own in engine.members if own not in wanted)])
            self._joined.append(url)
        except BrokenPass:
            raise
        except LockstepError as error:
            if isinstance(error, EngineLost) and error.recover == engine.recover:
                raise
            self._refused.add(url)
            self._refusals[url] = str(error)
            when = "in the next run" if self._file is None else f"when {self._file} has been written again"
            _logger.warning(
                f"the server at {url} is refused, and the run goes on without it: {error}\n  it is tried again {when}"
            )
        finally:
            if joining is not None:
                joining.close()

    def _read(self) -> Sequence[str]:
        """The URLs of the servers that the run should have. If the file cannot be used, they stay what they were."""
        if self._file is None:
            return self._wanted
        try:
            written = self._written_at()
            self._wanted = self._config.server_urls
        except InputError as error:
            self._tell(f"the servers of the run stay as they are: {error}", _logger.warning)
            return self._wanted
        if written != self._written:
            self._written = written
            self._refused.clear()
            self._told.clear()
        return self._wanted

    def _written_at(self) -> int:
        """When the file was written last, in nanoseconds; 0: there is none."""
        try:
            return self._file.stat().st_mtime_ns if self._file is not None else 0
        except OSError:
            return 0

    def _tell(self, said: str, log: Callable[[str], None]) -> None:
        """Say something once, until the file has been written again."""
        if said not in self._told:
            self._told.add(said)
            log(said)
