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
from lockstep.extras.selftest import seams
from lockstep.extras.selftest.sampling_faults import samples_with
from lockstep.extras.selftest.seams import Answers, Fault, Patch, Requests, is_vllm
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


def _prompts_become(change: Callable[[Stage, Ids], Ids]) -> Callable[[Stage], Patch]:
    """The engine gets other prompts, where they fit."""

    def inject(stage: Stage) -> Patch:
        def changed(request: GenerationRequest) -> GenerationRequest:
            ids = change(stage, request.prompt_ids)
            fits = len(ids) + request.sampling.max_tokens <= stage.engine.settings().max_model_len
            return replace(request, prompt_ids=ids) if fits else request

        return seams.each_request_becomes(stage, changed)

    return inject


_encoded_again = _prompts_become(Stage.encoded_again)
_special_token_doubled = _prompts_become(lambda stage, ids: joined([ids[:1], ids]))


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

    return seams.generations_become(masked)


def _flattened_twice(stage: Stage) -> Patch:
    def token(answer: Completion, i: int) -> Completion:
        ids, logprobs = answer.token_ids[i : i + 1], answer.logprobs[i : i + 1]
        return replace(answer, token_ids=ids, logprobs=logprobs, weight_versions=answer.weight_versions[:1])

    def flat(requests: Requests, answers: Answers) -> Answers:
        return [token(answer, i) for answer in answers for i in range(len(answer.token_ids))]

    return seams.answers_become(stage, flat)


def _half_dropped(stage: Stage) -> Patch:
    return seams.answers_become(stage, lambda requests, answers: answers[::2])


def across_prompts(stage: Stage) -> Patch:
    """Completions of one prompt get the keys and the echoed prompt of another."""

    def across(requests: Requests, answers: Answers) -> Answers:
        asked = {r.key: r.prompt_ids for r in requests}
        moved = [*answers[1:], answers[0]]
        return [replace(m, key=a.key, prompt_ids=asked[a.key]) for a, m in zip(answers, moved, strict=True)]

    return seams.answers_become(stage, across)


def _another_ranks(stage: Stage) -> Patch:
    def stranger(answer: Completion) -> Completion:
        return replace(answer, key=RequestKey(f"rank1/{answer.key.prompt_id}", answer.key.sample))

    return seams.each_answer_becomes(stage, stranger)


def _the_call_before(stage: Stage) -> Patch:
    """The second call gets the first call's completions, with its own keys and versions."""
    first: dict[RequestKey, Completion] = {}

    def earlier(requests: Requests, answers: Answers) -> Answers:
        if not first:
            first.update({a.key: a for a in answers})
            return answers
        pairs = [(first.get(a.key, a), a.weight_versions[:1]) for a in answers]
        return [replace(old, weight_versions=np.repeat(now, len(old.token_ids))) for old, now in pairs]

    return seams.answers_become(stage, earlier)


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
            where = f"turn {number} of rollout {conversation.key}"
            (result,) = await self._calls.run(self._tools, asked, where)
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
    """The first inserted id of a rollout is marked as sampled. In an answer, inserted ids have the probability 1."""
    honest = Conversation.rollout

    def marked(self: Conversation) -> Rollout:
        found = honest(self)
        if (sampled := found.completion.sampled) is None:
            return found
        more = sampled.copy()
        more[np.argmin(more)] = True
        return replace(found, completion=replace(found.completion, sampled=flags(more)))

    return patch.object(Conversation, "rollout", marked)


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

    return seams.generations_become(lambda generation: generation.changed(trained))


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
        rollouts = [rollout for group in generation.groups for rollout in group.rollouts]
        prompts = {str(branch.key): r.completion.prompt_ids for r in rollouts for branch in r.further}
        return generation.changed(lambda s: replace(s, prompt_ids=prompts.get(s.name, s.prompt_ids)))

    return seams.generations_become(moved)


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

    def without(answer: Completion) -> Completion:
        return _cut(answer) if len(answer.token_ids) > 1 and answer.token_ids[-1] in ends else answer

    return _ending(stage, seams.each_answer_becomes(stage, without))


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
    def half(request: GenerationRequest) -> GenerationRequest:
        most = max(request.sampling.max_tokens // 2, 1)
        return replace(request, sampling=replace(request.sampling, max_tokens=most))

    return seams.each_request_becomes(stage, half)


def _shortened(stage: Stage) -> Patch:
    def shortened(requests: Requests, answers: Answers) -> Answers:
        longest = max(range(len(answers)), key=lambda i: len(answers[i].token_ids))
        return [_cut(a) if i == longest else a for i, a in enumerate(answers)]

    return seams.answers_become(stage, shortened)


def _needs_two_tokens(stage: Stage) -> str:
    return "" if stage.config.max_completion_length > 1 else "completions have one token each"


END_FAULTS = (
    Fault("S3", "the engine goes on after an end token", _ignored, needs=_needs_two_tokens),
    Fault("S3b", "end tokens are removed from the answers", _stripped, needs=_needs_two_tokens),
    Fault("S3c", "the engine gets half of the token limit", halved, needs=_needs_two_tokens),
    Fault("S3d", "the last token of one answer is missing", _shortened, needs=_needs_two_tokens),
)
