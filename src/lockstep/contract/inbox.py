"""The inbox of an engine: a queue through which requests reach the engine, and completions come back one by one.

Requests come from the thread of an event loop. The engine takes them in its own thread whenever it can, also between
two of its steps. It answers each request as soon as its completion is finished. The inbox matches answers to requests
by key, and checks each answer before it hands the completion over: no caller can forget it. When the engine asks for
requests, its thread also does what programs have handed to it (`Errands`).

Proof `echo`, `keys`, `logprobs`.
Shows: every request has one answer, to the ids that were sent, with one finite log-prob per token; checked in the
engine and again where answers become groups.
Does not show: that the answer was computed from those ids (the gap shows this).
When: every request.

Proof `version`.
Shows: every token was sampled by the weights that were pushed last (with `max_staleness`: by weights that were
pushed, and never by older weights than those of the previous token).
Does not show: that those weights are right.
When: every request.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.contract.protocol import Completion, GenerationRequest, OnAnswer, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.progress import waiting
from lockstep.threads import Pending
from lockstep.tokens.arrays import Ids, KeptIds, chosen
from lockstep.tokens.chat import check_embedded


class Errands:
    """Work that programs hand to the thread in which their engine is served, because it belongs into that thread.

    Python lets only the main thread handle signals, and many objects, such as a connection to SQLite, belong to the
    thread that made them. Therefore plain tools and environments run in the thread that calls the engine, as reward
    functions do. That thread does the work between two steps of the engine, in order. Any thread hands it in.

    Attributes:
        changed: notified about each piece of work. An inbox waits on it for requests and for work together.
        seconds: how long all work has taken so far.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.seconds = 0.0
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def ask(self, work: Callable[[], Any]) -> Future[Any]:
        """Hand in a piece of work. If the caller cancels the returned future first, it is not done."""
        found: Future[Any] = Future()
        with self.changed:
            self._waiting.append((work, found))
            self.changed.notify_all()
        return found

    @property
    def waiting(self) -> bool:
        """Whether there is work."""
        return bool(self._waiting)

    def do_next(self) -> bool:
        """Do one piece of work in this thread. False: there is none.

        Raises:
            KeyboardInterrupt: it came while the work was done. Every other error goes to the caller who handed the
                work in.
        """
        try:
            work, found = self._waiting.popleft()
        except IndexError:
            return False
        if not found.set_running_or_notify_cancel():
            return True
        began = time.monotonic()
        try:
            found.set_result(work())
        except KeyboardInterrupt:
            found.set_exception(LockstepError("the run was interrupted during this call"))
            raise
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            found.set_exception(error)
        finally:
            self.seconds += time.monotonic() - began
        return True

    def do_during(self, call: Pending[Any, Any], patience: float) -> None:
        """Do all work until a call has ended, or until there is no work for `patience` seconds."""
        call.when_done(self._wake)
        while not call.done():
            with self.changed:
                if not self.changed.wait_for(lambda: self._waiting or call.done(), patience):
                    return
            self.do_next()

    def _wake(self, _: object) -> None:
        with self.changed:
            self.changed.notify_all()


Answer = Future[Completion]
# A function that is called with the ids that are sampled so far. It must copy what it keeps, and it must not block.
Progress = Callable[[Sequence[int]], None]
CheckAnswer = Callable[[GenerationRequest, Completion], None]


class Inbox:
    """The requests of one generation.

    Args:
        limit: seconds that one request may take in the engine; None: the engine's own limit.
        patience: seconds that the engine waits without any request before it raises; None: the engine's own limit.
        gate: a lock that is held while the engine takes requests. A push of weights holds the same lock, so that no
            request starts during the push.
        settle: returns when the programs that wait for answers have reacted to all answers that were given so far.
        waits_for: returns the names of the programs that have not ended, for an error message.
        on_answer: called with each completion before it is handed over, from the thread that answers.
        check: a further check of an answer against its request, after the checks of `contract/inbox.py`. It raises an
            error.
        order: sort key of the requests that the engine takes together; None: they keep the order in which they came.
        errands: what programs hand to the engine's thread; None: nothing.
        busy: whether a program waits for something else that has a time limit of its own. Then nobody's patience ends.

    Attributes:
        begun: set when the engine has taken the first requests, or when there will be none.
    """

    def __init__(
        self,
        *,
        limit: float | None = None,
        patience: float | None = None,
        gate: AbstractContextManager[object] | None = None,
        settle: Callable[[], None] = lambda: None,
        waits_for: Callable[[], str] = lambda: "the caller",
        on_answer: OnAnswer | None = None,
        check: CheckAnswer | None = None,
        order: Callable[[GenerationRequest], int] | None = None,
        errands: Errands | None = None,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._order, self._check = order, check
        self._errands, self._busy = errands or Errands(), busy
        self.limit, self._patience, self._on_answer = limit, patience, on_answer
        self._gate = gate if gate is not None else nullcontext()
        self._settle, self._waits_for = settle, waits_for
        self.begun = threading.Event()
        self._changed = self._errands.changed
        # Requests that wait for the engine, and requests that the engine has taken, in the order in which they came.
        self._waiting: dict[RequestKey, tuple[GenerationRequest, Answer]] = {}
        self._taken: dict[RequestKey, tuple[GenerationRequest, Answer]] = {}
        self._progress: dict[RequestKey, Progress] = {}
        self._given_up: set[RequestKey] = set()
        self._answered: set[RequestKey] = set()
        self._closed = False
        self._error: BaseException | None = None

    # ---- for the programs that make requests ------------------------------------------------------------------------

    def ask(self, request: GenerationRequest, progress: Progress | None = None) -> Answer:
        """Put a request into the inbox. If the caller cancels the returned future, the engine gives the request up.

        Args:
            progress: called from the engine's thread while the request is sampled, if the engine reports progress.

        Raises:
            LockstepError: the inbox is closed.
        """
        answer: Answer = Future()
        with self._changed:
            if self._closed or self._error is not None:
                raise LockstepError(f"request {request.key} was made after its generation had ended")
            self._waiting[request.key] = (request, answer)
            if progress is not None:
                self._progress[request.key] = progress
            self._changed.notify_all()
        answer.add_done_callback(lambda done: self._give_up(request.key) if done.cancelled() else None)
        return answer

    def close(self) -> None:
        """No further request will come. The engine returns when it has answered all requests."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """End the generation: the engine drops its requests and raises this error. Only the first call counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
        self.begun.set()

    def settle(self) -> None:
        """Wait until programs that got answers have made their next requests, if these depend on the answers alone.

        An engine calls it after it has given answers and before its next step, so that the same answers lead to the
        same batches.
        """
        self._settle()

    def _give_up(self, key: RequestKey) -> None:
        with self._changed:
            self._progress.pop(key, None)
            if self._waiting.pop(key, None) is None and self._taken.pop(key, None) is not None:
                self._given_up.add(key)
            self._changed.notify_all()

    # ---- for the engine ---------------------------------------------------------------------------------------------

    @contextmanager
    def taken(self, working: int | None, wait: float) -> Iterator[list[GenerationRequest] | None]:
        """The requests that came since the last call, in order; None if all are answered and no more will come.

        Args:
            working: number of requests that the engine is working on. If it is 0, the call waits for the next request.
                None: servers work on the requests, and the call waits for a new request, a request that was given up,
                or the end.
            wait: seconds to wait for a request while no other request is open, if the inbox has no `patience` of its
                own.

        Raises:
            ProofError: the engine has dropped a request: it works on fewer requests than it has taken and not yet
                answered.
            LockstepError: no request came in time, or the generation was stopped.
        """
        did_some = True
        while did_some:
            did_some = self._error is None and self._errands.do_next()
            with self._changed:
                if working is not None and len(self._taken) > working and self._error is None:
                    raise missing_answers(self._taken.keys(), len(self._taken) + len(self._answered))
                if working or self._has_news():
                    break
                if not did_some:
                    limit = self._patience or wait
                    # While the engine works on requests, their own calls say so.
                    idle = not (self._taken or self._waiting)
                    with (
                        waiting("a program of a rollout to ask the engine", limit) if idle else nullcontext()
                    ):
                        did_some = self._await(limit)
        with self._gate:
            with self._changed:
                if self._error is not None:
                    raise self._error
                requests = [request for request, _ in self._waiting.values()]
                if self._order is not None:
                    requests.sort(key=self._order)
                self._taken |= self._waiting
                self._waiting.clear()
                ended = self._closed and not self._taken
            yield None if ended else requests
        if requests or ended:
            self.begun.set()

    def _has_news(self) -> bool:
        """Whether the engine has something to do, or the generation has ended."""
        return bool(self._waiting or self._given_up or self._error or (self._closed and not self._taken))

    def _await(self, wait: float) -> bool:
        """Wait until there is news for the engine. True: there is none, but work that a program has handed in."""
        deadline = time.monotonic() + wait
        while not self._has_news():
            if self._errands.waiting:
                return True
            self._changed.wait(max(deadline - time.monotonic(), 0.0))
            if self._taken or self._busy():
                # The time limits of the open requests, or of what the programs wait for, bound this wait.
                deadline = time.monotonic() + wait
            elif time.monotonic() >= deadline and not (self._waiting or self._error or self._closed):
                raise LockstepError(
                    f"the engine got no request for {wait:.0f} s, and {self._waits_for()} has not ended: "
                    "something other than the engine takes longer than the time limit"
                )
        return False

    def now(self) -> float:
        """Seconds of a clock that stands still while the engine's thread works for programs, for limits of requests."""
        return time.monotonic() - self._errands.seconds

    def given_up(self) -> list[RequestKey]:
        """Requests that the engine has taken and that nobody waits for any more. Each is reported once."""
        with self._changed:
            keys = list(self._given_up)
            self._given_up.clear()
            return keys

    def failed(self, key: RequestKey, error: BaseException) -> None:
        """End the generation with this error, if somebody still waits for the request."""
        with self._changed:
            if key in self._taken:
                self.stop(error)

    def is_watched(self, key: RequestKey) -> bool:
        """Whether this request has a `progress` function."""
        return key in self._progress

    def progressed(self, key: RequestKey, token_ids: Sequence[int]) -> None:
        """Report the ids that are sampled so far for a watched request. An engine may leave these reports out."""
        progress = self._progress.get(key)
        if progress is not None and key in self._taken:
            progress(token_ids)

    def answer(
        self, completion: Completion, versions: Collection[int], vocab_size: int | None = None
    ) -> None:
        """Hand a completion over.

        Args:
            versions: weight versions that may have sampled its tokens, in the order of their commits.
            vocab_size: number of logits of the model; None if the engine does not know it.

        Raises:
            ProofError: the completion does not match an open request, or the inbox's own check fails.
        """
        key = completion.key
        with self._changed:
            if key in self._given_up:
                self._given_up.discard(key)
                return
            if key not in self._taken:
                raise second_answer(key) if key in self._answered else unexpected_answer(key)
            request, answer = self._taken[key]
            check_answer(request, completion, versions, vocab_size)
            if self._check is not None:
                self._check(request, completion)
            if completion.pictures is not request.pictures:
                # The digests are equal. The trainer must learn from the pixels that it has read itself.
                completion = replace(completion, pictures=request.pictures)
            del self._taken[key]
            self._progress.pop(key, None)
            self._answered.add(key)
            self._changed.notify_all()
        if self._on_answer is not None:
            self._on_answer(completion)
        try:
            answer.set_result(completion)
        except InvalidStateError:
            # The future was cancelled between the check and this line.
            return


def answer_all(
    serve: Callable[[Inbox], None], requests: Sequence[GenerationRequest], on_answer: OnAnswer | None = None
) -> dict[RequestKey, Completion]:
    """`Engine.generate`, by a call of `Engine.serve`. The requests are already checked."""
    inbox = Inbox(on_answer=on_answer)
    answers = {request.key: inbox.ask(request) for request in requests}
    inbox.close()
    serve(inbox)
    return {key: answer.result() for key, answer in answers.items()}


# vLLM's environment variables that make two of the tables larger.
_WORDS, _WORD_IDS = "VLLM_MAX_NUM_BAD_WORDS", "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"
_FIRST_RUNNER = (
    "start vLLM with VLLM_USE_V2_MODEL_RUNNER=0 in its environment: its first model runner has no such limit"
)


def check_requests(
    requests: Sequence[GenerationRequest],
    version: int | None,
    max_model_len: int,
    vocab_size: int,
    limits: Mapping[str, int],
) -> None:
    """Refuse a batch in which one request cannot be answered, before any of its requests is started.

    Args:
        vocab_size: number of logits of the model.
        limits: `EngineSettings.request_limits`.

    Raises:
        ProofError: no weight version is committed.
        InputError: a key is used twice, a prompt is empty, prompt and completion do not fit the context, or the
            sampling settings name a token that the model does not have, or more ids than the engine can take.
    """
    _check_committed(version, "generate")
    for sampling in {request.sampling for request in requests}:
        sampling.check_vocabulary(vocab_size)
        check_limits(sampling, limits)
    seen: set[RequestKey] = set()
    for request in requests:
        if request.key in seen:
            raise InputError(f"request {request.key} occurs twice in one batch")
        seen.add(request.key)
        check_request(request, version, max_model_len, vocab_size)


def check_request(
    request: GenerationRequest, version: int | None, max_model_len: int, vocab_size: int
) -> None:
    """Refuse a request that cannot be answered. Its sampling settings were already checked when the generation began.

    Raises:
        ProofError: no weight version is committed.
        InputError: the prompt is empty or has a token that the model cannot embed, or prompt and completion do not
            fit the context.
    """
    _check_committed(version, "generate")
    if not len(request.prompt_ids):
        raise InputError(f"prompt {request.key.prompt_id} has no tokens")
    check_embedded(request.prompt_ids, vocab_size, f"prompt {request.key.prompt_id}")
    if max_model_len - len(request.prompt_ids) < request.sampling.max_tokens:
        raise InputError(
            f"prompt {request.key.prompt_id} has {len(request.prompt_ids)} tokens: with up to "
            f"{request.sampling.max_tokens} new tokens it does not fit the engine's context of {max_model_len}. "
            "Shorten or drop the prompt, lower max_completion_length, or raise vllm_max_model_length"
        )


def check_limits(sampling: Sampling, limits: Mapping[str, int]) -> None:
    """Compare the settings of a request with the limits of its engine.

    Args:
        limits: `EngineSettings.request_limits`.

    Raises:
        InputError: a setting names more ids than the engine can take. The message says what to do.
    """
    words = sum(map(len, sampling.bad_words))
    found = {
        "allowed_token_ids": (
            len(sampling.allowed_token_ids or ()),
            "allowed_token_ids names {} ids",
            _FIRST_RUNNER,
        ),
        "logit_bias": (len(sampling.logit_bias), "logit_bias names {} ids", _FIRST_RUNNER),
        "end_ids": (
            len(sampling.end_ids) if sampling.min_tokens else 0,
            "min_tokens is set, and {} ids end a completion",
            f"leave min_tokens out, or {_FIRST_RUNNER}",
        ),
        "bad_words": (
            len(sampling.bad_words),
            "bad_words has {} sequences of ids (a word may have two: with and without a space before it)",
            f"start vLLM with {_WORDS}={len(sampling.bad_words)} in its environment",
        ),
        "bad_word_ids": (
            words,
            "the words of bad_words have {} ids together",
            f"start vLLM with {_WORD_IDS}={words} in its environment",
        ),
    }
    for name, most in limits.items():
        number, what, advice = found[name]
        if number > most:
            # `end_ids` come from the model, so that a user cannot name fewer.
            fewer = "" if name == "end_ids" else "name fewer, or "
            raise InputError(
                f"{what.format(number)}; the engine takes at most {most} per request (vLLM's second model "
                f"runner, which it uses on GPUs): {fewer}{advice}"
            )


def check_answers(
    requests: Sequence[GenerationRequest],
    answers: Iterable[Completion],
    versions: Collection[int],
    vocab_size: int | None = None,
) -> dict[RequestKey, Completion]:
    """Check that each completion belongs to its request. Returns the completions by key.

    Args:
        versions: weight versions that may have sampled these tokens, in the order of their commits.
        vocab_size: number of logits of the model; None if the caller does not know it.

    Raises:
        ProofError: a request has no answer or two answers; an answer belongs to no request; the engine used another
            prompt or other pictures; a log-prob is missing or not finite; an id is below 0; a token was sampled by
            other weights than `versions`, or by older weights than the token before it; kept ids are missing, or
            contradict the request or the tokens (`kept_sets.py`).
        InputError: a filter kept more ids than `Sampling.max_kept_ids`.
    """
    asked = {request.key: request for request in requests}
    found: dict[RequestKey, Completion] = {}
    for answer in answers:
        if answer.key not in asked:
            raise unexpected_answer(answer.key)
        if answer.key in found:
            raise second_answer(answer.key)
        check_answer(asked[answer.key], answer, versions, vocab_size)
        found[answer.key] = answer
    missing = asked.keys() - found.keys()
    if missing:
        raise missing_answers(missing, len(asked))
    return found


def unexpected_answer(key: RequestKey) -> ProofError:
    """The error for an answer that belongs to no request."""
    return _mismatch("keys", f"an answer came for {key}, and there is no such request")


def second_answer(key: RequestKey) -> ProofError:
    """The error for a second answer to the same request."""
    return _mismatch("keys", f"two answers came for {key}")


def missing_answers(keys: Collection[RequestKey], total: int) -> ProofError:
    """The error for requests that the engine has dropped. `total` is the number of all requests."""
    return _mismatch("keys", f"{len(keys)} of {total} requests were not answered, {min(keys)} among them")


def check_scoring(sequences: Mapping[str, tuple[int, ...]], version: int | None, max_model_len: int) -> None:
    """Refuse sequences that an engine cannot score completely.

    Raises:
        ProofError: no weight version is committed.
        InputError: a sequence has fewer than two ids or leaves no room for a token in the context.
    """
    _check_committed(version, "score")
    for name, ids in sequences.items():
        if not 2 <= len(ids) < max_model_len:
            raise InputError(
                f"sequence {name} has {len(ids)} ids; an engine can score 2 to {max_model_len - 1}"
            )


def check_scores(sequences: Mapping[str, tuple[int, ...]], scores: Mapping[str, tuple[float, ...]]) -> None:
    """Check that every id of each sequence, except the first, has a finite log-prob.

    Raises:
        ProofError: a log-prob is missing, not finite, or belongs to no sequence.
    """
    for name in sequences.keys() | scores.keys():
        wanted, found = len(sequences.get(name, ())) - 1, scores.get(name, ())
        finite = sum(map(math.isfinite, found))
        if not finite == len(found) == wanted:
            said = f"{len(found)} log-probs, {finite} of them finite; {wanted} were asked for"
            raise _mismatch("logprobs", f"sequence {name} came back with {said}")


def _check_committed(version: int | None, verb: str) -> None:
    if version is None:
        raise ProofError(
            "version",
            f"the engine was asked to {verb} while it holds no committed weights",
            "no weights were pushed yet, or an update failed before its end",
            f"push the weights (lockstep.weights.push.push_weights) before you {verb}",
        )


def check_answer(
    request: GenerationRequest, answer: Completion, versions: Collection[int], vocab_size: int | None = None
) -> None:
    """Check that a completion belongs to its request.

    Args:
        versions: weight versions that may have sampled its tokens, in the order of their commits.
        vocab_size: number of logits of the model; None: unknown.

    Raises:
        ProofError: the engine used another prompt or other pictures; an id, a log-prob or the set of kept ids is
            impossible; a token was sampled by other weights than `versions`, or by older weights than the token
            before it.
        InputError: a filter kept more ids than `Sampling.max_kept_ids`.
    """
    if not np.array_equal(answer.prompt_ids, request.prompt_ids):
        raise ProofError(
            "echo",
            f"request {request.key}: the engine used {len(answer.prompt_ids)} prompt ids, not the "
            f"{len(request.prompt_ids)} that were sent",
            "text was tokenised again, or a special token was added, between trainer and engine",
            "send token ids, and turn off anything in the engine that rewrites prompts",
        )
    asked, used = request.pictures.digests, answer.pictures.digests
    if asked != used:
        raise ProofError(
            "echo",
            f"request {request.key}: the engine used {len(used)} pictures, which are not the {len(asked)} "
            "that were sent",
            "the pictures of two requests were exchanged, or the engine takes no pictures and dropped them",
            "use an engine that takes pictures (docs/guides/images.md); otherwise report this error with its message",
        )
    if not len(answer.token_ids):
        raise _mismatch("keys", f"request {request.key} came back without a token")
    lengths = (len(answer.token_ids), len(answer.logprobs), len(answer.weight_versions))
    if len(set(lengths)) != 1:
        raise _mismatch("logprobs", f"request {request.key} has {lengths} tokens, log-probs and versions")
    for strange in (answer.token_ids.min(), answer.token_ids.max()):
        if strange < 0 or (vocab_size is not None and strange >= vocab_size):
            raise _mismatch("keys", f"request {request.key} came back with {int(strange)} as a token id")
    if not np.isfinite(answer.logprobs).all():
        raise _mismatch("logprobs", f"request {request.key} has a log-prob that is not finite")
    if answer.sampled is not None and (len(answer.sampled) != lengths[0] or not answer.sampled.any()):
        raise _mismatch(
            "keys",
            f"request {request.key} has a mask of sampled tokens that does not fit its {lengths[0]} tokens",
        )
    order, spans = list(versions), _spans(answer.weight_versions)
    if not set(spans) <= set(order) or not _is_ordered(spans, order):
        raise ProofError(
            "version",
            f"request {request.key} has tokens sampled at versions {sorted(set(spans))}; the versions that "
            f"were pushed are {order}",
            "the engine was restarted, or a program other than this trainer updated its weights",
            "let one trainer own the engine, and push the weights again",
        )
    check_kept_ids(request.sampling, answer, vocab_size)


def _spans(versions: Ids) -> list[int]:
    """The version of each span of consecutive tokens that have the same version."""
    return [int(versions[0]), *versions[1:][versions[1:] != versions[:-1]].tolist()]


def _is_ordered(found: Sequence[int], order: Sequence[int]) -> bool:
    positions = [order.index(version) for version in found]
    return positions == sorted(positions)


def _mismatch(check: str, found: str) -> ProofError:
    return ProofError(
        check,
        found,
        "the engine lost, doubled or mixed up requests",
        "this is a defect of the engine or of its adapter: do not train on it; report it with this message",
    )


# Top-k keeps every id that equals the k-th largest. In bfloat16 at most so many are equal, or this share of k.
_TIES, _SHARE_OF_TIES = 256, 0.25
# Rounding of a log-prob in float32.
_ROUNDING = 1e-3


def check_kept_ids(sampling: Sampling, answer: Completion, vocab_size: int | None) -> None:
    """Check that a completion has one set for each sampled token, and that the sets follow the rules of the filters.

    Args:
        vocab_size: number of logits of the model; None if the caller does not know it.

    Raises:
        ProofError: there are sets without a filter, or no sets with a filter; their number is wrong; the ids of a set
            are not ascending or not in the vocabulary; a sampled token is outside its set; a set is larger than the
            filters allow; a set has one id, and the log-prob of this id is not 0.
        InputError: a filter kept more ids than `max_kept_ids` for a token. The engine has then left the set empty.
    """
    kept = answer.kept_ids
    if kept is None:
        if sampling.is_filtered:
            raise _kept_ids_error(answer, "does not report which ids its top-k, top-p or min-p kept")
        return
    if not sampling.is_filtered:
        raise _kept_ids_error(answer, "has kept ids, but its sampling settings have no filter")
    if len(kept) != len(answer.sampled_places):
        raise _kept_ids_error(
            answer, f"has {len(answer.sampled_places)} sampled tokens and {len(kept)} sets of kept ids"
        )
    sizes = kept.sizes
    if not sizes.all() or sizes.max() > sampling.max_kept_ids:
        raise InputError(
            f"request {answer.key}: the filters kept more than max_kept_ids={sampling.max_kept_ids} ids for "
            "one token. Set top_k too, which bounds the sets, or raise max_kept_ids"
        )
    _check_ids(answer, kept, vocab_size)
    _check_rules(sampling, answer, kept)


def _check_ids(answer: Completion, kept: KeptIds, vocab_size: int | None) -> None:
    if kept.ids.min() < 0 or (vocab_size is not None and kept.ids.max() >= vocab_size):
        raise _kept_ids_error(
            answer, f"has kept ids from {kept.ids.min()} to {kept.ids.max()}, outside the vocabulary"
        )
    is_ascending = np.diff(kept.ids) > 0
    is_ascending[kept.ends[:-1] - 1] = True
    if not is_ascending.all():
        raise _kept_ids_error(answer, "has a set of kept ids that are not ascending")
    own = kept.ids == np.repeat(chosen(answer.token_ids, answer.sampled), kept.sizes)
    outside = np.flatnonzero(~np.logical_or.reduceat(own, kept.ends - kept.sizes))
    if len(outside):
        raise _kept_ids_error(
            answer,
            f"has {len(outside)} tokens outside their own set of kept ids; the first one is token {outside[0]}",
        )


def _check_rules(sampling: Sampling, answer: Completion, kept: KeptIds) -> None:
    sizes, logprobs = kept.sizes, answer.sampled_logprobs.astype(np.float64)
    if sampling.top_k and sizes.max() > sampling.top_k + max(_TIES, _SHARE_OF_TIES * sampling.top_k):
        raise _kept_ids_error(answer, f"has a set of {sizes.max()} kept ids, with top_k={sampling.top_k}")
    if (np.abs(logprobs[sizes == 1]) > _ROUNDING).any():
        raise _kept_ids_error(answer, "has a set of one kept id, and the log-prob of that id is not 0")
    if sampling.min_p > 0 and (logprobs < np.log(sampling.min_p / sizes) - _ROUNDING).any():
        # The most probable of n kept ids has a probability of at least 1 / n.
        raise _kept_ids_error(answer, f"has a token that is less likely than min_p={sampling.min_p} allows")


def _kept_ids_error(answer: Completion, found: str) -> ProofError:
    return ProofError(
        "kept_ids",
        f"request {answer.key} {found}",
        "the engine did not apply the filters of the request, lost its record of the kept ids, or mixed up requests",
        "start the engine as Lockstep starts it, on vLLM's first model runner (VLLM_USE_V2_MODEL_RUNNER=0); "
        "if it was started so, this is a defect of the engine or of its adapter: do not train on it; report "
        "it with this message",
    )
