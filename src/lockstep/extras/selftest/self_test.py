"""`lockstep verify --self-test`: tests the proofs themselves, with the faults that they should catch.

Each fault is injected into the running stage. Then the trainer takes steps. If a step has no reason to stop, the
check of `lockstep verify` that the fault names runs next. A fault that is not caught is a failure of Lockstep. So is
a fault that ends in another error than that of a proof: the error stands in its row, and the next faults are injected
all the same.

Many of the faults are then injected into real runs that use their generations in other ways (`WAYS`): several steps
per generation, or generations ahead. There a fault begins in the middle of the run.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from lockstep.errors import Interrupted, LockstepError, ProofError
from lockstep.extras.selftest.backward_faults import BACKWARD_FAULTS
from lockstep.extras.selftest.draw_faults import DRAW_FAULTS
from lockstep.extras.selftest.loss_faults import LEARNED_FAULTS, LOSS_FAULTS
from lockstep.extras.selftest.optimizer_faults import OPTIMIZER_FAULTS, STEP_FAULTS
from lockstep.extras.selftest.prompt_faults import PROMPT_FAULTS
from lockstep.extras.selftest.rollout_faults import CONVERSATION_FAULTS, END_FAULTS, TOKEN_FAULTS
from lockstep.extras.selftest.run_faults import EVALUATION_FAULTS, SETTING_FAULTS
from lockstep.extras.selftest.sampling_faults import FILTER_FAULTS, LOGPROB_FAULTS
from lockstep.extras.selftest.seams import REACH, Fault
from lockstep.extras.selftest.weight_faults import WEIGHT_FAULTS
from lockstep.extras.verify.logprob_checks import many_draws
from lockstep.extras.verify.run_checks import CHECKS, restore
from lockstep.extras.verify.stage import Stage
from lockstep.files import replace_text
from lockstep.terminal import Terminal
from lockstep.watch.gap import PooledGap

FAULTS = (
    *TOKEN_FAULTS,
    *CONVERSATION_FAULTS,
    *WEIGHT_FAULTS,
    *LOGPROB_FAULTS,
    *FILTER_FAULTS,
    *STEP_FAULTS,
    *DRAW_FAULTS,
    *END_FAULTS,
    *LOSS_FAULTS,
    *BACKWARD_FAULTS,
    *LEARNED_FAULTS,
    *OPTIMIZER_FAULTS,
    *SETTING_FAULTS,
    *PROMPT_FAULTS,
    *EVALUATION_FAULTS,
)

_CONTROL = Fault("-", "nothing: a control", lambda stage: nullcontext())
_EVALUATED = replace(_CONTROL, what="nothing, at an evaluation: a control", evaluates=True)

# A fault that is small in one token needs more of them than `lockstep verify` samples.
_CHECKS = {**CHECKS, "draws": many_draws}
# The exit code of a self-test in which every injected fault was caught, and some were not really injected.
_NOT_INJECTED = 3
# Number of steps in which a fault can be caught.
_STEPS = 3
# In half precision, proofs judge the means of 256 tokens at a time (`PooledGap`). There a fault can be caught until
# the engine has answered this many tokens since it began, or until this many steps were taken.
_TOKENS, _MOST_STEPS = 3 * PooledGap.enough, 40
# The learning rates that runs may have. The first one is taken that moves the policy's log-probs by this many times
# the limit on the mean gap, from when a fault begins to the end of the run. Else older weights give the same
# log-probs, up to rounding.
RATES, _VISIBLE = (1e-3, 3e-3, 1e-2, 3e-2), 12


@dataclass(frozen=True, slots=True)
class Way:
    """A way in which a run uses its generations, other than one step per generation.

    Attributes:
        name: the way in words.
        changes: the fields of the run, beside those of every verification (`extras/verify/sizes.py`) and the learning
            rate.
        clean: optimizer steps before the fault begins. It then begins in the middle of the run.
        steps: optimizer steps of the run. In half precision there are more.
    """

    name: str
    changes: Mapping[str, int | float]
    clean: int
    steps: int = 6


WAYS = (
    # The fault begins at the second step of the first generation.
    Way(
        "several steps per generation", {"per_device_train_batch_size": 6, "steps_per_generation": 2}, clean=1
    ),
    # The fault begins at the first generation whose every token is older than the weights that learn from it.
    Way("max_staleness 2", {"max_staleness": 2}, clean=2),
)
# Opens a stage with some changed fields of the run.
OpenStage = Callable[[Mapping[str, int | float]], AbstractContextManager[Stage]]
# Is told in words what happens next.
Progress = Callable[[str], None]
# The optimizer does not know how a generation is used, and filters and conversations are the program's, from a run's
# start on.
_OF_RUNS = (TOKEN_FAULTS, WEIGHT_FAULTS, LOGPROB_FAULTS, STEP_FAULTS, END_FAULTS, LOSS_FAULTS, LEARNED_FAULTS)


def faults_of_runs() -> tuple[Fault, ...]:
    """The faults that a run must catch in every way of using its generations.

    They are those of the engine's answers, of its weights, and of what the loss is made of. Left out are faults that
    only a check of `lockstep verify` catches, those of the optimizer, and those of filters and conversations.
    """
    return tuple(fault for faults in _OF_RUNS for fault in faults if fault.check is None and not fault.learns)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one fault.

    Attributes:
        caught_by: the proof that stopped it; empty if none did.
        message: the message of that proof; with `error`, the traceback; of a control in runs, how far the policy moved.
        tokens: number of tokens that the engine had answered by then.
        steps: number of optimizer steps that were completed; in a run, since the fault began.
        skipped: why the fault cannot happen here, or empty.
        way: how the run used its generations; empty: one step per generation.
        moved: in a run that nothing stopped, how far the log-probs of the prompts' tokens moved since the fault
            began: the mean, in nats.
        error: why nothing is known of the fault: it could not be injected, or an error other than a proof's ended the
            steps.
        unreached: whether the engine has never called what the fault has put into it. Nothing is known of the proof
            then.
    """

    id: str
    what: str
    caught_by: str = ""
    message: str = ""
    tokens: int = 0
    steps: int = 0
    skipped: str = ""
    way: str = ""
    moved: float = 0.0
    error: str = ""
    unreached: bool = False


def run_self_test(stage: Stage, progress: Progress, faults: Sequence[Fault] = FAULTS) -> Iterator[Verdict]:
    """The results without a fault and with each fault, each as soon as known. The stage's weights are restored."""
    # The controls: a proof that stops a step without a fault is a false alarm.
    controls = list(_each_fault(stage, (_CONTROL, _EVALUATED), _put_to_the_test, progress))
    yield next((c for c in controls if c.caught_by or c.error), controls[-1])
    yield from _each_fault(stage, faults, _put_to_the_test, progress)


def run_in_runs(
    open_with: OpenStage, way: Way, progress: Progress, faults: Sequence[Fault] | None = None
) -> Iterator[Verdict]:
    """The results without a fault and with each fault (None: `faults_of_runs`), in real runs, each as soon as known."""
    for rate in RATES:
        progress(f"{way.name}: nothing injected, at a learning rate of {rate:g}")
        with open_with({**way.changes, "learning_rate": rate}) as stage:
            control = verdict_of(stage, _CONTROL, partial(_in_a_run, way), way.name)
            if not (control.caught_by or control.error):
                times = control.moved / stage.trainer.proofs.limit.mean
                if times < _VISIBLE and rate < RATES[-1]:
                    continue
                moved = f"{control.moved:.2g} nats on average, {times:.2g} times the limit on a gap"
                control = replace(control, message=f"the policy moved by {moved} (learning rate {rate:g})")
            injected = faults_of_runs() if faults is None else faults
            yield control
            yield from _each_fault(stage, injected, partial(_in_a_run, way), progress, way.name)
            return
    raise AssertionError("the last learning rate is always taken")


@contextmanager
def rows_kept(verdicts: list[Verdict], part: str) -> Iterator[None]:
    """A block that adds verdicts. If it ends in an error, the error is a row, and the rows before it are not lost."""
    with _caught() as errors:
        yield
    verdicts += [_failed(replace(_verdict_on(_CONTROL), way=part), error, "not begun: ") for error in errors]


@contextmanager
def _caught() -> Iterator[list[Exception]]:
    """A block whose error, of any kind, ends up in the list.

    The table of the self-test is worth more than its next row.
    """
    errors: list[Exception] = []
    try:
        yield errors
    except Interrupted:
        raise
    except Exception as error:  # noqa: BLE001 - a fault reaches into other programs, which may raise anything
        errors.append(error)


# Takes steps with a fault, and says which proof has stopped them.
_Attempt = Callable[[Stage, Fault, "_Injection"], Verdict]


class _Injection:
    """Injects a fault at most once, and takes it back at the end of its context.

    The context is the innermost one: a fault may take the place of what the contexts around it have changed.
    """

    def __init__(self, stage: Stage, fault: Fault) -> None:
        self._stage, self._fault, self._stack = stage, fault, ExitStack()
        self.has_begun = False

    def begin(self) -> None:
        REACH.calls = None
        self._stack.enter_context(self._fault.inject(self._stage))
        self.has_begun = True

    @property
    def is_reached(self) -> bool:
        """Whether the engine has called what the fault has put into it, where the fault counts that."""
        return REACH.calls != 0

    def __enter__(self) -> _Injection:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def _each_fault(
    stage: Stage, faults: Sequence[Fault], attempt: _Attempt, progress: Progress, way: str = ""
) -> Iterator[Verdict]:
    for fault in faults:
        progress(f"{way}: {fault.id} {fault.what}" if way else f"{fault.id} {fault.what}")
        yield verdict_of(stage, fault, attempt, way)


def verdict_of(stage: Stage, fault: Fault, attempt: _Attempt, way: str = "") -> Verdict:
    """The verdict on one fault. Whatever is raised becomes a part of it. The stage's weights are restored."""
    verdict, injection = replace(_verdict_on(fault), way=way), _Injection(stage, fault)
    with _caught() as errors:
        if reason := fault.needs(stage):
            return replace(verdict, skipped=reason)
        stage.trainer.proofs.forget_evidence()
        with stage.kept_weights():
            found = replace(attempt(stage, fault, injection), way=way)
            return replace(found, unreached=not found.caught_by and not injection.is_reached)
    return _failed(verdict, errors[0], "raised " if injection.has_begun else "not injected: ")


def _restore(stage: Stage) -> None:
    """Restore the engine. Else a proof that stops because of the fault before would seem to catch this fault."""
    with _caught() as errors:
        restore(stage)
    if errors:
        found = f"the engine cannot be restored after the fault before: {_named(errors[0])}"
        raise LockstepError(found) from errors[0]


def _failed(verdict: Verdict, error: Exception, how: str) -> Verdict:
    return replace(verdict, error=how + _named(error), message="".join(traceback.format_exception(error)))


def _named(error: Exception) -> str:
    if isinstance(error, ProofError):
        return f"{error.check}: {error.found}"
    return f"{type(error).__name__}: {error}"


def _verdict_on(fault: Fault) -> Verdict:
    return Verdict(fault.id, fault.what)


def _put_to_the_test(stage: Stage, fault: Fault, injection: _Injection) -> Verdict:
    taken, verdict = 0, _verdict_on(fault)
    _restore(stage)
    with stage.counted_tokens() as counted, injection:
        injection.begin()
        try:
            if fault.learns:
                stage.learn(_STEPS)
            while taken < _STEPS or (fault.check is None and _goes_on(stage, taken, counted())):
                stage.move(stage.scale)
                if fault.evaluates:
                    stage.evaluate()
                else:
                    stage.step()
                taken += 1
            if stage.config.vllm_quantization is not None:
                # The start of a run proves an engine in 8 bits more exactly than a step can.
                stage.trainer.proofs.prove_engine(stage.version)
            if fault.check is not None:
                failed = [row for row in _CHECKS[fault.check](stage) if not row.passed]
                if failed:
                    verdict = replace(verdict, caught_by=f"verify: {fault.check}", message=failed[0].figure)
        except ProofError as error:
            done = stage.trainer.state.global_step if fault.learns else taken
            return replace(verdict, caught_by=error.check, message=error.found, tokens=counted(), steps=done)
        return replace(verdict, tokens=counted(), steps=taken)


def _goes_on(stage: Stage, taken: int, tokens: int) -> bool:
    """Whether the proofs have not judged enough tokens yet."""
    return stage.trainer.proofs.limit.is_coarse and tokens < _TOKENS and taken < _MOST_STEPS


def _in_a_run(way: Way, stage: Stage, fault: Fault, injection: _Injection) -> Verdict:
    """The verdict on a fault that begins in the middle of a run."""
    verdict, before, answered = _verdict_on(fault), torch.empty(0), 0
    is_coarse = stage.trainer.proofs.limit.is_coarse

    def begin() -> None:
        nonlocal before, answered
        before, answered = stage.prompt_logps(), counted()
        injection.begin()

    with stage.counted_tokens() as counted, injection:
        try:
            stage.learn(
                _MOST_STEPS if is_coarse else way.steps,
                after=way.clean,
                begin=begin,
                is_enough=lambda: is_coarse and injection.has_begun and counted() - answered >= _TOKENS,
            )
        except ProofError as error:
            if not injection.has_begun:
                # The start of the run has proven that the fault before left something, or this is a false alarm.
                raise
            done = stage.version - way.clean
            return replace(verdict, caught_by=error.check, message=error.found, tokens=counted(), steps=done)
        moved = float((stage.prompt_logps() - before).abs().mean())
        return replace(verdict, tokens=counted(), steps=stage.version - way.clean, moved=moved)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a self-test has found: how many faults were injected, were caught by a proof, or ended in an error."""

    injected: int
    caught: int
    errors: int
    # Faults that the engine has never met. They are not among the injected ones.
    unreached: int
    # Whether a fault that was injected was not caught, or ended in an error, or a control was caught.
    blind: bool
    passed: bool


def counts_of(verdicts: Sequence[Verdict]) -> Counts:
    """The counts so far. They pass without a miss, an error and a false alarm."""
    faults = [v for v in verdicts if v.id != _CONTROL.id]
    injected = [v for v in faults if not v.skipped and not v.error and not v.unreached]
    caught, errors = sum(bool(v.caught_by) for v in injected), sum(bool(v.error) for v in faults)
    alarms = any(v.caught_by or v.error for v in verdicts if v.id == _CONTROL.id)
    blind, unreached = caught < len(injected) or errors > 0 or alarms, sum(v.unreached for v in faults)
    return Counts(len(injected), caught, errors, unreached, blind, not blind and not unreached)


def write_verdicts(verdicts: Sequence[Verdict], file: str | None, *, ended: bool) -> None:
    """Write the JSON file, if one is asked for. Nothing has passed before all verdicts are known (`ended`)."""
    if file:
        counts = asdict(counts_of(verdicts))
        content = {**counts, "passed": ended and counts["passed"], "ended": ended}
        content["faults"] = [asdict(v) for v in verdicts]
        replace_text(Path(file), json.dumps(content, indent=1) + "\n")


def print_verdicts(verdicts: list[Verdict], console: Terminal, file: str | None) -> int:
    """Print the table and "N injected, N caught", and write the JSON file.

    Returns:
        The exit code: 0 if all passed, 3 if nothing is wrong but some faults were not really injected, otherwise 1.
    """
    table = Table(box=None, pad_edge=False)
    for name in ("fault", "injected", "caught by", "after"):
        table.add_column(name, overflow="fold")
    way = ""
    for v in (v for v in verdicts if v.id != _CONTROL.id):
        if v.way != way:
            table.add_row("", f"[bold]{escape(v.way)}", "", "")
            way = v.way
        table.add_row(v.id, escape(v.what), *_cells(v))
    console.print(table)
    counts = counts_of(verdicts)
    wrong = f", {counts.errors} ended in an error" if counts.errors else ""
    missed = f", {counts.unreached} not injected" if counts.unreached else ""
    console.print(f"\n{counts.injected} injected, {counts.caught} caught{wrong}{missed}", highlight=False)
    for control in (v for v in verdicts if v.id == _CONTROL.id):
        where, message = f"{escape(control.way)}: " if control.way else "", escape(control.message)
        if control.caught_by:
            said = f"[bold red]false alarm[/]: {where}without a fault, {control.caught_by} said: {message}"
        elif control.error:
            said = f"[bold red]error[/]: {where}without a fault: {escape(control.error)}"
        elif control.message:
            said = f"[dim]{where}{message}"
        else:
            continue
        console.print(said, highlight=False)
    write_verdicts(verdicts, file, ended=True)
    return 0 if counts.passed else 1 if counts.blind else _NOT_INJECTED


def _cells(verdict: Verdict) -> tuple[str, str]:
    """What the table says of a fault: which proof caught it, and after how much."""
    if verdict.skipped:
        return f"[dim]left out: {escape(verdict.skipped)}", ""
    if verdict.error:
        return f"[bold red]{escape(verdict.error)}", ""
    if verdict.unreached:
        return "[bold yellow]not injected: the engine never called what the fault has changed", ""
    return verdict.caught_by or "[bold red]NOTHING", f"{verdict.steps} steps, {verdict.tokens} tokens"
