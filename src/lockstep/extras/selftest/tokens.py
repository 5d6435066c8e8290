"""Faults of tokens and of request identity: T1, T2, T4 and L1 to L5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.extras.selftest.seams import Fault, Patch, answers_become, generations_become, requests_become
from lockstep.extras.verify.stage import Stage
from lockstep.tokens.arrays import Ids, joined
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.step.generation import Generation

Requests = Sequence[GenerationRequest]
Answers = list[Completion]


def _encoded_again(stage: Stage) -> Patch:
    def again(request: GenerationRequest) -> GenerationRequest:
        ids = stage.encoded_again(request.prompt_ids)
        return replace(request, prompt_ids=ids) if _fits(stage, request, ids) else request

    return requests_become(stage, lambda requests: [again(r) for r in requests])


def _special_token_doubled(stage: Stage) -> Patch:
    def doubled(request: GenerationRequest) -> GenerationRequest:
        ids = joined([request.prompt_ids[:1], request.prompt_ids])
        return replace(request, prompt_ids=ids) if _fits(stage, request, ids) else request

    return requests_become(stage, lambda requests: [doubled(r) for r in requests])


def _masked_by_value(stage: Stage) -> Patch:
    """Tokens that equal the pad token are masked. Here the pad token is the last token of the first completion."""

    def masked(generation: Generation) -> Generation:
        pad = generation.completions[0].token_ids[-1]

        def without_pad(sequence: TrainingSequence) -> TrainingSequence:
            kept = np.flatnonzero(sequence.completion_ids != pad)
            kept = kept if len(kept) else np.array([0])
            names = ("completion_ids", "behaviour_logps", "advantages", "old_logps", "entropies")
            columns = {name: getattr(sequence, name) for name in names}
            return replace(sequence, **{name: own[kept] for name, own in columns.items() if own is not None})

        batches = tuple(tuple(without_pad(s) for s in batch) for batch in generation.micro_batches)
        return replace(generation, micro_batches=batches)

    return generations_become(masked)


def _flattened_twice(stage: Stage) -> Patch:
    def flat(requests: Requests, answers: Answers) -> Answers:
        return [
            replace(
                a,
                token_ids=a.token_ids[i : i + 1],
                logprobs=a.logprobs[i : i + 1],
                weight_versions=a.weight_versions[:1],
            )
            for a in answers
            for i in range(len(a.token_ids))
        ]

    return answers_become(stage, flat)


def _half_dropped(stage: Stage) -> Patch:
    return answers_become(stage, lambda requests, answers: answers[::2])


def across_prompts(stage: Stage) -> Patch:
    """Completions of one prompt get the keys and the echoed prompt of another."""

    def across(requests: Requests, answers: Answers) -> Answers:
        asked = {r.key: r.prompt_ids for r in requests}
        moved = [*answers[1:], answers[0]]
        return [replace(m, key=a.key, prompt_ids=asked[a.key]) for a, m in zip(answers, moved, strict=True)]

    return answers_become(stage, across)


def _another_ranks(stage: Stage) -> Patch:
    def strangers(requests: Requests, answers: Answers) -> Answers:
        return [replace(a, key=RequestKey(f"rank1/{a.key.prompt_id}", a.key.sample)) for a in answers]

    return answers_become(stage, strangers)


def _the_call_before(stage: Stage) -> Patch:
    """The second call gets the first call's completions, with its own keys and versions."""
    first: dict[RequestKey, Completion] = {}

    def earlier(requests: Requests, answers: Answers) -> Answers:
        if not first:
            first.update({a.key: a for a in answers})
            return answers
        return [
            replace(
                first.get(a.key, a),
                weight_versions=np.repeat(a.weight_versions[:1], len(first.get(a.key, a).token_ids)),
            )
            for a in answers
        ]

    return answers_become(stage, earlier)


def _fits(stage: Stage, request: GenerationRequest, ids: Ids) -> bool:
    return len(ids) + request.sampling.max_tokens <= stage.engine.settings().max_model_len


TOKEN_FAULTS = (
    Fault("T1", "prompts decoded and encoded again on their way", _encoded_again),
    Fault("T2", "a special token doubled in front of the prompt", _special_token_doubled),
    Fault("T4", "tokens masked because they equal the pad token", _masked_by_value),
    Fault("L1", "completion lists flattened twice: a token is a completion", _flattened_twice),
    Fault("L2", "every second completion dropped", _half_dropped),
    Fault("L3", "completions paired across prompts", across_prompts),
    Fault("L4", "another rank's completions", _another_ranks),
    Fault("L5", "a second call answered with the first call's completions", _the_call_before),
)
