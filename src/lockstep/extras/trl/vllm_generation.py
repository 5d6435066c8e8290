"""TRL 1.16's generation object on Lockstep's engines: TRL's own trainers, with proven tokens, versions and weights.

    import trl.trainer.grpo_trainer
    from lockstep.extras.trl.vllm_generation import LockstepGeneration

    trl.trainer.grpo_trainer.VLLMGeneration = LockstepGeneration

before the trainer is made with `use_vllm=True`. TRL's trainer gives prompts as token ids, and its model. They go to
the engine through `rollouts/ranks.py` and `proven_engine.py`. With several ranks, TRL's tool loop is refused: the
ranks leave it after different numbers of calls, and a call needs all ranks. A LoRA adapter is sent merged, and the
model itself is only read. Options of TRL that no engine here supports are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lockstep.connection import connect
from lockstep.contract.protocol import Completion, Engine, RequestKey
from lockstep.engines.vllm.arguments import usual_sequences
from lockstep.engines.vllm.start import vllm_installed
from lockstep.errors import InputError
from lockstep.extras.trl import trl_inputs
from lockstep.extras.trl.proven_engine import ProvenEngine
from lockstep.extras.trl.trl_inputs import Shown, TrlPictures
from lockstep.models.adapters import causal_model
from lockstep.models.arithmetic import Precision
from lockstep.models.resolve import resolve_model
from lockstep.rollouts.ranks import Ranks
from lockstep.run.engine import (
    check_beside_ranks,
    check_directory,
    check_positions,
    shake_hands,
    start_here,
    transport_here,
)
from lockstep.run.trainers.checks import context_within
from lockstep.tokens.arrays import Ids, Reals
from lockstep.tokens.chat import fit_vocabulary, guard_tokenizer
from lockstep.watch.push import PushProof

# A call can lose its engine at most four times. Each time it may push, generate and wait, for one time limit each.
_LONGEST_CALL = 12
_TOOL_LOOP = (
    "this call continues completions that were just sampled, as TRL's tool loop does. TRL's ranks leave that loop "
    "after different numbers of calls, and here a call needs all ranks. Use one rank, leave out tools and "
    "environment_factory, or use lockstep.GRPOTrainer, which runs tools on any number of ranks"
)


class LockstepGeneration:
    """Replaces `trl.generation.vllm_generation.VLLMGeneration` of TRL 1.16, and adds proofs.

    Every rank makes one and calls the same methods; only the main rank holds the engine. The parameters are TRL's, in
    TRL's order, with these differences:

    Args:
        mode: `colocate`: vLLM on this machine (transformers if vLLM is not installed). With one trainer process, the
            model is in this process. With several, the main rank owns one engine for all ranks, and
            `tensor_parallel_size` must be above 1: vLLM in the main rank would take part in the process group of the
            ranks. `server`: running `lockstep serve`.
        tensor_parallel_size: number of devices that the engine's model is split over, in processes that vLLM starts.
            Give it the number of ranks. (TRL's ranks hold the parts themselves, and it has an engine per so many
            ranks.)
        enable_sleep_mode: vLLM gives its GPU memory back after each call of `generate`, and wakes at the next push. A
            call without a push before it pushes the weights itself. Refused where vLLM has no sleep mode (on a CPU).
        server_base_url: one URL, or several separated by commas.
        server_host: 0.0.0.0, TRL's default, means this machine.
        server_timeout: seconds that the wait for a server, one of its calls, or one generation may take.
        group_port: port for weights over gloo. Servers on this machine get weights through shared memory.
        max_model_length: by default the model's whole context. A completion ends at this limit.
        max_num_seqs: number of sequences decoded together per rank; by default 64, and 256 on a GPU.
        top_p, top_k, min_p, repetition_penalty: sampled exactly, and the log-probs are those of the sampling
            distribution. TRL's trainers nevertheless score the whole distribution (TRL #6789). Their ratios then
            contain the difference; a warning says so.
        generation_kwargs: as in TRL. `seed` is the seed of the run, from which every request gets its own; torch's by
            default.
        engine: a running engine to use instead, on the main rank. The caller closes it.
        engine_dtype: `auto` (the dtype in which the trainer computes), `float32` or `bfloat16`.
        engine_kwargs: further arguments of `vllm.LLM`, in colocate mode.
        server_key_file, weight_transport, group_host: as `vllm_server_key_file`, `vllm_weight_transport` and
            `vllm_group_host` of `lockstep.GRPOConfig`.

    Raises:
        InputError: on every rank; a parameter, the model or the kind of training is not supported, or a server lacks
            an option.
        ProofError: the engine's settings differ from what training assumes.
        LockstepError: a server did not answer in time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        accelerator: Any,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        mode: str = "colocate",
        structured_outputs_regex: str | None = None,
        server_base_url: str | None = None,
        server_host: str = "0.0.0.0",
        server_port: int = 8000,
        server_timeout: float = 240.0,
        group_port: int = 51216,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        max_model_length: int | None = None,
        max_num_seqs: int | None = None,
        enable_sleep_mode: bool = False,
        model_impl: str = "auto",
        trust_remote_code: bool = False,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float | None = 0.0,
        max_completion_length: int = 16,
        logprobs: int | None = 0,
        generation_kwargs: Mapping[str, Any] | None = None,
        *,
        engine: Engine | None = None,
        engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        engine_kwargs: Mapping[str, Any] | None = None,
        server_key_file: str | None = None,
        weight_transport: str = "auto",
        group_host: str = "127.0.0.1",
    ) -> None:
        given = dict(locals())
        self.model = model
        self.accelerator = accelerator
        self.processing_class = processing_class
        self.mode = mode
        self.version = 0
        self._logprobs = logprobs
        self._owned: Engine | None = None
        self._answered: list[list[int]] = []
        self._proven: ProvenEngine | None = None
        self._calls = 0
        self._ranks = Ranks(limit=_LONGEST_CALL * server_timeout)

        def check() -> None:
            trl_inputs.check_parameters(given)
            trl_inputs.check_model(model, accelerator, processing_class)
            trl_inputs.sampled_from(given)
            self._pictures = TrlPictures(model, processing_class)

        described = self._ranks.call("start", check, lambda parts: [self._start(given)] * len(parts))
        self._sampling = trl_inputs.sampled_from(given).sampling
        # TRL's trainers read these attributes of their engine.
        config = SimpleNamespace(max_model_len=described["max_model_len"])
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))
        self.vllm_client = SimpleNamespace(get_server_info=lambda: {"model_config": described})

    @property
    def proof(self) -> PushProof | None:
        """The evidence for the last push. None before the first push, and on ranks without the engine."""
        return self._proven.proof if self._proven else None

    def sync_weights(self) -> None:
        """Push the model's weights to the engine under a new version, and prove the push. Every rank calls this.

        Raises:
            ProofError: on every rank; the engine did not get, load or commit the weights, or computes with others.
            LockstepError: on every rank; the engine was lost and did not come back in time.
        """

        def push(parts: Sequence[None]) -> list[int]:
            assert self._proven is not None
            return [self._proven.sync()] * len(parts)

        self.version = self._ranks.call("sync_weights", lambda: None, push)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager | None = None,
    ) -> tuple[list, list, list | None, list | None]:
        """One completion per prompt of this rank. Every rank calls this, also a rank without prompts.

        Args:
            prompts: token ids. A prompt with several completions occurs that often, as TRL's trainers give it.
            images: the images of each prompt, or None. Their ids are in the prompts.
            num_generations: how often TRL repeated each prompt. 1 in TRL's tool loop.
            profiler: context that is entered around the call.

        Returns:
            For each prompt of this rank, in order: the prompt's ids as the engine used them (P,); the completion's
            ids (C,); log-probs (C, 1) under the sampling distribution, in nats; the token ids of these log-probs
            (C, 1). The last two are None if `logprobs` is None.

        Raises:
            InputError: on every rank; a prompt is not a list of token ids, is empty or fills the context, or its
                images are not those of its ids, or the model reads none. On this rank, at once, and before it waits
                for another rank: there are several ranks, and this is a call of TRL's tool loop.
            ProofError: on every rank; trainer and engine do not agree.
            LockstepError: on every rank; the engine was lost and did not come back in time.
        """
        if num_generations < 1:
            raise InputError(f"num_generations={num_generations}; it must be at least 1")
        if self._ranks.count > 1 and num_generations == 1 and _goes_on(prompts, self._answered):
            raise InputError(_TOOL_LOOP)
        with profiler or nullcontext():
            self._calls += 1
            own = partial(self._pictures.part, prompts, images)
            completions, self.version = self._ranks.call("generate", own, self._sample)
        parts = ("prompt", "tokens", "logprobs")
        prompt_ids, token_ids, logprobs = ([c[part].tolist() for c in completions] for part in parts)
        self._answered = [[*asked, *ids] for asked, ids in zip(prompts, token_ids, strict=True) if ids]
        if self._logprobs is None:
            return prompt_ids, token_ids, None, None
        return prompt_ids, token_ids, _each_alone(logprobs), _each_alone(token_ids)

    def close(self) -> None:
        """Release the engine, if this object started it or connected to it."""
        if self._owned is not None:
            self._owned.close()
            self._owned = None

    # ---- on the main rank -------------------------------------------------------------------------------------------

    def _start(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Start the engine or connect to it. Returns the settings that TRL's trainers read."""
        sampled = trl_inputs.sampled_from(given)
        path = resolve_model(causal_model(self.model).config.name_or_path)
        tokenizer = guard_tokenizer(trl_inputs.tokenizer_of(self.processing_class))
        fit_vocabulary(causal_model(self.model), tokenizer)
        dtype = trl_inputs.engine_dtype_for(given["engine_dtype"], self.model, self.accelerator)
        trl_inputs.warn_of_other_scores(sampled.sampling)
        seed = torch.initial_seed() if sampled.seed is None else sampled.seed
        engine = given["engine"]
        if engine is None:
            engine = self._owned = self._engine(given, path, dtype, seed)
        try:
            # TRL does not say how long its prompts become, so that sequences may fill the engine.
            longest = engine.settings().max_model_len
            shake_hands(engine, self.model, path, dtype, min_model_len=longest, sampling=sampled.sampling)
            if engine.settings().engine == "vllm":
                check_directory(path, tokenizer, sampled.sampling)
            precision = Precision(torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else None)
            sleeps = given["enable_sleep_mode"] and self.mode == "colocate"
            self._proven = ProvenEngine(self.model, engine, dtype, precision, seed, sleeps=sleeps)
        except BaseException:
            self.close()
            raise
        settings = engine.settings()
        return {"max_model_len": settings.max_model_len, "logprobs_mode": settings.logprobs_mode}

    def _engine(self, given: Mapping[str, Any], path: str, dtype: torch.dtype, seed: int) -> Engine:
        if self.mode == "server":
            return connect(
                trl_inputs.urls_of(given),
                key_file=given["server_key_file"],
                timeout=given["server_timeout"],
                transport=given["weight_transport"],
                group_host=given["group_host"],
                group_port=given["group_port"],
            ).engine
        ranks, workers = self._ranks.count, given["tensor_parallel_size"]
        if ranks > 1 and vllm_installed():
            check_beside_ranks(ranks, workers, "tensor_parallel_size", "mode")
        context = given["max_model_length"] or context_within(self.model, None)
        text_config = causal_model(self.model).config.get_text_config()
        check_positions(text_config, context, by_capacity=vllm_installed())
        # TRL counts the sequences of all ranks that share an engine, which are `workers` ranks there.
        sequences = -(-given["max_num_seqs"] // workers) if given["max_num_seqs"] else usual_sequences()
        return start_here(
            path,
            trl_inputs.tokenizer_of(self.processing_class),
            use_vllm=None,
            use_cpu=self.accelerator.device.type == "cpu",
            vllm_arguments={
                "gpu_memory_utilization": given["gpu_memory_utilization"],
                # vLLM also seeds numpy, whose seeds must be below this.
                "seed": seed % 2**31,
                "tensor_parallel_size": workers,
                # TRL's level: the weights are discarded.
                "sleep_level": 2 if given["enable_sleep_mode"] else 0,
                "transport": transport_here(given["weight_transport"], given["server_timeout"]),
                "engine_kwargs": {"model_impl": given["model_impl"], **(given["engine_kwargs"] or {})},
            },
            dtype=dtype,
            max_model_len=context,
            max_num_seqs=sequences * ranks,
            timeout=given["server_timeout"],
        )

    def _sample(self, parts: Sequence[Mapping[str, Any]]) -> list[tuple[list[dict[str, Any]], int]]:
        """Completions for the prompts of all ranks, with the weight version that sampled them."""
        assert self._proven is not None
        call = f"call{self._calls}"
        asked: dict[RequestKey, Shown] = {}
        keys = []
        for rank, part in enumerate(parts):
            rows = self._pictures.placed(part)
            keys.append([RequestKey(f"{call}/rank{rank}/row{row}", 0) for row in range(len(rows))])
            asked |= dict(zip(keys[-1], rows, strict=True))
        answers = self._proven.generate(asked, self._sampling)
        return [([_sendable(answers[key]) for key in own], self._proven.version) for own in keys]


def _goes_on(prompts: Sequence[Any], answered: Sequence[list[int]]) -> bool:
    """Whether the first prompt begins with an earlier prompt and its completion, as all do in TRL's tool loop."""
    first = list(prompts[0]) if prompts and isinstance(prompts[0], Sequence) else []
    return any(first[: len(ids)] == ids for ids in answered)


def _sendable(completion: Completion) -> dict[str, Ids | Reals]:
    return {"prompt": completion.prompt_ids, "tokens": completion.token_ids, "logprobs": completion.logprobs}


def _each_alone(sequences: Sequence[Sequence[Any]]) -> list[list[list[Any]]]:
    """(tokens,) values in the shape that TRL expects: (tokens, 1)."""
    return [[[value] for value in sequence] for sequence in sequences]
