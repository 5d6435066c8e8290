"""`lockstep verify --self-test`: tests the proofs themselves, with the faults that they should catch.

Each fault is injected into the running stage. Then the trainer takes steps. If a step has no reason to stop, the check of
`lockstep verify` that the fault names runs next. A fault that is not caught is a failure of Lockstep.

Many of the faults are then injected into real runs that use their generations in other ways (`WAYS`): several steps per generation,
or generations ahead. There a fault begins in the middle of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.errors import InputError, ProofError
from lockstep.parity.sampling.draws import DrawEvidence
from lockstep.verify.draw_checks import many_draws
from lockstep.verify.faults import (
    adapters,
    backward,
    conversations,
    draws,
    ends,
    evaluation,
    filters,
    learned,
    learning,
    logprobs,
    losses,
    pictures,
    quantised,
    settings,
    steps,
    tokens,
    weights,
)
from lockstep.verify.faults.seams import Fault
from lockstep.verify.run import CHECKS, recover
from lockstep.verify.stage import Stage

FAULTS = (
    *tokens.FAULTS,
    *conversations.FAULTS,
    *weights.FAULTS,
    *logprobs.FAULTS,
    *filters.FAULTS,
    *steps.FAULTS,
    *draws.FAULTS,
    *ends.FAULTS,
    *losses.FAULTS,
    *backward.FAULTS,
    *learned.FAULTS,
    *learning.FAULTS,
    *settings.FAULTS,
    *evaluation.FAULTS,
)

_CONTROL = Fault("-", "nothing: a control", lambda stage: nullcontext())
_EVALUATED = replace(_CONTROL, what="nothing, at an evaluation: a control", evaluates=True)
# They need a stage whose prompts show pictures.
PICTURE_FAULTS = pictures.FAULTS
# They need a stage whose engine gets an adapter alone.
ADAPTER_FAULTS = adapters.FAULTS
# They need a stage whose engine holds the weights in 8 bits.
QUANTISED_FAULTS = quantised.FAULTS

# A fault that is small in one token needs more of them than `lockstep verify` samples.
_CHECKS = {**CHECKS, "draws": many_draws}
# Number of steps in which a fault can be caught.
_STEPS = 3


@dataclass(frozen=True, slots=True)
class Way:
    """A way in which a run uses its generations, other than one step per generation.

    Attributes:
        name: the way in words.
        changes: the fields of the run, beside those of every verification (`verify/sizes.py`).
        clean: optimizer steps before the fault begins. It then begins in the middle of the run.
        steps: optimizer steps of the run.
    """

    name: str
    changes: Mapping[str, int | float]
    clean: int
    steps: int


# The policy must move between the steps of a generation, and between the generations.
_MOVES = {"learning_rate": 1e-3}
WAYS = (
    # The fault begins at the second step of the first generation.
    Way(
        "several steps per generation",
        _MOVES | {"per_device_train_batch_size": 6, "steps_per_generation": 2},
        clean=1,
        steps=6,
    ),
    # The fault begins at the first generation whose every token is older than the weights that learn from it.
    Way("max_staleness 2", _MOVES | {"max_staleness": 2}, clean=2, steps=6),
)
# The optimizer does not know how a generation is used, and filters and conversations are the program's, from a run's start on.
_OF_RUNS = (tokens, weights, logprobs, steps, ends, losses, learned)


def faults_of_runs() -> tuple[Fault, ...]:
    """The faults that a run must catch in every way of using its generations.

    They are those of the engine's answers, of its weights, and of what the loss is made of. Left out are faults that only a check
    of `lockstep verify` catches, those of the optimizer, and those of filters and conversations.
    """
    return tuple(fault for module in _OF_RUNS for fault in module.FAULTS if fault.check is None and not fault.learns)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one fault.

    Attributes:
        caught_by: the proof that stopped it; empty if none did.
        message: the message of that proof.
        tokens: number of tokens that the engine had answered by then.
        steps: number of optimizer steps that were completed; in a run, since the fault began.
        skipped: why the fault cannot happen here, or empty.
        way: how the run used its generations; empty: one step per generation.
    """

    id: str
    what: str
    caught_by: str = ""
    message: str = ""
    tokens: int = 0
    steps: int = 0
    skipped: str = ""
    way: str = ""


def run_self_test(stage: Stage, progress: Callable[[str], None], faults: tuple[Fault, ...] = FAULTS) -> list[Verdict]:
    """The results without a fault and with each fault. The stage's weights are restored afterwards."""
    progress("nothing injected")
    with stage.kept_weights():
        # The control: a proof that stops a step without a fault is a false alarm.
        control = _put_to_the_test(stage, _CONTROL)
        verdicts = [control if control.caught_by else _put_to_the_test(stage, _EVALUATED)]
    for fault in faults:
        progress(f"{fault.id} {fault.what}")
        reason = fault.needs(stage)
        if reason:
            verdicts.append(Verdict(fault.id, fault.what, skipped=reason))
            continue
        with stage.kept_weights():
            verdicts.append(_put_to_the_test(stage, fault))
        recover(stage)
    return verdicts


def _put_to_the_test(stage: Stage, fault: Fault) -> Verdict:
    taken, answered = 0, 0
    with ExitStack() as stack:
        counted = stack.enter_context(stage.counted_tokens())
        # The evidence of a run: what one fault has left must not count against the next.
        for name in ("_draws", "_evaluated"):
            stack.enter_context(patch.object(stage.trainer.proofs, name, DrawEvidence()))
        stack.enter_context(fault.inject(stage))
        try:
            if fault.learns:
                stage.learn(_STEPS)
            for _ in range(_STEPS):
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
                    return Verdict(fault.id, fault.what, f"verify: {fault.check}", failed[0].figure, counted(), taken)
        except ProofError as error:
            done = stage.trainer.state.global_step if fault.learns else taken
            return Verdict(fault.id, fault.what, error.check, error.found, counted(), done)
        except InputError as error:
            return Verdict(fault.id, fault.what, skipped=f"it cannot be injected here: {error}")
        answered = counted()
    return Verdict(fault.id, fault.what, tokens=answered, steps=taken)


def run_in_runs(
    stage: Stage, way: Way, progress: Callable[[str], None], faults: Sequence[Fault] | None = None
) -> list[Verdict]:
    """The results without a fault and with each fault, in real runs. The stage's weights are restored afterwards.

    Args:
        stage: made with the fields of the way.
        faults: None: those of `faults_of_runs`.
    """
    verdicts = []
    for fault in (_CONTROL, *(faults_of_runs() if faults is None else faults)):
        progress(f"{way.name}: {fault.id} {fault.what}")
        reason = fault.needs(stage)
        if reason:
            verdicts.append(Verdict(fault.id, fault.what, skipped=reason, way=way.name))
            continue
        with stage.kept_weights():
            verdicts.append(_in_a_run(stage, fault, way))
        recover(stage)
    return verdicts


def _in_a_run(stage: Stage, fault: Fault, way: Way) -> Verdict:
    with ExitStack() as stack:
        counted = stack.enter_context(stage.counted_tokens())
        try:
            stage.learn(way.steps, after=way.clean, begin=lambda: stack.enter_context(fault.inject(stage)))
        except ProofError as error:
            done = stage.version - way.clean
            return Verdict(fault.id, fault.what, error.check, error.found, counted(), done, way=way.name)
        except InputError as error:
            return Verdict(fault.id, fault.what, skipped=f"it cannot be injected here: {error}", way=way.name)
        return Verdict(fault.id, fault.what, tokens=counted(), steps=stage.version - way.clean, way=way.name)


def print_verdicts(verdicts: list[Verdict], console: Console, file: str | None) -> int:
    """Print the table and "N injected, N caught", and write the JSON file. Returns the exit code."""
    table = Table(box=None, pad_edge=False)
    for name in ("fault", "injected", "caught by", "after"):
        table.add_column(name, overflow="fold")
    controls, faults = ([v for v in verdicts if (v.id == _CONTROL.id) is control] for control in (True, False))
    way = ""
    for v in faults:
        if v.way != way:
            table.add_row("", f"[bold]{escape(v.way)}", "", "")
            way = v.way
        caught = f"[dim]left out: {escape(v.skipped)}" if v.skipped else v.caught_by or "[bold red]NOTHING"
        table.add_row(v.id, escape(v.what), caught, "" if v.skipped else f"{v.steps} steps, {v.tokens} tokens")
    console.print(table)
    injected = [v for v in faults if not v.skipped]
    stopped = sum(bool(v.caught_by) for v in injected)
    alarms = [v for v in controls if v.caught_by]
    passed = stopped == len(injected) and not alarms
    console.print(f"\n{len(injected)} injected, {stopped} caught", highlight=False)
    for control in alarms:
        console.print(
            f"[bold red]false alarm[/]: without a fault, {control.caught_by} said: {escape(control.message)}",
            highlight=False,
        )
    if file:
        content = {"passed": passed, "injected": len(injected), "caught": stopped}
        Path(file).write_text(json.dumps({**content, "faults": [asdict(v) for v in verdicts]}, indent=1) + "\n")
    return 0 if passed else 1
