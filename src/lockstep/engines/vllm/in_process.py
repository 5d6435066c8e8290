"""vLLM in the trainer's own process: the real `vllm.LLM` with the V1 engine, on CPU and CUDA.

The scheduler is in this process. The model is in this process too (`OwnWorker`), or it is split over worker processes
(`engines/vllm/start.py`). Weights come through vLLM's weight-transfer API with the backend of
`engines/vllm/port/receive.py`, which vLLM finds through the entry point in pyproject.toml.

Proof `sleep`.
Shows: with `vllm_enable_sleep_mode` and `vllm_enable_lora`: every parameter of the engine has the bytes with which it
fell asleep.
Does not show: weights that vLLM holds in another form than parameters (on a GPU it holds none); without an adapter
alone the weights are discarded, and the next push and its proofs show them.
When: every wake; reads the engine's weights twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig

from lockstep.contract.adapters import NoAdapters
from lockstep.contract.inbox import (
    Inbox,
    answer_all,
    check_request,
    check_requests,
    check_scores,
    check_scoring,
)
from lockstep.contract.probe import EngineModules, HeldPart
from lockstep.contract.protocol import Completion, EngineSettings, GenerationRequest, OnAnswer, RequestKey
from lockstep.contract.sampling import GrammarCompiler
from lockstep.contract.support import Bans
from lockstep.contract.tensors import LoadedWeights
from lockstep.engines.servers.messages import agreed_answers
from lockstep.engines.vllm.arguments import (
    SleepLevel,
    check_adapters,
    check_quantization,
    check_user_arguments,
    cpu_cache_bytes,
    engine_arguments,
    usual_sequences,
)
from lockstep.engines.vllm.environment import close_at_exit
from lockstep.engines.vllm.port.engine import (
    Sleep,
    effective_settings,
    end_steps,
    has_open_update,
    settings_from,
    shut_down,
    sleep_arguments,
)
from lockstep.engines.vllm.port.requests import (
    check_sent,
    completion,
    fields_of,
    first_without_logprob,
    holds_no_pictures,
    picture_arguments,
    prompt_logprobs,
    prompt_with_pictures,
    refusals,
    sampling_params,
    scoring_params,
)
from lockstep.engines.vllm.start import TransportChoice, WorkerProcesses, process_kept, start_vllm
from lockstep.errors import InputError, LockstepError, ProofError, foreign_errors, told
from lockstep.extensions import ADAPTERS, WORKERS, load
from lockstep.images.pictures import NO_PICTURES, PromptPictures
from lockstep.model_files import load_files
from lockstep.models.policy import reads_pictures
from lockstep.progress import busy, waiting
from lockstep.tokens.chat import directory_end_ids, load_tokenizer

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput


class VLLMInProcess:
    """`vllm.LLM` behind the engine protocol.

    Args:
        model: directory or hub id, the same string that the trainer loads.
        dtype: dtype of the engine's weights and activations.
        max_model_len: longest prompt + completion, in tokens.
        max_num_seqs: largest number of sequences that are decoded together; None: 256 on a GPU, 64 on a CPU.
        gpu_memory_utilization: share of a GPU's memory that vLLM may take; unused on CPU.
        timeout: seconds that one request may take.
        fp32_head: whether the output head computes in float32, whatever `dtype` is.
        tensor_parallel_size: number of worker processes that share the model, each on a GPU of its own. 1: the model
            is in this process.
        transport: chooses how weights reach worker processes; needed only if there are several.
        sleep_level: level of vLLM's sleep mode at which `sleep` gives memory back; 0: it does nothing.
        quantization: vLLM's name of the scheme in which the engine holds the weights in 8 bits; None: in `dtype`.
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
        max_num_seqs: int | None = None,
        gpu_memory_utilization: float = 0.3,
        timeout: float = 600.0,
        seed: int = 0,
        fp32_head: bool = False,
        tensor_parallel_size: int = 1,
        transport: TransportChoice | None = None,
        sleep_level: SleepLevel = 0,
        quantization: str | None = None,
        engine_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_user_arguments(set(engine_kwargs or {}), "vllm_engine_kwargs")
        check_quantization(quantization, dtype, "vllm_quantization")
        if (engine_kwargs or {}).get("enable_lora"):
            check_adapters(dtype, "vllm_enable_lora")
        self.timeout = timeout
        self._version: int | None = None
        self._model = model
        self._failure = ""
        self._resources = ExitStack()
        try:
            with process_kept(), foreign_errors(f"vLLM cannot load {model}", InputError):
                self._reads_pictures = reads_pictures(load_files(AutoConfig, model))
                arguments = whole_arguments(
                    model,
                    dtype=dtype,
                    max_model_len=max_model_len,
                    max_num_seqs=max_num_seqs or usual_sequences(),
                    gpu_memory_utilization=gpu_memory_utilization,
                    seed=seed,
                    fp32_head=fp32_head,
                    tensor_parallel_size=tensor_parallel_size,
                    sleep_level=sleep_level,
                    quantization=quantization,
                    engine_kwargs=engine_kwargs,
                )
                self._llm = start_vllm(arguments, self._resources)
                self.workers = workers_of(self._llm, transport, timeout)
                if self.is_split:
                    self._resources.callback(close_at_exit(self.close))
                self.sleeping = Sleep(self._llm, self.call, sleep_level)
                has_lora = (engine_kwargs or {}).get("enable_lora")
                self.adapters = load(ADAPTERS["in_process"])(self) if has_lora else NoAdapters()
                # A kernel that does not support the model's shapes raises an error only when it first runs.
                self._run({"trial": ([0, 0], scoring_params())})
        except LockstepError as error:
            # The engine has no state yet that would be lost.
            self.close()
            if isinstance(error, InputError | ProofError):
                raise
            raise InputError(f"vLLM cannot load {model}: {error}") from error

    def call(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """The results by rank of a method of every worker, or of a function with every worker as its first argument."""
        name = method if isinstance(method, str) else method.__name__
        with self._noting_failure(), waiting(f"vLLM's workers to do {name}", self.timeout):
            return self._llm.collective_rpc(method, timeout=self.timeout, args=args)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """If a worker process fails inside the context, do not use the engine any more.

        vLLM would take the answers of the other workers, which it does not read then, for the answers to the next call.
        """
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            if not self.is_split or isinstance(error, LockstepError):
                raise
            self._version = None
            self._failure = f"a worker process of vLLM failed: {told(error)}"
            self._refuse_requests()

    @property
    def _max_model_len(self) -> int:
        return self._llm.llm_engine.vllm_config.model_config.max_model_len

    @property
    def _vocab_size(self) -> int:
        return self._llm.llm_engine.vllm_config.model_config.get_vocab_size()

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def wire_dtype(self) -> torch.dtype | None:
        return self.workers.wire_dtype

    @property
    def is_split(self) -> bool:
        """Whether the model is in worker processes, and not in this process."""
        return isinstance(self.workers, WorkerProcesses)

    @property
    def llm(self) -> LLM:
        """The vLLM engine itself, for proofs that look inside it."""
        return self._llm

    def settings(self) -> EngineSettings:
        return self.workers.settings()

    def generate(
        self, requests: Sequence[GenerationRequest], on_answer: OnAnswer | None = None
    ) -> dict[RequestKey, Completion]:
        self._awake()
        limits = self.settings().request_limits
        check_requests(requests, self._version, self._max_model_len, self._vocab_size, limits)
        return answer_all(self.serve, requests, on_answer)

    def serve(self, inbox: Inbox) -> None:
        """Run the steps of vLLM's engine. New requests are added between two steps.

        Requests with the same prefix share it through the prefix cache, also within one step.
        """
        self._awake()
        engine = self._llm.llm_engine
        # The requests that vLLM holds, and the time at which each must be finished, in the order in which they came.
        held: dict[str, GenerationRequest] = {}
        limits: dict[str, float] = {}
        with self._abort_on_error(limits):
            while True:
                with inbox.taken(engine.get_num_unfinished_requests(), self.timeout) as requests:
                    if requests is None:
                        return
                    for request in requests:
                        check_request(request, self._version, self._max_model_len, self._vocab_size)
                        held[str(request.key)] = request
                        limits[str(request.key)] = inbox.now() + (inbox.limit or self.timeout)
                        params = sampling_params(request, partial=inbox.is_watched(request.key))
                        check_sent(request, fields_of(params))
                        self._add(str(request.key), request.prompt_ids.tolist(), params, request.pictures)
                for key in inbox.given_up():
                    engine.abort_request([str(key)])
                    limits.pop(str(key), None)
                outputs, unfinished = self._step(limits, inbox.now())
                for output in unfinished:
                    inbox.progressed(held[output.request_id].key, output.outputs[0].token_ids)
                for output in outputs:
                    assert self._version is not None
                    request = held.pop(output.request_id)
                    filtered, adapter = request.sampling.is_filtered, self.adapters.name
                    try:
                        answer = completion(request.key, output, filtered=filtered, adapter=adapter)
                        if request.pictures:
                            # vLLM does not report its pictures. The parity gap proves which pictures it has used.
                            answer = replace(answer, pictures=request.pictures)
                        inbox.answer(answer, [self._version], self._vocab_size)
                    except LockstepError:
                        self._check_left(request, output)
                        raise
                if outputs:
                    inbox.settle()

    def _check_left(self, request: GenerationRequest, output: RequestOutput) -> None:
        """Refuse an answer that came to a place where its settings leave no token. vLLM samples any token there.

        Raises:
            InputError: the answer did.
        """
        place = first_without_logprob(output)
        if place is None:
            return
        tokenizer = load_tokenizer(self._model)
        ends = request.sampling.end_ids or tuple(directory_end_ids(self._model, tokenizer))
        bans = Bans(request.sampling, self._vocab_size, ends, tokenizer.decode)
        ids = list(output.outputs[0].token_ids[:place])
        error = bans.empty_place_after(
            ids, request.key.prompt_id, lambda: GrammarCompiler(tokenizer, self._vocab_size, ends)
        )
        if error is not None:
            raise error

    @foreign_errors("vLLM failed while it answered requests")
    def _step(self, limits: dict[str, float], now: float) -> tuple[list[RequestOutput], list[RequestOutput]]:
        """Run one step of vLLM. `now` is the time on the clock of `limits`.

        Returns the outputs that this step has finished, whose requests leave `limits`, and the partial outputs of the
        others.
        """
        with self._noting_failure():
            outputs: list[Any] = self._llm.llm_engine.step() if limits else []
        finished = [output for output in outputs if output.finished]
        for output in finished:
            limits.pop(output.request_id)
        first = next(iter(limits), None)
        if first is not None and now > limits[first]:
            raise LockstepError(
                f"vLLM did not finish {first} and {len(limits) - 1} other requests within {self.timeout:.0f} s; raise "
                "vllm_server_timeout or lower max_completion_length"
            )
        return finished, [output for output in outputs if not output.finished]

    @foreign_errors("vLLM failed when it was given a request")
    def _add(
        self, name: str, prompt_ids: list[int], params: Any, pictures: PromptPictures = NO_PICTURES
    ) -> None:
        prompt = prompt_with_pictures(prompt_ids, pictures) if pictures else {"prompt_token_ids": prompt_ids}
        with refusals(f"request {name}"):
            self._llm.llm_engine.add_request(name, prompt, params, lora_request=self.adapters.request)

    def _run(self, requests: Mapping[str, tuple[list[int], Any]]) -> list[RequestOutput]:
        """Run these requests without an inbox. Returns their outputs in the order in which vLLM finished them."""
        limits = dict.fromkeys(requests, time.monotonic() + self.timeout)
        finished = []
        with self._abort_on_error(limits):
            for name, (prompt_ids, params) in requests.items():
                self._add(name, prompt_ids, params)
            while limits:
                finished += self._step(limits, time.monotonic())[0]
        return finished

    @contextmanager
    def _abort_on_error(self, held: Collection[str]) -> Iterator[None]:
        """After an error inside the context, let vLLM drop the requests in `held`: the next call gets none of them."""
        try:
            yield
        except BaseException:
            self._llm.llm_engine.abort_request(list(held))
            raise

    def modules(self, checkpoint_names: tuple[str, ...]) -> EngineModules:
        from lockstep.engines.vllm.port.probe import list_modules

        found = self.call(list_modules, checkpoint_names)
        # Workers have different parts of the same modules.
        probed = {name: module for one in found for name, module in one.probed.items()}
        return EngineModules(probed, tuple(dict.fromkeys(name for one in found for name in one.unreached)))

    def probe(self, names: Sequence[str], seed: int, *, every: bool) -> dict[str, torch.Tensor]:
        from lockstep.engines.vllm.port.probe import probe_modules

        self._check_awake()
        answers = self.call(probe_modules, tuple(names), seed, every, self.adapters.name)
        return agreed_answers(answers, "vLLM in this process", torch.equal)

    def held(self, parts: Sequence[HeldPart], dtype: torch.dtype, key: int | None) -> dict[str, str]:
        from lockstep.engines.vllm.port.probe import digests_of_held

        self._check_awake()
        return agreed_answers(self.call(digests_of_held, parts, dtype, key), "vLLM in this process")

    def ask_workers(
        self, question: str, arguments: Callable[[str], Sequence[Any] | None]
    ) -> dict[str, Sequence[Any]]:
        self._check_awake()
        given = arguments("")
        return {} if given is None else {"": self.call(load(WORKERS[question]), *given)}

    def score(self, sequences: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[float, ...]]:
        self._awake()
        check_scoring(sequences, self._version, self._max_model_len)
        params = scoring_params()
        outputs = self._run(
            {f"score/{name}": (np.asarray(ids).tolist(), params) for name, ids in sequences.items()}
        )
        scores = {output.request_id.removeprefix("score/"): prompt_logprobs(output) for output in outputs}
        check_scores(sequences, scores)
        return scores

    def _refuse_requests(self) -> None:
        self._version = None
        if self._failure:
            raise LockstepError(
                f"{self._failure}; start the run again, and it goes on from its last checkpoint"
            )

    @foreign_errors("vLLM failed while it ended its last steps")
    def _end_steps(self) -> None:
        """Wait for the steps that vLLM has begun ahead of their turn (asynchronous scheduling), and drop their results.

        Their requests have ended. A step must not compute with weights, or write into a cache, that change under it.
        """
        with self._noting_failure():
            end_steps(self._llm.llm_engine)

    def prepare_push(self) -> None:
        self._refuse_requests()
        self._end_steps()
        self._wake_weights()

    def _wake_weights(self) -> None:
        """Wake the weights, and check that those which were not discarded came back."""
        with self._noting_failure():
            for rank, woken in enumerate(self.sleeping.wake_weights()):
                if woken.differing:
                    raise ProofError(
                        "sleep",
                        f"worker {rank} of vLLM woke with other bytes in {len(woken.differing)} of "
                        f"{woken.parameters} parameters "
                        f"than it had before it slept; the first is {woken.differing[0]}",
                        "vLLM did not restore the weights that it had moved to main memory",
                        "leave vllm_enable_sleep_mode out, and report it with this message",
                    )

    def begin_update(self) -> None:
        self.prepare_push()
        # vLLM drops its adapters at the end of an update.
        self.adapters.request = None
        if any(self.call(has_open_update)):
            # An earlier trainer left this update open, and vLLM would refuse every further update.
            self.call("finish_weight_update")
        self.call("start_weight_update")

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        with self._noting_failure():
            return self.workers.load(tensors, base)

    def reset_caches(self) -> bool:
        engine = self._llm.llm_engine
        self._end_steps()
        with self._noting_failure():
            engine.reset_mm_cache()
            engine.reset_encoder_cache()
        if self._reads_pictures and not all(self.call(holds_no_pictures)):
            return False
        return bool(engine.reset_prefix_cache())

    @property
    def can_sleep(self) -> bool:
        """Whether the engine was started with a sleep level."""
        return self.sleeping.level > 0

    def sleep(self) -> bool:
        """Give memory back. The engine refuses requests until the next push, which wakes it. No request may run.

        Returns whether the weights were discarded, so that the next push must send all of them.
        """
        if not self.can_sleep:
            return False
        self._refuse_requests()
        self._end_steps()
        with self._noting_failure():
            self.sleeping.begin()
        return self.sleeping.level == 2

    def _check_awake(self) -> None:
        if self.sleeping.is_asleep:
            raise LockstepError(
                "vLLM sleeps between two pushes (vllm_enable_sleep_mode) and cannot be asked: push the "
                "weights first, or leave sleep mode out"
            )

    def _awake(self) -> None:
        """Wake everything, or raise an error if no push has come since the engine fell asleep."""
        self._check_awake()
        with self._noting_failure():
            self.sleeping.wake_cache()

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
        if hasattr(self, "_llm"):
            with busy("stopping vLLM"):
                if hasattr(self, "adapters"):
                    self.adapters.close()
                if hasattr(self, "workers"):
                    self.workers.close()
                shut_down(self._llm.llm_engine)
        self._resources.close()


def whole_arguments(
    model: str,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
    gpu_memory_utilization: float,
    seed: int,
    fp32_head: bool,
    tensor_parallel_size: int,
    sleep_level: SleepLevel,
    quantization: str | None,
    engine_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, from those of `VLLMInProcess`. The user's arguments (`engine_kwargs`) have priority."""
    return {
        **engine_arguments(
            model,
            dtype,
            max_model_len,
            max_num_seqs,
            fp32_head=fp32_head,
            quantization=quantization,
            whole_prompts=(engine_kwargs or {}).get("enable_chunked_prefill") is False,
        ),
        **(picture_arguments() if reads_pictures(load_files(AutoConfig, model)) else {}),
        "seed": seed,
        **_memory(model, dtype, max_model_len, max_num_seqs, gpu_memory_utilization),
        "tensor_parallel_size": tensor_parallel_size,
        **sleep_arguments(sleep_level),
        **(engine_kwargs or {}),
    }


def _memory(
    model: str, dtype: torch.dtype, max_model_len: int, max_num_seqs: int, gpu_memory_utilization: float
) -> dict[str, Any]:
    if torch.cuda.is_available():
        return {"gpu_memory_utilization": gpu_memory_utilization}
    return {"kv_cache_memory_bytes": cpu_cache_bytes(model, dtype, max_model_len, max_num_seqs)}


def workers_of(llm: LLM, transport: TransportChoice | None, timeout: float) -> OwnWorker | WorkerProcesses:
    """The workers of a started engine. Worker processes need a transport; one call may take `timeout` seconds."""
    if llm.llm_engine.vllm_config.parallel_config.world_size == 1:
        return OwnWorker(llm)
    if transport is None:
        raise InputError("an engine with several workers needs a transport for its weights")
    return WorkerProcesses(llm, transport, timeout)


class OwnWorker:
    """vLLM's only worker, in the trainer's own process.

    It gets references to the trainer's tensors, and casts them when it copies them; no `wire_dtype` casts them before.
    """

    wire_dtype: torch.dtype | None = None

    def __init__(self, llm: LLM) -> None:
        from lockstep.engines.vllm.port.kept_ids import record_kept_ids

        self._llm = llm
        llm.init_weight_transfer_engine({"init_info": {}})
        llm.collective_rpc(record_kept_ids)

    def settings(self) -> EngineSettings:
        return settings_from(effective_settings(self._llm.llm_engine.vllm_config))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str) -> LoadedWeights:
        """Load the tensors of an update that has begun, and end the update."""
        self._llm.update_weights({"update_info": {"tensors": tensors, "base": base}})
        self._llm.finish_weight_update()
        (acknowledgement,) = self._llm.collective_rpc(_acknowledgement)
        return acknowledgement

    def close(self) -> None:
        """Does nothing: the worker ends with the engine."""


def _acknowledgement(worker: Any) -> LoadedWeights:
    return worker.weight_transfer_engine.acknowledgement
