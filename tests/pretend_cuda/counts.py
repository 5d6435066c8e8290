"""Counts what keeps a GPU from working: where the host waits for it, and what a push copies over the host.

`make gpu-counts` runs this file: it trains on the pretend GPU, prints a table of what is asked and what was counted,
and the places of each row that is over. `test_runs.py` holds each row. Seconds cannot be counted here.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Places = Counter[str]
# The models of the two runs, which differ in their numbers of tensors alone.
FEW, MANY = "text", "deep"
# With this seed the model's backward is proven at the first step in both ways: by a drawn sum, and by a part of the
# step.
_SEED = 40
_FIELDS = {"per_device_train_batch_size": 8, "max_steps": 2, "seed": _SEED}
PROOF = "the proof of the model's backward"
BEFORE, INSIDE, AFTER = "before the backward", "inside the backward", "after the backward"


class Event(NamedTuple):
    """Equal waits or copies.

    Attributes:
        kind: as in `log.py`.
        step, phase, part: what the run did: the optimizer step from 0, the phase of its clock, and what in it.
        count, size: how many there were, and their bytes.
    """

    kind: str
    place: str
    step: int
    phase: str
    part: str
    count: int
    size: int


@dataclass(frozen=True)
class Counted:
    """What one run counted.

    Attributes:
        packs: that were learned from.
        tokens: rounds of decoding, one token of each row.
        pushes: of weights into the engine, by step.
        tensors: of the model.
    """

    events: list[Event]
    packs: int
    tokens: int
    pushes: list[int]
    tensors: int

    @classmethod
    def read(cls, found: dict[str, Any]) -> Counted:
        """From what `counted` gave, as JSON."""
        events = [Event(*event) for event in found["events"]]
        return cls(events, found["packs"], found["tokens"], found["pushes"], found["tensors"])

    def waits(self, wanted: Callable[[Event], bool]) -> Places:
        """The waits by place."""
        from pretend_cuda import WAITS

        places: Places = Counter()
        for event in self.events:
            if event.kind in WAITS and wanted(event):
                places[f"{event.place} ({event.kind}, {event.part or event.phase or 'between phases'})"] += (
                    event.count
                )
        return places

    def of_worst_step(self, wanted: Callable[[Event], bool]) -> Places:
        """The waits of the step that has the most of them."""
        steps = sorted({event.step for event in self.events})
        of_steps = [
            self.waits(lambda event, step=step: event.step == step and wanted(event)) for step in steps
        ]  # type: ignore[misc]
        return max(of_steps, key=Counter.total)

    def of_last_push(self) -> list[Event]:
        """The events of the pushes of the last step that has one."""
        last = max(step for step, count in enumerate(self.pushes) if count)
        return [event for event in self.events if event.step == last and event.phase == "sync"]


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        most: the number that is asked.
        count: gives the number, and the places that it is made of, from the runs with few and with many tensors.
    """

    what: str
    most: float
    count: Callable[[Counted, Counted], tuple[float, Places]]


def _learning(event: Event) -> bool:
    return event.phase == "forward_backward" and event.part != PROOF


def _proofs(event: Event) -> bool:
    return event.phase == "verify" and event.part != PROOF


def _backward_proof(event: Event) -> bool:
    return event.part == PROOF


def _of_learning(parts: tuple[str, ...]) -> Callable[[Counted, Counted], tuple[float, Places]]:
    def count(few: Counted, many: Counted) -> tuple[float, Places]:
        places = few.waits(lambda event: _learning(event) and event.part in parts)
        return places.total() / few.packs, places

    return count


def _of_worst(
    wanted: Callable[[Event], bool], which: int
) -> Callable[[Counted, Counted], tuple[float, Places]]:
    def count(*runs: Counted) -> tuple[float, Places]:
        places = runs[which].of_worst_step(wanted)
        return places.total(), places

    return count


def _growth(wanted: Callable[[Event], bool]) -> Callable[[Counted, Counted], tuple[float, Places]]:
    def count(few: Counted, many: Counted) -> tuple[float, Places]:
        less, more = few.of_worst_step(wanted), many.of_worst_step(wanted)
        return max(more.total() - less.total(), 0), more - less

    return count


def _of_push(few: Counted, many: Counted) -> tuple[float, Places]:
    events = many.of_last_push()
    places = many.waits(lambda event: event in events)
    return places.total() / max(many.pushes[events[0].step], 1), places


def _bytes_of_push(few: Counted, many: Counted) -> tuple[float, Places]:
    places: Places = Counter()
    for event in many.of_last_push():
        if event.kind.startswith("d2h"):
            places[f"{event.place} ({event.kind}, bytes)"] += event.size
    return places.total() / many.tensors, places


def _of_token(few: Counted, many: Counted) -> tuple[float, Places]:
    places = few.waits(lambda event: event.phase == "generate")
    return places.total() / few.tokens, places


ROWS = (
    Row("waits per pack, while it is learned from", 7, _of_learning((BEFORE, INSIDE, AFTER, "between"))),
    Row("waits per pack, before its backward is launched", 0, _of_learning((BEFORE, "between"))),
    Row("waits per pack, inside its backward", 0, _of_learning((INSIDE,))),
    Row("waits per step of all proofs but that of the backward, few tensors", 40, _of_worst(_proofs, 0)),
    Row("waits per step of all proofs but that of the backward, many tensors", 40, _of_worst(_proofs, 1)),
    Row("waits per step that these proofs have more with many tensors", 0, _growth(_proofs)),
    Row("waits of the proof of the backward, few tensors", 100, _of_worst(_backward_proof, 0)),
    Row("waits of the proof of the backward, many tensors", 100, _of_worst(_backward_proof, 1)),
    Row("waits that this proof has more with many tensors", 0, _growth(_backward_proof)),
    Row("waits per push into the engine of this process", 2, _of_push),
    # A digest of 16 bytes from each end.
    Row("bytes per tensor that such a push copies to the host", 32, _bytes_of_push),
    Row("waits per token of the transformers engine, 16 rows", 3, _of_token),
)


# Kernels of a layer that are asked, by the pack: completions x their tokens + tokens of the prompt.
KERNELS = {"8 x 480 + 256": 160, "64 x 60 + 200": 180}


def of_other_runs(
    ipc: dict[str, Any], digests: dict[str, Any], launches: dict[str, Any]
) -> list[tuple[str, float, float]]:
    """Of pushes to servers, and of a layer's kernels: what, the number that is asked, and the largest that was counted.

    Args:
        ipc: the run of `ipc.py`, between two processes.
        digests: the run of `digests.py`. Its push over NCCL has both ends in one process.
        launches: the run of `launches.py`.
    """
    # A push that is repeated with all weights is two pushes for the trainer.
    trainer = max(
        push["trainer"]["crossed"] / push["tensors"] / (2 if push["in full"] else 1) for push in ipc["pushes"]
    )
    worker = max(push["worker"]["crossed"] / push["tensors"] for push in ipc["pushes"])
    nccl = digests["pushes"]["nccl"]["pushes"]
    return [
        ("bytes per tensor that a push over CUDA IPC copies over the host, trainer", 32, trainer),
        ("bytes per tensor that a push over CUDA IPC copies over the host, server", 24, worker),
        (
            f"bytes of {digests['size']} that a push over NCCL copies there, at both ends",
            2500,
            max(p["bytes"] for p in nccl),
        ),
        *(
            (f"kernels of a layer, forward and backward, for a pack of {pack}", most, sum(places.values()))
            for (pack, places), most in zip(launches["layers"].items(), KERNELS.values(), strict=True)
        ),
    ]


def counted(folder: Path, model: str) -> dict[str, Any]:
    """Train with GRPO on the pretend GPU, and count."""
    from unittest.mock import patch

    import torch
    from transformers import TrainerCallback

    from lockstep.engines.transformers_engine import SampleRows
    from lockstep.learn.update import Policy
    from lockstep.report.phases import PhaseClock
    from lockstep.watch.finite_differences import Added
    from lockstep.watch.model_gradient import ModelGradient
    from pretend_cuda import LOG
    from pretend_cuda import Event as EventOfDevice
    from pretend_cuda.runs import train

    now = {"step": 0, "part": ""}
    phases: list[str] = []
    packs, tokens, timed, pushes = [0], [0], [0], Counter[int]()
    start, stop, score, sample = PhaseClock.start, PhaseClock.stop, Policy.score, SampleRows.__call__
    backward, of_events = torch.autograd.backward, EventOfDevice.elapsed_time

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            now["step"] = state.global_step

    @contextmanager
    def doing(part: str) -> Iterator[None]:
        before, now["part"] = now["part"], part
        try:
            yield
        finally:
            now["part"] = before

    def started(clock: PhaseClock, name: str) -> None:
        phases.append(name)
        now["part"] = "between" if name == "forward_backward" else ""
        pushes[now["step"]] += name == "sync"
        start(clock, name)

    def stopped(clock: PhaseClock, name: str) -> None:
        stop(clock, name)
        phases.remove(name)
        now["part"] = ""

    def scored(*arguments: Any, **named: Any) -> Any:
        if phases[-1:] == ["forward_backward"]:
            now["part"], packs[0] = BEFORE, packs[0] + 1
        return score(*arguments, **named)

    def inside(*arguments: Any, **named: Any) -> None:
        learns = phases[-1:] == ["forward_backward"]
        with doing(INSIDE if learns else now["part"]):
            backward(*arguments, **named)
        now["part"] = AFTER if learns else now["part"]

    def proving(method: Callable[..., Any]) -> Callable[..., Any]:
        def proven(*arguments: Any, **named: Any) -> Any:
            with doing(PROOF):
                return method(*arguments, **named)

        return proven

    def sampled(*arguments: Any) -> Any:
        tokens[0] += 1
        return sample(*arguments)

    def elapsed(begin: EventOfDevice, end: EventOfDevice) -> float:
        timed[0] += 1
        return of_events(begin, end)

    LOG.clear()
    LOG.context = lambda: (now["step"], phases[-1] if phases else "", now["part"])
    with (
        patch.object(PhaseClock, "start", started),
        patch.object(PhaseClock, "stop", stopped),
        patch.object(Policy, "score", scored),
        patch.object(torch.autograd, "backward", inside),
        patch.object(EventOfDevice, "elapsed_time", elapsed),
        patch.object(SampleRows, "__call__", sampled),
        patch.object(ModelGradient, "begin", proving(ModelGradient.begin)),
        patch.object(ModelGradient, "finish", proving(ModelGradient.finish)),
        patch.object(Added, "read", proving(Added.read)),
    ):
        result = train(folder, "GRPO", model, callbacks=[Steps()], **_FIELDS)
    LOG.context = lambda: ""
    events = [
        [kind, place, *label, count, LOG.sizes[kind, operation, place, label]]
        for (kind, operation, place, label), count in LOG.events.items()
    ]
    return {
        **result,
        "events": events,
        "packs": packs[0],
        "tokens": tokens[0],
        "timed": timed[0],
        "pushes": [pushes[step] for step in range(max(pushes) + 1)],
    }


def both(folder: Path) -> dict[str, Any]:
    """The two runs of the table."""
    return {name: counted(folder.with_name(f"{folder.name}_{name}"), name) for name in (FEW, MANY)}


def read(found: dict[str, Any]) -> tuple[Counted, Counted]:
    """The runs with few and with many tensors, from what `both` gave, as JSON."""
    return Counted.read(found[FEW]), Counted.read(found[MANY])


def table(found: dict[str, Any]) -> str:
    """The table, with the places of the rows that are over what is asked."""
    few, many = read(found)
    lines = [f"few tensors: {few.tensors}; many tensors: {many.tensors}", "", "  asked   counted"]
    for row in ROWS:
        number, places = row.count(few, many)
        over = number > row.most
        lines.append(f"{row.most:7g} {number:9.4g}   {row.what}{'   OVER' if over else ''}")
        lines += [f"{'':22}{count:6d} {place}" for place, count in (places.most_common(10) if over else ())]
    return "\n".join(lines)


def main() -> None:
    """Run, and print the table. The exit code is 1 if a row is over."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from pretend_cuda import runs

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log, names = runs.begin(), ["ipc", "counts", "digests", "launches"]
        runs.save_models(folder)
        runs.run_all(folder, names, log)
        ipc, found, *others = (
            json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in names
        )
    for each in (ipc, found, *others):
        if "error" in each:
            sys.exit(each["error"])
    print(table(found))
    rows = of_other_runs(ipc, *others)
    for what, most, number in rows:
        print(f"{most:7g} {number:9.4g}   {what}{'   OVER' if number > most else ''}")
    over = any(row.count(*read(found))[0] > row.most for row in ROWS)
    sys.exit(over or any(number > most for _, most, number in rows))


if __name__ == "__main__":
    main()
