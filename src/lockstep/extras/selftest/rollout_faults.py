"""Faults of rollouts: of tokens and request identity, of conversations, and of ends.

T1, T2, T4 and L1 to L5 are faults of tokens and of the identity of requests.

T1b, T5, and T7 to T9 are faults of conversations, tools and branches. Each runs rollouts of three turns with a tool's
result after each of the first two, and then a branch. The model need not call the tool: its turns are cut after a few
tokens, and every turn gets a result. All else is what a run with tools uses.

S3 are faults of the ends of completions. The run adds a bias to its end tokens, on both sides, so that completions of
a few tokens end by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import lockstep.engines.transformers_engine as transformers_engine
import lockstep.engines.vllm.port.requests as vllm_requests
import lockstep.rollouts.programs.tools as tools_module
from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError
from lockstep.extras.selftest.sampling_faults import samples_with
from lockstep.extras.selftest.seams import (
    Fault,
    Patch,
    answers_become,
    generations_become,
    is_vllm,
    requests_become,
)
from lockstep.extras.verify.stage import Stage
from lockstep.images.prompts import PromptReader
from lockstep.learn.generation import Generation
from lockstep.learn.sequence import TrainingSequence
from lockstep.rollouts.conversation import Branch, Conversation, Turn
from lockstep.rollouts.group import Rollout
from lockstep.rollouts.programs.tool_program import go_on
from lockstep.rollouts.programs.tools import ToolCalls, tools_of
from lockstep.tokens.arrays import Ids, flags, joined, whole_numbers
from lockstep.tokens.chat import end_ids, is_conversational
from lockstep.tokens.extension import Continuation, Extension, Insert
from lockstep.watch.plain_forward import completion_logps

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

_TURN, _BUDGET, _SECONDS = 4, 64, 60.0


def number_of(rollout: str) -> str:
    """A number that no other rollout gets.

    Args:
        rollout: names the rollout.
    """
    return str(sum(rollout.encode()) % 97)


class _Conversations:
    """The program of the rollouts."""

    def __init__(self, extension: Extension, reader: PromptReader) -> None:
        self._extension, self._reader, self._tools = extension, reader, tools_of([number_of])
        # The driver of the running trainer knows nothing of these calls.
        self._calls = ToolCalls(_SECONDS, threads=True)

    async def __call__(self, conversation: Conversation) -> None:
        messages = list(conversation.prompt.source)
        for number in range(2):
            context = conversation.ids
            turn = await conversation.sample(_TURN)
            asked = [("number_of", {"rollout": str(conversation.key)})]
            (result,) = await self._calls.run(
                self._tools, asked, f"turn {number} of rollout {conversation.key}"
            )
            new = [self._extension.error(result.text)]
            go_on(conversation, self._extension, messages, context, turn, new, self._reader)
            messages += [self._extension.read(turn.token_ids).message, *new]
        await conversation.sample(_TURN)
        # Other ids, as after a compaction. The last id stays the same.
        prompt = conversation.prompt.ids
        conversation.branch(joined([prompt[-2::-1], prompt[-1:]]))
        await conversation.sample(_TURN)

    def close(self) -> None:
        self._calls.close()


@contextmanager
def conversing(stage: Stage) -> Iterator[None]:
    """The rollouts of the running trainer are conversations.

    Raises:
        InputError: the chat template cannot be extended, or a conversation does not fit into the engine's context.
    """
    prompts = tuple(sorted(stage.prompts, key=lambda prompt: len(prompt.ids)))
    # The longest prompt leaves no room. The shortest two take its place.
    prompts = (prompts[0], prompts[1], replace(prompts[0], prompt_id=prompts[2].prompt_id))
    room = stage.engine.settings().max_model_len - max(len(prompt.ids) for prompt in prompts)
    extension = Extension(stage.tokenizer, end_ids(stage.model, stage.tokenizer))
    program = _Conversations(extension, PromptReader(stage.tokenizer))
    try:
        with (
            samples_with(stage, max_completion_length=min(_BUDGET, room)),
            patch.object(stage, "prompts", prompts),
            patch.object(stage.trainer.source, "program", program),
        ):
            yield
    finally:
        program.close()


def _with(inject: Callable[[Stage], Patch]) -> Callable[[Stage], Patch]:
    """The fault, in conversations."""

    @contextmanager
    def both(stage: Stage) -> Iterator[None]:
        with conversing(stage), inject(stage):
            yield

    return both


def _encoded_anew(stage: Stage) -> Patch:
    """The next turn is sampled after the text of the earlier turns, encoded again. Training uses the sampled ids."""

    def ids(branch: Branch) -> Ids:
        parts = [stage.encoded_again(p.token_ids) if isinstance(p, Turn) else p for p in branch._parts]
        return joined([branch.prompt_ids, *parts])

    return patch.object(Branch, "ids", property(ids))


def _no_closing_token(stage: Stage) -> Patch:
    """A turn that was cut is not closed before the next message."""
    honest = Continuation.next

    def unclosed(self: Continuation, *given: Any) -> Any:
        found = honest(self, *given)
        return Insert(found.ids[1:]) if isinstance(found, Insert) else found

    return patch.object(Continuation, "next", unclosed)


def _inserted_as_sampled(stage: Stage) -> Patch:
    """The first inserted id of a rollout is marked as sampled, with the probability 1 that inserted ids have in an
    answer.
    """
    honest = Conversation.rollout

    def marked(self: Conversation) -> Rollout:
        found = honest(self)
        return replace(found, completion=_one_more_sampled(found.completion))

    return patch.object(Conversation, "rollout", marked)


def _one_more_sampled(completion: Completion) -> Completion:
    if completion.sampled is None:
        return completion
    more = completion.sampled.copy()
    more[np.argmin(more)] = True
    return replace(completion, sampled=flags(more))


def _inserted_is_trained(stage: Stage) -> Patch:
    """The same, on the way from the rollout to the training batch."""

    def trained(sequence: TrainingSequence) -> TrainingSequence:
        if sequence.sampled is None:
            return sequence
        place, more = int(np.argmin(sequence.sampled)), sequence.sampled.copy()
        more[place] = True
        values: dict[str, Any] = {
            name: np.insert(column, place, 0.0)
            for name in ("behaviour_logps", "advantages", "old_logps", "entropies", "ref_logps")
            if (column := getattr(sequence, name)) is not None
        }
        return replace(sequence, sampled=flags(more), **values)

    return generations_become(lambda generation: generation.changed(trained))


def _result_of_another(stage: Stage) -> Patch:
    """The threads of tools give each call the result of the call before."""
    honest, earlier = tools_module.in_thread, list[Any]()

    async def exchanged(*given: Any) -> Any:
        earlier.append(await honest(*given))
        return earlier[-2:][0]

    return patch.object(tools_module, "in_thread", exchanged)


def _inserted_into_another(stage: Stage) -> Patch:
    """The ids of a result are inserted into another rollout, which also waits for a result."""
    honest, earlier = Conversation.insert, list[Ids]()

    def exchanged(self: Conversation, ids: Any, **room: Any) -> None:
        earlier.append(whole_numbers(ids))
        honest(self, earlier[-2:][0], **room)

    return patch.object(Conversation, "insert", exchanged)


def _other_context(stage: Stage) -> Patch:
    """A further branch is scored after the prompt of the rollout."""

    def moved(generation: Generation) -> Generation:
        prompts = {
            str(c.key): r.completion.prompt_ids
            for g in generation.groups
            for r in g.rollouts
            for c in r.further
        }
        return generation.changed(lambda s: replace(s, prompt_ids=prompts.get(s.name, s.prompt_ids)))

    return generations_become(moved)


def _needs_messages(stage: Stage) -> str:
    if not all(is_conversational(prompt.source) for prompt in stage.prompts):
        return "the prompts are plain text"
    try:
        with conversing(stage):
            return ""
    except InputError as error:
        return f"the rollouts cannot be conversations: {error}"


CONVERSATION_FAULTS = tuple(
    Fault(name, what, _with(inject), needs=_needs_messages)
    for name, what, inject in (
        ("T1b", "the text of earlier turns is encoded again for the next turn", _encoded_anew),
        ("T5", "a turn that was cut gets the next message without its closing token", _no_closing_token),
        ("T7", "a rollout marks an inserted token as sampled", _inserted_as_sampled),
        ("T7b", "an inserted token is trained", _inserted_is_trained),
        ("T8", "a tool call gets the result of another rollout", _result_of_another),
        ("T8b", "the result of another rollout is inserted", _inserted_into_another),
        ("T9", "a branch is scored in the context of another", _other_context),
    )
)

# The largest bias that requests may have.
_MOST = 100.0


@contextmanager
def _ending(stage: Stage, fault: Patch) -> Iterator[None]:
    ends = end_ids(stage.model, stage.tokenizer)
    bias = dict.fromkeys(map(str, ends), even_chance(stage, ends))
    with samples_with(stage, logit_bias=bias), fault:
        yield


def even_chance(stage: Stage, ends: Sequence[int]) -> float:
    """The bias under which a completion of a median prompt ends at its first token in one of two cases.

    The policy of a run has moved far, and may hardly end by itself any more.
    """

    def odds(prompt: Ids) -> float:
        """The logit of ending there."""
        logps = [completion_logps(stage.model, prompt, [end], Sampling(1), stage.precision) for end in ends]
        end = torch.cat(logps).double().logsumexp(0).clamp(max=-1e-9)
        return float(end - torch.log1p(-end.exp()))

    return min(max(-median(odds(p.ids) for p in stage.prompts), 0.0), _MOST)


def _ignored(stage: Stage) -> Patch:
    return _ending(stage, _vllm_ignores() if is_vllm(stage) else _transformers_ignores())


def _vllm_ignores() -> Patch:
    real = vllm_requests.sampling_fields

    def ignoring(request: GenerationRequest) -> dict[str, Any]:
        return {**real(request), "ignore_eos": True, "stop_token_ids": []}

    return patch.object(vllm_requests, "sampling_fields", ignoring)


def _transformers_ignores() -> Patch:
    real = transformers_engine._RowsDone._reason

    def ignoring(self: Any, row: Any) -> Any:
        with patch.object(row, "end_ids", ()):
            return real(self, row)

    return patch.object(transformers_engine._RowsDone, "_reason", ignoring)


def _stripped(stage: Stage) -> Patch:
    ends = end_ids(stage.model, stage.tokenizer)

    def without(requests: Sequence[GenerationRequest], answers: list[Completion]) -> list[Completion]:
        return [_cut(a) if len(a.token_ids) > 1 and a.token_ids[-1] in ends else a for a in answers]

    return _ending(stage, answers_become(stage, without))


def _cut(answer: Completion) -> Completion:
    """A completion without its last token."""
    return replace(
        answer,
        token_ids=answer.token_ids[:-1],
        logprobs=answer.logprobs[:-1],
        weight_versions=answer.weight_versions[:-1],
        kept_ids=None if answer.kept_ids is None else answer.kept_ids.part(0, len(answer.token_ids) - 1),
    )


def halved(stage: Stage) -> Patch:
    def halved(requests: list[GenerationRequest]) -> list[GenerationRequest]:
        return [
            replace(r, sampling=replace(r.sampling, max_tokens=max(r.sampling.max_tokens // 2, 1)))
            for r in requests
        ]

    return requests_become(stage, halved)


def _shortened(stage: Stage) -> Patch:
    def shortened(requests: Sequence[GenerationRequest], answers: list[Completion]) -> list[Completion]:
        longest = max(range(len(answers)), key=lambda i: len(answers[i].token_ids))
        return [_cut(a) if i == longest else a for i, a in enumerate(answers)]

    return answers_become(stage, shortened)


def _needs_two_tokens(stage: Stage) -> str:
    return "" if stage.config.max_completion_length > 1 else "completions have one token each"


END_FAULTS = (
    Fault("S3", "the engine goes on after an end token", _ignored, needs=_needs_two_tokens),
    Fault("S3b", "end tokens are removed from the answers", _stripped, needs=_needs_two_tokens),
    Fault("S3c", "the engine gets half of the token limit", halved, needs=_needs_two_tokens),
    Fault("S3d", "the last token of one answer is missing", _shortened, needs=_needs_two_tokens),
)
