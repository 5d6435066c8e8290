"""From prompts to groups of rollouts: runs the programs of many rollouts at once, and keeps the engine busy.

Every rollout is a coroutine (`rollouts/conversation.py`). All of them run on one event loop, in a thread of the
driver. The engine works in the calling thread: vLLM and torch then always compute in the same thread. Requests go to
the engine as soon as a program makes them, and each finished rollout is handed over at once. There is no barrier
between the turns of different rollouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from lockstep.contract.inbox import CheckAnswer, Errands, Inbox, Progress, check_requests
from lockstep.contract.protocol import Completion, Engine, GenerationRequest, RequestKey, request_seed
from lockstep.contract.sampling import Sampling
from lockstep.errors import LockstepError, ProofError, quoted
from lockstep.rollouts.conversation import Ask, Conversation, Decode, OutOfRoom, Program, single_turn
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup, seal_of
from lockstep.rollouts.programs.tools import ToolCalls
from lockstep.threads import CallLoop, Pending
from lockstep.tokens.arrays import Ids

OnRollout = Callable[[Rollout], None]
Rollouts = dict[RequestKey, Rollout]
# Turns of the event loop in which a program reacts to an answer if it waits for nothing else, and their seconds.
_TURNS, _SETTLING = 8, 5.0
# Seconds in which programs can end after an error.
_ENDING = 10.0
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Start:
    """What a rollout begins with. `seed` is used for this rollout only."""

    prompt: Prompt
    key: RequestKey
    seed: int
    sampling: Sampling


class RolloutRecord(Protocol):
    """Hears what the engine was asked for one rollout and what it answered, and compares the rollout with it."""

    def note(self, request: GenerationRequest, answer: Completion) -> None:
        """The engine has answered, and the conversation will take the answer."""

    def check(self, rollout: Rollout) -> None:
        """The program has ended, and has made this rollout.

        Raises:
            ProofError: the rollout does not hold exactly what the engine answered.
        """


class Driver:
    """Runs programs against one engine.

    Args:
        tokenizer: decodes ids to text. It never makes ids.
        record: makes the record of one rollout (`watch/custody.py`).
        calls: runs the calls of tools and environments; None: programs wait for nothing but the engine.
        check: raises if an answer does not fit its request (`watch/samples.py`).
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        record: Callable[[], RolloutRecord],
        calls: ToolCalls | None = None,
        check: CheckAnswer | None = None,
    ) -> None:
        self.engine, self._record, self._calls, self._check = engine, record, calls, check
        self._errands = calls.errands if calls is not None else Errands()
        self._decode = decoding(tokenizer)
        self.loop = CallLoop("lockstep-programs")

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self, starts: Sequence[Start], program: Program, on_rollout: OnRollout | None = None, **limits: Any
    ) -> Rollouts:
        """Make one rollout per start, in the calling thread. The arguments and errors are those of `begin`."""
        return self.begin(starts, program, on_rollout, **limits).finish()

    def begin(
        self,
        starts: Sequence[Start],
        program: Program,
        on_rollout: OnRollout | None = None,
        *,
        limit: float | None = None,
        patience: float | None = None,
        gate: AbstractContextManager[object] | None = None,
    ) -> Running:
        """Start one program per start. The engine works on them in the thread that calls `Running.finish`.

        The first error of a program or of the engine ends all programs of this call, and drops their requests.

        Args:
            on_rollout: called with each rollout as soon as it is finished, from the thread of the programs. It must
                not block.
            limit: seconds that one request may take in the engine; None: the engine's own limit.
            patience: seconds without a request after which programs are given up; None: the engine's own limit.
            gate: held by whoever pushes weights meanwhile (`contract/inbox.py`).

        Raises:
            InputError, ProofError: as in `check_requests`; then nothing has been started.
        """
        settings = self.engine.settings()
        context = settings.max_model_len
        # The programs make their requests themselves. These show what cannot be asked before anything is started.
        requests = [GenerationRequest(s.key, s.prompt.ids, s.sampling, s.seed) for s in starts]
        check_requests(requests, self.engine.version, context, settings.vocab_size, settings.request_limits)
        missing, found = {start.key for start in starts}, Rollouts()
        places = {start.key: place for place, start in enumerate(starts)}
        inbox = Inbox(
            limit=limit,
            patience=patience,
            gate=gate,
            # The next step of the engine waits for programs that may ask again. A program of one turn never does.
            settle=self._settle if program is not single_turn else lambda: None,
            waits_for=lambda: _named(missing),
            check=self._check,
            # Not the order in which programs ask, which depends on threads where tools are called.
            order=lambda request: places[request.key._replace(call=0)],
            errands=self._errands,
            busy=lambda: self._calls is not None and self._calls.waiting,
        )

        async def one(start: Start) -> None:
            record = self._record()
            ask = _asking(inbox, record)
            conversation = Conversation(
                start.prompt, start.key, start.seed, start.sampling, context, self._decode, ask
            )
            await _followed(program, conversation)
            rollout = conversation.rollout()
            record.check(rollout)
            rollout = replace(rollout, seal=seal_of(rollout, start.prompt))
            found[start.key] = rollout
            missing.discard(start.key)
            if on_rollout is not None:
                on_rollout(rollout)

        programs = self.loop.start(
            _all([one(start) for start in starts], inbox),
            lambda _: {start.key: found[start.key] for start in starts},
        )
        running = Running(self.engine, inbox, programs, found)
        try:
            self._settle()
        except BaseException as error:
            running.stop(error)
            raise
        return running

    def _settle(self) -> None:
        """Wait until every program has reacted to its answer, or waits for a slow tool. Later than the limit: go on."""
        reactions = self.loop.start(_reactions(self._calls), lambda none: none)
        self._errands.do_during(reactions, _SETTLING)
        if reactions.done():
            reactions.result()

    def close(self) -> None:
        """End the thread of the programs. May be called twice."""
        self.loop.close()


class Running:
    """Programs that have been started (`Driver.begin`)."""

    def __init__(
        self, engine: Engine, inbox: Inbox, programs: Pending[None, Rollouts], found: Rollouts
    ) -> None:
        self._engine, self._inbox, self._programs, self._found = engine, inbox, programs, found

    def finished(self) -> list[Rollout]:
        """The rollouts that are finished by now, in the order in which they ended. The other programs go on."""
        # One call of the interpreter, so that the programs' thread cannot add one meanwhile.
        return list(self._found.values())

    def finish(self) -> Rollouts:
        """Let the engine work in this thread until all programs have ended. Returns the unscored rollouts by key.

        Raises:
            ProofError: an answer does not match its request, or a rollout does not hold what the engine answered.
            EngineLost: the engine was lost.
            LockstepError: a program raised an error, or a time limit passed.
        """
        try:
            self._engine.serve(self._inbox)
        except BaseException as error:
            self.stop(error)
            self._programs.wait(_ENDING)
            raise
        return self._programs.result()

    def await_begin(self, limit: float) -> bool:
        """Wait until the engine has taken the first requests, or the programs have ended. False: that took too long."""
        return self._inbox.begun.wait(limit)

    def stop(self, error: BaseException) -> None:
        """End the programs, and drop their requests. `finish` raises the error."""
        self._inbox.stop(error)
        self._programs.cancel()


def collect(
    prompts: Sequence[Prompt],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    record: Callable[[], RolloutRecord],
    *,
    num_generations: int,
    run_seed: int,
    version: int,
    program: Program = single_turn,
) -> list[RolloutGroup]:
    """Make `num_generations` rollouts of every prompt, with a driver of its own.

    Args:
        record: as in `Driver`.
        version: the version that the trainer pushed last; the engine must hold it.

    Returns:
        One unscored group per prompt, in the order of `prompts`.

    Raises:
        ProofError: the engine holds another version, or an answer fails its checks.
        InputError: a prompt does not fit the engine's context.
    """
    with Driver(engine, tokenizer, record) as driver:
        counts = {"num_generations": num_generations, "run_seed": run_seed, "version": version}
        return sampled_now(driver, prompts, starts_for(prompts, sampling, **counts), version, program=program)


def sampled_now(
    driver: Driver,
    prompts: Sequence[Prompt],
    starts: Sequence[Start],
    version: int,
    *,
    program: Program = single_turn,
    on_rollout: OnRollout | None = None,
    limit: float | None = None,
) -> list[RolloutGroup]:
    """Groups of rollouts whose every token the engine samples with the weights of `version`.

    `starts` are the beginnings of all rollouts of `prompts`.

    Raises:
        ProofError: the engine holds another version, or an answer fails its checks.
    """
    if driver.engine.version != version:
        raise ProofError(
            "version",
            f"the engine holds version {driver.engine.version}, the trainer last pushed {version}",
            "a sync was skipped or failed, or another program updated the engine",
            "push the weights before collecting rollouts",
        )
    rollouts = driver.run(starts, program, on_rollout, limit=limit)
    # The inbox has checked each answer against its request. This checks that the trainer's weights sampled all of them.
    for completion in (branch for rollout in rollouts.values() for branch in rollout.branches):
        if (completion.weight_versions != version).any():
            raise ProofError(
                "version",
                f"request {completion.key} has tokens sampled at versions "
                f"{np.unique(completion.weight_versions).tolist()}; the trainer last pushed {version}",
                "another program pushed weights to the engine while it sampled",
                "let one trainer own the engine",
            )
    return groups_from(prompts, rollouts)


def starts_for(
    prompts: Sequence[Prompt], sampling: Sampling, *, num_generations: int, run_seed: int, version: int
) -> list[Start]:
    """The beginning of one rollout per sample. Its seed depends on the run, the version, the prompt and the sample.

    `version` is the weight version that learns from these rollouts first.
    """
    return [
        Start(prompt, key, request_seed(run_seed, version, key), sampling)
        for prompt in prompts
        for key in (RequestKey(prompt.prompt_id, sample) for sample in range(num_generations))
    ]


def groups_from(prompts: Sequence[Prompt], rollouts: Mapping[RequestKey, Rollout]) -> list[RolloutGroup]:
    """One unscored group per prompt, in the order of `prompts`. Its rollouts are in the order of their samples."""
    by_prompt: dict[str, list[Rollout]] = {prompt.prompt_id: [] for prompt in prompts}
    for key in sorted(rollouts):
        by_prompt[key.prompt_id].append(rollouts[key])
    return [RolloutGroup(prompt, tuple(by_prompt[prompt.prompt_id])) for prompt in prompts]


def decoding(tokenizer: PreTrainedTokenizerBase, *, special: bool = False) -> Decode:
    """A function that gives the text of ids, without special tokens unless `special` is on."""

    def decode(ids: Ids) -> str:
        return tokenizer.decode(np.asarray(ids), skip_special_tokens=not special)

    return decode


async def _all(programs: Sequence[Coroutine[Any, Any, None]], inbox: Inbox) -> None:
    """Run programs together. The first error cancels the others and stops the engine."""
    tasks = [asyncio.ensure_future(program) for program in programs]
    try:
        for task in asyncio.as_completed(tasks):
            await task
    except BaseException as error:
        inbox.stop(error)
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    inbox.close()


async def _followed(program: Program, conversation: Conversation) -> None:
    """Run one program to its end. An error that is not Lockstep's own becomes one that names the rollout."""
    task = asyncio.current_task()
    try:
        await program(conversation)
    except (LockstepError, asyncio.CancelledError) as error:
        if isinstance(error, OutOfRoom):
            return
        if isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling():
            raise LockstepError(
                f"the program of rollout {conversation.key} was cancelled by its own code"
            ) from error
        raise
    except BaseException as error:
        raise LockstepError(
            f"the program of rollout {conversation.key} raised {type(error).__name__}: {quoted(error)}"
        ) from error


def _asking(inbox: Inbox, record: RolloutRecord) -> Ask:
    async def ask(request: GenerationRequest, progress: Progress | None) -> Completion:
        answer = await asyncio.wrap_future(inbox.ask(request, progress))
        # Nothing can be cancelled between here and the place where the conversation takes the answer.
        record.note(request, answer)
        return answer

    return ask


async def _reactions(calls: ToolCalls | None) -> None:
    waited = True
    while waited:
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        waited = calls is not None and await calls.settled()


def _named(keys: set[RequestKey]) -> str:
    names = sorted(str(key) for key in list(keys))
    others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return f"rollout {', '.join(names[:_NAMED])}{others}"
