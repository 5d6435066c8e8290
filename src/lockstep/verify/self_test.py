"""`lockstep verify --self-test`: tests the proofs themselves, with the faults that they should catch.

Each fault is injected into the running stage. Then the trainer takes steps. If a step has no reason to stop, the check of
`lockstep verify` that the fault names runs next. A fault that is not caught is a failure of Lockstep.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.errors import InputError, ProofError
from lockstep.verify.faults import logprobs, steps, tokens, weights
from lockstep.verify.faults.seams import Fault
from lockstep.verify.run import CHECKS, recover
from lockstep.verify.stage import Stage

FAULTS = (*tokens.FAULTS, *weights.FAULTS, *logprobs.FAULTS, *steps.FAULTS)

_CONTROL = Fault("-", "nothing: a control", lambda stage: nullcontext())
# Number of steps in which a fault can be caught.
_STEPS = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one fault.

    Attributes:
        caught_by: the proof that stopped it; empty if none did.
        message: the message of that proof.
        tokens: number of tokens that the engine had answered by then.
        steps: number of optimizer steps that were completed.
        skipped: why the fault cannot happen here, or empty.
    """

    id: str
    what: str
    caught_by: str = ""
    message: str = ""
    tokens: int = 0
    steps: int = 0
    skipped: str = ""


def run_self_test(stage: Stage, progress: Callable[[str], None], faults: tuple[Fault, ...] = FAULTS) -> list[Verdict]:
    """The results without a fault and with each fault. The stage's weights are restored afterwards."""
    progress("nothing injected")
    with stage.kept_weights():
        # The control: a proof that stops a step without a fault is a false alarm.
        verdicts = [_put_to_the_test(stage, _CONTROL)]
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
        stack.enter_context(fault.inject(stage))
        try:
            for _ in range(_STEPS):
                stage.move(stage.scale)
                stage.step()
                taken += 1
            if fault.check is not None:
                failed = [row for row in CHECKS[fault.check](stage) if not row.passed]
                if failed:
                    return Verdict(fault.id, fault.what, f"verify: {fault.check}", failed[0].figure, counted(), taken)
        except ProofError as error:
            return Verdict(fault.id, fault.what, error.check, error.found, counted(), taken)
        except InputError as error:
            return Verdict(fault.id, fault.what, skipped=f"it cannot be injected here: {error}")
        answered = counted()
    return Verdict(fault.id, fault.what, tokens=answered, steps=taken)


def print_verdicts(verdicts: list[Verdict], console: Console, file: str | None) -> int:
    """Print the table and "N injected, N caught", and write the JSON file. Returns the exit code."""
    table = Table(box=None, pad_edge=False)
    for name in ("fault", "injected", "caught by", "after"):
        table.add_column(name, overflow="fold")
    control, faults = verdicts[0], verdicts[1:]
    for v in faults:
        caught = f"[dim]left out: {escape(v.skipped)}" if v.skipped else v.caught_by or "[bold red]NOTHING"
        table.add_row(v.id, escape(v.what), caught, "" if v.skipped else f"{v.steps} steps, {v.tokens} tokens")
    console.print(table)
    injected = [v for v in faults if not v.skipped]
    stopped = sum(bool(v.caught_by) for v in injected)
    passed = stopped == len(injected) and not control.caught_by
    console.print(f"\n{len(injected)} injected, {stopped} caught", highlight=False)
    if control.caught_by:
        console.print(
            f"[bold red]false alarm[/]: without a fault, {control.caught_by} said: {escape(control.message)}",
            highlight=False,
        )
    if file:
        content = {"passed": passed, "injected": len(injected), "caught": stopped}
        Path(file).write_text(json.dumps({**content, "faults": [asdict(v) for v in verdicts]}, indent=1) + "\n")
    return 0 if passed else 1
