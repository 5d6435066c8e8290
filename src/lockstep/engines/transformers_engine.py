"""Generation by `transformers`, for machines without vLLM, and its part of the module probe.

The engine has its own copy of the model, so that it receives weights in the same way as any other engine. The
function `generate` of transformers runs the batch (left padding, cache, stopping). Our logits processor samples each
row with the row's own random generator, and records the exact log-prob of each sampled token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.pytorch_utils import Conv1D

from lockstep.contract.distribution import processed_logprobs
from lockstep.contract.inbox import (
    Inbox,
    answer_all,
    check_request,
    check_requests,
    check_scores,
    check_scoring,
)
from lockstep.contract.probe import (
    PROBED_ROWS,
    EngineModules,
    HeldPart,
    ModuleKind,
    ProbedModule,
    exact_products,
    expert_input,
    fields_of_parts,
    held_digests,
    probe_experts,
    probe_inputs,
    probe_rows,
    probe_vector,
)
from lockstep.contract.protocol import (
    Completion,
    EngineSettings,
    FinishReason,
    GenerationRequest,
    OnAnswer,
    RequestKey,
)
from lockstep.contract.sampling import GrammarCompiler, GrammarState
from lockstep.contract.support import Bans
from lockstep.contract.tensors import Begun, HeldWeights, LoadedWeights, TensorSpec, described, finished
from lockstep.devices import on_host, sent
from lockstep.engines.vllm.arguments import GRAMMAR_BACKEND
from lockstep.errors import InputError, LockstepError, foreign_errors
from lockstep.images.packs import model_inputs
from lockstep.model_files import load_files
from lockstep.models.arithmetic import transformed_logits
from lockstep.models.parameters import checkpoint_tensors, expert_names
from lockstep.models.policy import fp32_head_product, keeps_state, model_class
from lockstep.tokens.arrays import KeptIds, SmallIds, reals, whole_numbers
from lockstep.tokens.chat import end_ids


def list_modules(model: PreTrainedModel, checkpoint_names: tuple[str, ...]) -> EngineModules:
    """Every module of a model that has parameters, with the checkpoint names of its weights."""
    probed: dict[str, ProbedModule] = {}
    unreached: list[str] = []
    names_of: dict[str, list[str]] = {}
    for p in checkpoint_tensors(model):
        names_of.setdefault(p.parameter_name, []).append(p.name)
    experts = _experts_of(model, names_of)
    for name, module in model.named_modules():
        own = [
            n
            for parameter, _ in module.named_parameters(recurse=False)
            for n in names_of[f"{name}.{parameter}"]
        ]
        kind = "experts" if name in experts else _kind(module)
        if kind is None or not set(own) <= set(checkpoint_names):
            unreached += own
        elif kind == "experts":
            probed[name] = ProbedModule(name, kind, experts[name], _outputs(module))
        elif own:
            tensors = tuple(own) if kind == "values" else tuple(names_of[f"{name}.weight"])
            has_bias = kind == "linear" and module.bias is not None
            probed[name] = ProbedModule(name, kind, tensors, _outputs(module), has_bias)
    return EngineModules(probed, tuple(unreached))


def _kind(module: torch.nn.Module) -> ModuleKind | None:
    if isinstance(module, torch.nn.Embedding):
        return "embedding"
    if isinstance(module, torch.nn.Linear | Conv1D):
        return "linear"
    return "values" if all(p.dim() == 1 for p in module.parameters(recurse=False)) else None


def _outputs(module: torch.nn.Module) -> int:
    if isinstance(module, torch.nn.Embedding):
        return module.num_embeddings
    if isinstance(module, torch.nn.Linear | Conv1D):
        return module.weight.shape[1 if isinstance(module, Conv1D) else 0]
    if _is_gated_experts(module):
        return module.get_parameter("down_proj").shape[1]
    return sum(p.numel() for p in module.parameters(recurse=False))


def output_of(name: str, module: torch.nn.Module, seed: int, every: bool) -> torch.Tensor:
    """A module's output for its probe input; see `contract/probe.py`."""
    if isinstance(module, torch.nn.Embedding):
        rows = sent(probe_rows(seed, name, module.num_embeddings, every=every), module.weight.device)
        vector = sent(probe_vector(seed, name, module.embedding_dim), module.weight.device)
        # The module's own forward may scale the rows, or take positions instead of ids.
        return torch.cat([module.weight[own].float() @ vector for own in rows.split(PROBED_ROWS)])
    if isinstance(module, torch.nn.Linear | Conv1D):
        size = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
        inputs = probe_inputs(seed, name, size, has_bias=module.bias is not None).to(module.weight.dtype)
        return module(sent(inputs, module.weight.device)).flatten()
    if _is_gated_experts(module):
        weights = module.get_parameter("down_proj")
        chosen = sent(torch.tensor(probe_experts(seed, name, len(weights), every=every)), weights.device)[
            :, None
        ]
        inputs = sent(expert_input(seed, name, weights.shape[1]).to(weights.dtype), weights.device)
        inputs = inputs.expand(len(chosen), -1).contiguous()
        return module(inputs, chosen, torch.ones_like(chosen, dtype=weights.dtype)).flatten()
    return torch.cat([p.detach().flatten() for p in module.parameters(recurse=False)])


def held_of(part: HeldPart, module: torch.nn.Module) -> torch.Tensor:
    """The numbers of a part of a module, as it computes with them; see `contract/probe.py`."""
    if isinstance(module, torch.nn.Embedding):
        return module.weight[part.start : part.stop]
    if not isinstance(module, torch.nn.Linear | Conv1D):
        held = torch.cat([p.detach().flatten() for p in module.parameters(recurse=False)])
        return held[part.start : part.stop]
    size = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
    inputs = part.inputs(size, module.weight)
    if module.bias is None or part.asks_for_bias:
        return part.outputs(module(inputs))
    without = {"bias": torch.zeros_like(module.bias)}
    return part.outputs(torch.func.functional_call(module, without, (inputs,)))


def _is_gated_experts(module: torch.nn.Module) -> bool:
    """Whether a module holds gated experts without biases: slices of `gate_up_proj` and of `down_proj`."""
    return {name for name, _ in module.named_parameters(recurse=False)} == {"gate_up_proj", "down_proj"}


def _experts_of(model: PreTrainedModel, names_of: dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    """Checkpoint names of the experts' projections, by module: gate, up and down of the first, then of the second."""
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules() if expert_names(model) else ():
        if _is_gated_experts(module):
            gates, downs = names_of[f"{name}.gate_up_proj"], names_of[f"{name}.down_proj"]
            if len(gates) == 2 * len(downs):
                found[name] = tuple(
                    n for e, down in enumerate(downs) for n in (*gates[2 * e : 2 * e + 2], down)
                )
    return found


# Rows of logits that `score` holds at a time: 78 MB with a vocabulary of 152,000.
SCORED_ROWS = 128


@dataclass(slots=True)
class _Row:
    """The state of one request while the engine works on it."""

    request: GenerationRequest
    generator: torch.Generator
    prompt_ids: list[int]
    grammar: GrammarState | None
    end_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[SmallIds] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class TransformersEngine:
    """`transformers` behind the engine protocol.

    Args:
        model: directory or hub id, the same string that the trainer loads.
        tokenizer: used to find stop strings in sampled text, and to compile grammars. The engine never encodes text
            with it.
        dtype: dtype of the engine's copy of the model.
        max_model_len: longest prompt + completion, in tokens.
        max_num_seqs: largest number of sequences that are decoded together; None: 64.
        timeout: seconds that one round of requests may take.
        fp32_head: whether the output head computes in float32, whatever `dtype` is.
        use_cpu: whether the model stays on the CPU where there is a GPU.
    """

    wire_dtype = None

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        max_num_seqs: int | None = None,
        timeout: float = 600.0,
        fp32_head: bool = False,
        use_cpu: bool = False,
    ) -> None:
        with foreign_errors(f"transformers cannot load {model}", InputError):
            kind = model_class(load_files(AutoConfig, model))
            self.model: PreTrainedModel = load_files(kind, model, dtype=dtype).eval()
        if getattr(self.model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
            # PyTorch's attention cannot cap scores, and transformers would leave the cap out.
            self.model.set_attn_implementation("eager")
        if torch.cuda.is_available() and not use_cpu:
            self.model.to("cuda")
        self.model.requires_grad_(False)
        self._fp32_head = fp32_head
        if fp32_head:
            head = self.model.get_output_embeddings()
            head.forward = partial(fp32_head_product, head)
        self._name = model
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs or 64
        self.timeout = timeout
        self._keeps_state = keeps_state(self.model.config)
        self._version: int | None = None
        self._held = HeldWeights()
        # For requests that name no end tokens.
        self._end_ids = end_ids(self.model, tokenizer)
        self._compilers: dict[tuple[int, ...], GrammarCompiler] = {}
        # Without this line, `generate` would use the model's own defaults (for example a repetition penalty).
        self.model.generation_config = GenerationConfig()

    @property
    def version(self) -> int | None:
        return self._version

    def settings(self) -> EngineSettings:
        return EngineSettings(
            engine="transformers",
            model=self._name,
            architecture=type(self.model).__name__,
            dtype=self.model.dtype,
            head_dtype=torch.float32 if self._fp32_head else self.model.get_output_embeddings().weight.dtype,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            logprobs_mode="processed_logprobs",
            prefix_caching=False,
            async_scheduling=False,
            quantization=None,
            model_config=fields_of_parts(self.model.config.get_text_config(), self.model.config),
            kept_ids=True,
            structured_outputs=GRAMMAR_BACKEND,
        )

    def generate(
        self, requests: Sequence[GenerationRequest], on_answer: OnAnswer | None = None
    ) -> dict[RequestKey, Completion]:
        check_requests(requests, self._version, self._max_model_len, self._vocab_size, {})
        return answer_all(self.serve, requests, on_answer)

    def serve(self, inbox: Inbox) -> None:
        """Answer in rounds: the engine takes all requests that wait, and finishes them before it takes others."""
        while True:
            with inbox.taken(0, self.timeout) as requests:
                if requests is None:
                    return
            for request in requests:
                check_request(request, self._version, self._max_model_len, self._vocab_size)
            self._round(requests, inbox)
            inbox.settle()

    def _round(self, requests: list[GenerationRequest], inbox: Inbox) -> None:
        deadline = time.monotonic() + (inbox.limit or self.timeout)
        rows = [self.row(request) for request in requests]
        # Rows of similar length, put together, need the fewest pad positions.
        rows.sort(key=lambda row: len(row.prompt_ids))
        for batch in self.batches(rows):
            self._run(batch, deadline)
            for row in batch:
                assert self._version is not None
                inbox.answer(self._completion(row), [self._version], self._vocab_size)

    def batches(self, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
        """Rows that are computed together. One that has ended goes on to the end of its batch, which fits the context.

        A shorter prompt gets padding on its left. Some families let it into their state, so prompts of one batch of a
        model that keeps a state have one length.
        """
        batch: list[_Row] = []
        longest = budget = 0
        for row in rows:
            longest = max(longest, len(row.prompt_ids))
            budget = max(budget, row.request.sampling.max_tokens)
            is_padded = bool(batch) and self._keeps_state and len(row.prompt_ids) != len(batch[0].prompt_ids)
            if batch and (
                is_padded or len(batch) == self.max_num_seqs or longest + budget > self._max_model_len
            ):
                yield batch
                batch, longest, budget = [], len(row.prompt_ids), row.request.sampling.max_tokens
            batch.append(row)
        if batch:
            yield batch

    def row(self, request: GenerationRequest) -> _Row:
        """A request as a row of a batch."""
        grammar, ends = request.sampling.grammar, request.sampling.end_ids or self._end_ids
        return _Row(
            request,
            torch.Generator().manual_seed(request.seed),
            request.prompt_ids.tolist(),
            grammar=self._compiler(ends).start(grammar) if grammar is not None else None,
            end_ids=ends,
        )

    def _compiler(self, ends: tuple[int, ...]) -> GrammarCompiler:
        if ends not in self._compilers:
            self._compilers[ends] = GrammarCompiler(self._tokenizer, self._vocab_size, ends)
        return self._compilers[ends]

    @property
    def _vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @foreign_errors("transformers failed while it sampled")
    @torch.no_grad()
    def _run(self, rows: list[_Row], deadline: float) -> None:
        longest = max(len(row.prompt_ids) for row in rows)
        pad = self._end_ids[0]
        ids = torch.full((len(rows), longest), pad)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            prompt = torch.tensor(row.prompt_ids)
            ids[i, longest - len(prompt) :] = prompt
            mask[i, longest - len(prompt) :] = 1
        budget = max(row.request.sampling.max_tokens for row in rows)
        ids = ids.to(self.model.device)
        self.model.generate(
            ids,
            attention_mask=mask.to(self.model.device),
            generation_config=GenerationConfig(max_new_tokens=budget, do_sample=False, pad_token_id=pad),
            logits_processor=LogitsProcessorList([SampleRows(rows, pad, self._tokenizer.decode)]),
            stopping_criteria=StoppingCriteriaList([_RowsDone(rows, self._tokenizer, deadline)]),
            **model_inputs([row.request.pictures for row in rows], ids),
        )

    def _completion(self, row: _Row) -> Completion:
        assert self._version is not None
        assert row.finish_reason is not None
        return Completion(
            key=row.request.key,
            prompt_ids=row.request.prompt_ids,
            token_ids=whole_numbers(row.token_ids),
            logprobs=reals(row.logprobs),
            weight_versions=whole_numbers([self._version] * len(row.token_ids)),
            finish_reason=row.finish_reason,
            kept_ids=_kept_ids(row.kept) if row.request.sampling.is_filtered else None,
            pictures=row.request.pictures,
        )

    def modules(self, checkpoint_names: tuple[str, ...]) -> EngineModules:
        return list_modules(self.model, checkpoint_names)

    @torch.no_grad()
    def probe(self, names: Sequence[str], seed: int, *, every: bool) -> dict[str, torch.Tensor]:
        found = [output_of(name, self.model.get_submodule(name), seed, every).float() for name in names]
        return dict(zip(names, on_host(found), strict=True))

    @torch.no_grad()
    def held(self, parts: Sequence[HeldPart], dtype: torch.dtype, key: int | None) -> dict[str, str]:
        with exact_products():
            found = {part: held_of(part, self.model.get_submodule(part.name)) for part in parts}
        return held_digests(found, dtype, key)

    def ask_workers(
        self, question: str, arguments: Callable[[str], Sequence[Any] | None]
    ) -> dict[str, Sequence[Any]]:
        return {}

    @foreign_errors("transformers failed while it scored sequences")
    @torch.no_grad()
    def score(self, sequences: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[float, ...]]:
        check_scoring(sequences, self._version, self._max_model_len)
        head = self.model.get_output_embeddings()
        rows: list[torch.Tensor] = []
        for ids in sequences.values():
            row = sent(torch.tensor(ids), self.model.device)[None]
            hidden = self.model.base_model(input_ids=row[:, :-1], use_cache=False).last_hidden_state[0]
            found: list[torch.Tensor] = []
            # Compute a few rows at a time, because the logits of a long sequence may not fit into memory.
            for states, targets in zip(hidden.split(SCORED_ROWS), row[0, 1:].split(SCORED_ROWS), strict=True):
                # Mamba adds its layers up in float32, whatever its dtype is.
                logits = transformed_logits(
                    self.model.config.get_text_config(), head(states.to(head.weight.dtype))
                )
                found.append(logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0])
            rows.append(torch.cat(found))
        scores = {name: tuple(found.tolist()) for name, found in zip(sequences, on_host(rows), strict=True)}
        check_scores(sequences, scores)
        return scores

    def begin_update(self) -> None:
        self._version = None
        self._held.open()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        own = {p.name: p.tensor for p in checkpoint_tensors(self.model, dict(self.model.named_parameters()))}
        told: list[TensorSpec | Begun] = []
        if self._held.accepts_base(base):
            for name, tensor in described(((name, tensor) for name, tensor in tensors if name in own), told):
                if own[name].shape != tensor.shape:
                    raise LockstepError(
                        f"{name} has shape {tuple(tensor.shape)}, and in the engine {tuple(own[name].shape)}"
                    )
                own[name].data.copy_(tensor)
        specs = finished(told)
        loaded = [spec.name for spec in specs]
        self._held.add(specs, loaded, loaded)
        return self._held.close(own)

    def reset_caches(self) -> bool:
        # Each call of `generate` makes a new cache and drops it at the end.
        return True

    def commit_version(self, version: int) -> None:
        self._version = version

    def close(self) -> None:
        self._version = None
        self.__dict__.pop("model", None)


class SampleRows(LogitsProcessor):
    """Samples each unfinished row's next token and sets other logits to −inf, so that the greedy choice takes it."""

    def __init__(
        self, rows: list[_Row], pad: int, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        self._rows, self._pad, self._decode = rows, pad, decode

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # One copy of all rows waits for the GPU once per token, and not once per row.
        logits = scores.cpu()
        tokens = [
            self._sample(row, logits[i]) if row.finish_reason is None else self._pad
            for i, row in enumerate(self._rows)
        ]
        chosen = sent(torch.tensor(tokens), scores.device)[:, None]
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)  # type: ignore[return-value]

    def _sample(self, row: _Row, logits: torch.Tensor) -> int:
        sampling = row.request.sampling
        mask = None if row.grammar is None else row.grammar.mask()
        logprobs = processed_logprobs(
            logits, sampling, row.prompt_ids, row.token_ids, end_ids=row.end_ids, grammar_mask=mask
        )
        if logprobs.isnan().any():
            bans, prompt = Bans(sampling, len(logits), row.end_ids, self._decode), row.request.key.prompt_id
            if (error := bans.empty_place(row.token_ids, mask, prompt)) is not None:
                raise error
        token = int(torch.multinomial(logprobs.exp(), 1, generator=row.generator))
        row.token_ids.append(token)
        row.logprobs.append(float(logprobs[token]))
        if sampling.is_filtered:
            row.kept.append(_kept(logprobs, sampling.max_kept_ids))
        if row.grammar is not None:
            row.grammar.accept(token)
        return token


class _RowsDone(StoppingCriteria):
    """Ends rows at an end token, a stop string or the token limit, checked in that order, and records the reason."""

    def __init__(self, rows: list[_Row], tokenizer: PreTrainedTokenizerBase, deadline: float) -> None:
        self._rows = rows
        self._tokenizer = tokenizer
        self._deadline = deadline

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object
    ) -> torch.BoolTensor:
        if time.monotonic() > self._deadline:
            waiting = [row.request.key for row in self._rows if row.finish_reason is None]
            raise LockstepError(
                f"transformers did not finish {len(waiting)} requests in time; the first one is {waiting[0]}"
            )
        for row in self._rows:
            if row.finish_reason is None:
                row.finish_reason = self._reason(row)
        done = [row.finish_reason is not None for row in self._rows]
        return sent(torch.tensor(done, dtype=torch.bool), input_ids.device)  # type: ignore[return-value]

    def _reason(self, row: _Row) -> FinishReason | None:
        sampling = row.request.sampling
        if row.token_ids[-1] in row.end_ids:
            return "stop"
        if sampling.stop and len(row.token_ids) > sampling.min_tokens and self._has_stop_string(row):
            return "stop"
        return "length" if len(row.token_ids) >= sampling.max_tokens else None

    def _has_stop_string(self, row: _Row) -> bool:
        sampling = row.request.sampling
        text = self._tokenizer.decode(row.token_ids, skip_special_tokens=False)
        if sampling.min_tokens:
            # As in vLLM, a stop string that ends within the first `min_tokens` tokens does not count.
            earlier = len(
                self._tokenizer.decode(row.token_ids[: sampling.min_tokens], skip_special_tokens=False)
            )
            return any(stop in text[max(0, earlier + 1 - len(stop)) :] for stop in sampling.stop)
        return any(stop in text for stop in sampling.stop)


def _kept(logprobs: torch.Tensor, limit: int) -> SmallIds:
    """(n,) ids with a probability above 0, ascending; empty if there are more than `limit`, which no check accepts."""
    kept = torch.isfinite(logprobs).nonzero()[:, 0]
    return kept[: 0 if len(kept) > limit else None].numpy().astype(np.int32)


def _kept_ids(sets: list[SmallIds]) -> KeptIds:
    return KeptIds(np.concatenate(sets), np.cumsum([len(ids) for ids in sets]))
