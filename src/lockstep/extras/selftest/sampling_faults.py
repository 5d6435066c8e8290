"""Faults of the distribution that the engine samples from and reports.

P1 to P5 are faults of log-probs.

P7 to P12 are faults of filters. Each samples with filters of its own, whatever filters the run has. The engine is
then made to do something else, or its answers are changed on their way to the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import lockstep.engines.transformers_engine as transformers_engine
import lockstep.engines.vllm.in_process as vllm_inprocess
from lockstep.config.sampling import FilterFields, sampling_of
from lockstep.contract.protocol import Completion, GenerationRequest
from lockstep.contract.sampling import Grammar, Sampling
from lockstep.engines.vllm.port.engine import counts_of_second_runner, penalties_of_first_runner
from lockstep.extras.selftest import seams
from lockstep.extras.selftest.seams import REACH, Answers, Fault, Patch, Requests, is_vllm
from lockstep.extras.verify.stage import Stage
from lockstep.learn.filters import IdRules
from lockstep.tokens.arrays import KeptIds, Reals, joined_kept_ids, reals, small_ids, whole_numbers
from lockstep.tokens.chat import end_ids
from lockstep.watch.plain_forward import sequence_logits


@contextmanager
def _raw(stage: Stage) -> Iterator[None]:
    """The engine reports log-probs before the temperature, at a temperature that is not 1."""
    with ExitStack() as stack:
        stack.enter_context(seams.user_asks(stage, temperature=0.7))
        if is_vllm(stage):
            sampler = seams.vllm_worker(stage).model_runner.sampler
            stack.enter_context(patch.object(sampler, "logprobs_mode", "raw_logprobs"))
            stack.enter_context(patch.object(sampler, "sample", REACH.of(sampler.sample)))
            if hasattr(sampler, "topk_topp_sampler"):
                # The first model runner has the mode in two places, the second one in one.
                stack.enter_context(patch.object(sampler.topk_topp_sampler, "logprobs_mode", "raw_logprobs"))
        else:
            honest = transformers_engine.processed_logprobs

            def raw(logits: torch.Tensor, sampling: Any, *ids: Any, **more: Any) -> torch.Tensor:
                return honest(logits, replace(sampling, temperature=1.0), *ids, **more)

            stack.enter_context(patch.object(transformers_engine, "processed_logprobs", raw))
        yield


def _top_k_unasked(stage: Stage) -> Patch:
    if is_vllm(stage):
        params = vllm_inprocess.sampling_params

        def with_top_k(request: GenerationRequest, **more: Any) -> Any:
            found = params(request, **more)
            found.top_k = 3
            return found

        return patch.object(vllm_inprocess, "sampling_params", with_top_k)
    honest = transformers_engine.processed_logprobs

    def filtered(logits: torch.Tensor, sampling: Any, *ids: Any, **more: Any) -> torch.Tensor:
        return honest(logits, replace(sampling, top_k=3), *ids, **more)

    return patch.object(transformers_engine, "processed_logprobs", filtered)


def _logprob_becomes(stage: Stage, value: float) -> Patch:
    """One log-prob of the answers becomes a value."""

    def changed(requests: Requests, answers: Answers) -> Answers:
        # The least likely token: a token that the model is sure of has a true log-prob near 0.
        unsure = min(answers, key=lambda a: float(a.logprobs.min()))
        logprobs = unsure.logprobs.copy()
        logprobs[unsure.logprobs.argmin()] = value
        return [replace(a, logprobs=logprobs) if a is unsure else a for a in answers]

    return seams.answers_become(stage, changed)


def _top_one(stage: Stage) -> Patch:
    """The engine reports the most likely token's log-prob as the sampled token's."""
    if is_vllm(stage):
        return _first_of_vllms_list()
    return seams.each_answer_becomes(stage, lambda answer: replace(answer, logprobs=_best(stage, answer)))


@contextmanager
def _first_of_vllms_list() -> Iterator[None]:
    params, made = vllm_inprocess.sampling_params, vllm_inprocess.completion

    def with_top(request: GenerationRequest, **more: Any) -> Any:
        found = params(request, **more)
        found.logprobs = 1
        return found

    def first(key: Any, output: Any, **more: Any) -> Completion:
        best = [max(entry.values(), key=lambda e: e.logprob).logprob for entry in output.outputs[0].logprobs]
        return replace(made(key, output, **more), logprobs=reals(best))

    with (
        patch.object(vllm_inprocess, "sampling_params", with_top),
        patch.object(vllm_inprocess, "completion", first),
    ):
        yield


def _best(stage: Stage, answer: Completion) -> Reals:
    ids = [*answer.prompt_ids.tolist(), *answer.token_ids[:-1].tolist()]
    logits = sequence_logits(stage.model, ids, stage.precision)
    scaled = logits[len(answer.prompt_ids) - 1 :] / stage.config.temperature
    return reals(scaled.log_softmax(-1).max(-1).values.tolist())


@contextmanager
def _half_head(stage: Stage) -> Iterator[None]:
    """The engine computes its output head in bf16 and everything else in fp32."""

    def half(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.bfloat16(), weight.bfloat16()).to(x.dtype)

    if is_vllm(stage):
        head = seams.vllm_worker(stage).model_runner.model.lm_head.quant_method
        with patch.object(head, "apply", REACH.of(lambda layer, x, *args, **kwargs: half(x, layer.weight))):
            yield
        return
    head = stage.engine.model.get_output_embeddings()  # type: ignore[attr-defined]
    hook = head.register_forward_hook(lambda module, inputs, output: half(inputs[0], module.weight))
    try:
        yield
    finally:
        hook.remove()


def _needs_exact_steps(stage: Stage) -> str:
    if stage.config.vllm_quantization is None:
        return ""
    return "an engine in 8 bits shows it at the start of a run, and this one began at another temperature"


def _needs_single(stage: Stage) -> str:
    if is_vllm(stage) and not hasattr(seams.vllm_worker(stage).model_runner.model, "lm_head"):
        return "this model's head is inside another module"
    dtype = stage.trainer.proofs.engine_dtype
    return "" if dtype == torch.float32 else "both heads are in half precision"


LOGPROB_FAULTS = (
    Fault("P1", "raw log-probs at temperature 0.7", _raw, needs=_needs_exact_steps),
    Fault("P2", "top-k that nobody asked for", _top_k_unasked),
    Fault("P3", "a log-prob that is missing (NaN)", lambda stage: _logprob_becomes(stage, float("nan"))),
    Fault(
        "P3b", "a missing log-prob became 0.0", seams.at_temperature_one(lambda s: _logprob_becomes(s, 0.0))
    ),
    Fault(
        "P4",
        "the most likely token's log-prob passes for the sampled one's",
        seams.at_temperature_one(_top_one),
    ),
    Fault("P5", "the engine's head in bf16, the trainer's in fp32", _half_head, needs=_needs_single),
)

# A value of each filter that shows in most sets, and the filter that is in force on both sides beside it.
_FILTERS: dict[str, tuple[float, dict[str, Any]]] = {
    "top_k": (3, {"top_p": 0.999}),
    "top_p": (0.5, {"top_k": 50}),
    "min_p": (0.3, {"top_k": 50}),
}
_NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@contextmanager
def samples_with(stage: Stage, **given: Any) -> Iterator[None]:
    """The run samples at temperature 1 with these filters and no others: its requests, its trainer, and its proofs."""
    neutral = {f.name: f.default for f in fields(FilterFields)}
    with seams.user_asks(stage, **{**neutral, "temperature": 1.0, **given}), ExitStack() as stack:
        ends = end_ids(stage.model, stage.tokenizer)
        rules = IdRules.of_run(sampling_of(stage.config, stage.tokenizer, ends), stage.model, stage.tokenizer)
        stack.enter_context(patch.object(stage.trainer, "rules", rules))
        stack.enter_context(patch.object(stage.trainer.proofs, "distribution", rules.distribution))
        yield


def _kept_become(change: Callable[[Completion], KeptIds], top_k: int = 3) -> Callable[[Stage], Patch]:
    """The run samples with a top-k, and each answer's kept ids are changed."""

    @contextmanager
    def inject(stage: Stage) -> Iterator[None]:
        def changed(answer: Completion) -> Completion:
            return replace(answer, kept_ids=change(answer))

        with samples_with(stage, top_k=top_k), seams.each_answer_becomes(stage, changed):
            yield

    return inject


def _moved_on(answer: Completion) -> KeptIds:
    """The sets of a completion, each one at the next token. The last set comes first."""
    kept = answer.kept_ids
    assert kept is not None
    last = len(kept) - 1
    return joined_kept_ids([kept.part(last, last + 1), kept.part(0, last)])


def _moved_on_with_own(answer: Completion) -> KeptIds:
    """The same with the sampled token put into each set, so that only the log-probs show the fault."""
    moved = _moved_on(answer)
    sets = [np.union1d(moved.part(i, i + 1).ids, [token]) for i, token in enumerate(answer.token_ids)]
    return joined_kept_ids([KeptIds(small_ids(ids), whole_numbers([len(ids)])) for ids in sets])


def _halves(answer: Completion) -> KeptIds:
    """Every second id of each set, and the sampled token."""
    kept = answer.kept_ids
    assert kept is not None
    own = kept.ids == np.repeat(answer.token_ids, kept.sizes)
    stays = own | (np.arange(len(kept.ids)) % 2 == 0)
    return KeptIds(kept.ids[stays], np.cumsum(np.bincount(kept.tokens[stays], minlength=len(kept))))


Values = dict[str, Any]


@contextmanager
def _engine_samples(stage: Stage, asked: Values, done: Values, every: int = 1) -> Iterator[None]:
    """The run asks for filters, and the engine samples every n-th request with others."""

    def other(request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, **done))

    def otherwise(requests: list[GenerationRequest]) -> list[GenerationRequest]:
        return [own if place % every else other(own) for place, own in enumerate(requests)]

    with samples_with(stage, **asked), seams.requests_become(stage, otherwise):
        yield


def _ignored_by_engine(name: str) -> Fault:
    value, beside = _FILTERS[name]
    what = f"the engine ignores the {name} of the run, and the trainer applies it"
    asked, done = {**beside, name: value}, {name: _NEUTRAL[name]}
    return Fault(f"P9-{name}", what, lambda stage: _engine_samples(stage, asked, done))


def _ignored_by_trainer(name: str) -> Fault:
    value, beside = _FILTERS[name]
    what = f"the engine applies a {name} that the trainer ignores"
    done = {name: value}
    return Fault(f"P10-{name}", what, lambda stage: _engine_samples(stage, beside, done))


def _other_grammar(id: str, what: str, regex: str) -> Fault:
    asked, done = {"vllm_structured_outputs_regex": "[a-zA-Z ]{4,60}"}, {"grammar": Grammar("regex", regex)}
    return Fault(id, what, lambda stage: _engine_samples(stage, asked, done, every=2), needs=_needs_grammars)


def _prompt_not_counted(stage: Stage) -> Patch:
    """The engine's repetition penalty counts the completion alone."""
    return _counting_otherwise(stage, {"repetition_penalty": 1.8}, lambda prompt, output: ([], output))


def _prompt_counted(stage: Stage) -> Patch:
    """The engine's presence and frequency penalties count the prompt too."""
    asked = {"presence_penalty": -2.0, "frequency_penalty": -2.0}
    return _counting_otherwise(stage, asked, lambda prompt, output: (prompt, [*prompt, *output]))


@contextmanager
def _counting_otherwise(stage: Stage, asked: Values, counted: Any) -> Iterator[None]:
    counts = _vllm_counts(stage, counted) if is_vllm(stage) else _transformers_counts(counted)
    with samples_with(stage, **asked), counts:
        yield


def _vllm_counts(stage: Stage, counted: Any) -> Patch:
    if stage.engine.settings().second_runner:
        return _second_runner_counts(counted)
    place = penalties_of_first_runner()
    honest = getattr(*place)

    def otherwise(logits: torch.Tensor, prompts: torch.Tensor, *penalties: Any, **more: Any) -> torch.Tensor:
        # vLLM pads the prompts with the number of tokens.
        none, *values = logits.shape[1], *penalties
        outputs = more.pop("output_token_ids", None) or values.pop()
        pairs = [
            counted([i for i in prompt if i != none], output)
            for prompt, output in zip(prompts.tolist(), outputs, strict=True)
        ]
        longest = max(len(prompt) for prompt, _ in pairs)
        padded = torch.tensor([[*prompt, *[none] * (max(longest, 1) - len(prompt))] for prompt, _ in pairs])
        return honest(logits, padded.to(prompts), *values, [output for _, output in pairs], **more)

    return patch.object(*place, REACH.of(otherwise))


def _second_runner_counts(counted: Any) -> Patch:
    """The same in vLLM's second model runner, which counts the ids of a request once, when it comes."""
    place = counts_of_second_runner()
    honest = getattr(*place)

    def otherwise(
        rows: Any, ids: Any, lengths: Any, filled: Any, in_prompt: Any, counts: Any, *rest: Any
    ) -> None:
        honest(rows, ids, lengths, filled, in_prompt, counts, *rest)
        for row in rows.tolist():
            prompt, output = counted(ids[row, : int(lengths[row])].tolist(), [])
            if not prompt:
                in_prompt[row].zero_()
            more = torch.tensor(output, dtype=torch.long).bincount(minlength=counts.shape[1])
            counts[row] += more.to(counts)

    return patch.object(*place, REACH.of(otherwise))


def _transformers_counts(counted: Any) -> Patch:
    honest = transformers_engine.processed_logprobs

    def otherwise(
        logits: torch.Tensor, sampling: Sampling, prompt: list[int], output: list[int], **more: Any
    ) -> torch.Tensor:
        return honest(logits, sampling, *counted(prompt, output), **more)

    return patch.object(transformers_engine, "processed_logprobs", otherwise)


def _needs_grammars(stage: Stage) -> str:
    try:
        import xgrammar  # noqa: F401
    except ImportError:
        return "xgrammar is not installed"
    return ""


FILTER_FAULTS = (
    Fault("P7", "each token has the kept ids of another token", _kept_become(_moved_on)),
    Fault("P7b", "the same, and the sampled token is added to the set", _kept_become(_moved_on_with_own)),
    Fault("P8", "half of the kept ids are missing", _kept_become(_halves, top_k=20)),
    *(_ignored_by_engine(name) for name in _FILTERS),
    *(_ignored_by_trainer(name) for name in _FILTERS),
    _other_grammar("P11", "the engine follows the grammar of another request", "[0-9 ]{4,60}"),
    _other_grammar("P11b", "the other grammar allows a part of the own one", "[a-m]{4,60}"),
    Fault("P12", "the engine's repetition penalty does not count the prompt", _prompt_not_counted),
    Fault("P12b", "the engine's presence and frequency penalties count the prompt", _prompt_counted),
)
