"""A seeded schedule of SIGKILLs and SIGSTOPs for a run on a server, and the processes that it meets."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from forked import Program
from observed import PHASE_FILE
from servers import Server, descendants, free_port, serve

SCRIPT = Path(__file__).with_name("observed.py")
TRANSPORTS = ("shared_memory", "gloo")
# The server's two processes, its supervisor, the whole trainer (its launcher and every rank), and one rank alone.
TARGETS = ("api", "core", "supervisor", "trainer", "rank")
LOADING = "loading"
PHASES = ("sync", "generate", "rewards", "forward_backward", "optimizer", "checkpoint")
# Seconds that a run may show no progress.
_STUCK = 900.0


class Event(NamedTuple):
    """One signal, and the weight transport of the trainer that must be running when it is sent.

    Attributes:
        phase: the phase of the trainer in which the signal is sent. `LOADING`: right after the event before it.
        delay: the time between the begin of the phase and the signal, as a share of the longest delay.
    """

    who: str
    sign: signal.Signals
    transport: str
    phase: str
    delay: float


class Sent(NamedTuple):
    """A signal that was sent: to whom, what the trainer did, and whether the server answered shortly before."""

    who: str
    sign: str
    transport: str
    phase: str
    answers: bool


def schedule(rounds: int, seed: int) -> list[Event]:
    """A list of 20 events per round: both signals to each of the five targets under both transports.

    The transport changes with each start of the trainer. Therefore each part of a round ends with the death of a
    trainer.
    """
    draw = random.Random(seed)
    events: list[Event] = []
    for _ in range(rounds):
        parts: list[list[Event]] = []
        for transport in TRANSPORTS:
            both = [(who, sign) for who in TARGETS for sign in (signal.SIGKILL, signal.SIGSTOP)]
            deadly = [(who, signal.SIGKILL) for who in ("trainer", "rank")]
            others = [pair for pair in both if pair not in deadly]
            draw.shuffle(others)
            draw.shuffle(deadly)
            halves = [[*others[:4], deadly[0]], [*others[4:], deadly[1]]]
            parts += [
                [Event(who, sign, transport, "", draw.random()) for who, sign in half] for half in halves
            ]
        for part in (parts[0], parts[2], parts[1], parts[3]):
            events += part
    phases: list[str] = []
    for event, before in zip(events, [None, *events], strict=False):
        restarts = before is not None and before.sign == signal.SIGKILL
        if restarts and draw.random() < 0.5:
            phases.append(LOADING)
        else:
            # Every phase has its turn.
            rare = Counter(phases)
            phases.append(min(PHASES, key=lambda phase: (rare[phase], draw.random())))
        del event
    return [event._replace(phase=phase) for event, phase in zip(events, phases, strict=True)]


class Stack:
    """A server with its supervisor, and a trainer of several ranks.

    What was killed is started again with the same command.

    Args:
        fields: the fields of the run's config, without those that the stack sets.
        ranks: number of the trainer's processes.
        stopped: seconds that a stopped process stays stopped.

    Attributes:
        starts: how often each part was started.
    """

    def __init__(
        self, model: str, home: Path, fields: dict[str, Any], ranks: int, stopped: float, held: ExitStack
    ) -> None:
        self.model, self.home, self.ranks, self.stopped = model, home, ranks, stopped
        self._fields, self._held = fields, held
        self.port = free_port()
        self.starts: Counter[str] = Counter()
        self.trainer: Program | None = None
        self._old: list[int] = []
        self.server = self._serve()

    def _serve(self) -> Server:
        self.starts["supervisor"] += 1
        folder = self.home / f"server-{self.starts['supervisor']}"
        folder.mkdir()
        served = serve(self.model, folder, "--max_num_seqs", "16", port=self.port, await_health=False)
        return self._held.enter_context(served)

    def words(self, name: str, transport: str) -> list[str]:
        """The trainer's command."""
        given = {
            "model_name_or_path": self.model,
            "output_dir": self.home / name,
            "vllm_server_base_url": f"http://127.0.0.1:{self.port}",
            "vllm_weight_transport": transport,
            **self._fields,
        }
        words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(self.ranks)]
        return [sys.executable, *launcher, "--master_port", str(free_port()), str(SCRIPT), "grpo", *words]

    @property
    def transport(self) -> str:
        """The weight transport of the trainer that runs now; every start takes the other one."""
        return TRANSPORTS[(self.starts["trainer"] - 1) % 2]

    @property
    def phase(self) -> str:
        """The phase that rank 0 is in."""
        return (self._phase_file.read_text().strip() if self._phase_file.exists() else "") or LOADING

    @property
    def _phase_file(self) -> Path:
        return self.home / f"phase-{self.starts['trainer']}"

    def start_trainer(self, name: str) -> None:
        self.starts["trainer"] += 1
        self.trainer = self.program(name, self.transport)

    def log(self, name: str) -> Path:
        """The output of the trainer that was started last."""
        return self.home / f"{name}-{self.starts['trainer']}.log"

    def program(self, name: str, transport: str) -> Program:
        """A trainer, as it was just started. Its output is in `NAME-*.log`."""
        out = self._held.enter_context(self.log(name).open("w"))
        env = {**os.environ, PHASE_FILE: str(self._phase_file)}
        return Program(self.words(name, transport), stdout=out, stderr=out, env=env)

    def server_answers(self) -> bool:
        with suppress(AssertionError):
            self.server.await_health(limit=0.05)
            return True
        return False

    def processes(self, who: str) -> list[int]:
        """The processes that a signal reaches now: all of the trainer's, or one of the others."""
        assert self.trainer is not None
        if who == "supervisor":
            return [self.server.supervisor.pid]
        if who in ("api", "core"):
            return [pid] if (pid := self.server.processes.get(who)) else []
        if self.trainer.poll() is not None:
            return []
        # A launcher has one child per rank: the guard of a command, whose own child trains.
        guards = children(self.trainer.pid)
        ranks = [pid for guard in guards for pid in children(guard)]
        if len(ranks) < self.ranks:
            return []
        return [self.trainer.pid, *guards, *ranks] if who == "trainer" else ranks

    def send(self, event: Event, draw: random.Random, answers: bool) -> Sent | None:
        """Send the signal. Returns None if the process does not exist yet."""
        pids = self.processes(event.who)
        if not pids:
            return None
        pids = [draw.choice(pids)] if event.who == "rank" else pids
        sent = Sent(event.who, event.sign.name, self.transport, self.phase, answers)
        if event.who == "supervisor" and event.sign == signal.SIGKILL:
            self._old = descendants(self.server.supervisor.pid)
        kill(pids, event.sign)
        if event.sign == signal.SIGSTOP:
            time.sleep(self.stopped)
            kill(pids, signal.SIGCONT)
        return sent

    def restore(self, name: str, event: Event) -> None:
        """Wait for the end of what was killed, and start it again where it does not start by itself."""
        assert self.trainer is not None
        if event.sign != signal.SIGKILL:
            return
        if event.who == "supervisor":
            self.server.supervisor.wait(60)
            wait_for(
                lambda: not any(map(runs, self._old)), "the end of the server whose supervisor was killed"
            )
            self.server = self._serve()
        if event.who in ("trainer", "rank"):
            self.trainer.wait(_STUCK)
            self.start_trainer(name)


def run_disturbed(stack: Stack, name: str, events: Sequence[Event], seed: int, longest: float) -> list[Sent]:
    """Run to the end under the schedule.

    Args:
        longest: the longest delay after the begin of a phase, in seconds.

    Returns:
        The signals that were sent.
    """
    draw, sent, run = random.Random(seed), [], stack.home / name
    stack.start_trainer(name)
    before, since = 0, 0
    for event in events:
        trainer = stack.trainer
        assert trainer is not None
        assert stack.transport == event.transport

        def alive(done: bool) -> bool:
            ended = trainer.poll()  # noqa: B023
            assert ended is None, f"the trainer ended by itself after {sent[-3:]}: {ended}"
            return done

        if since == 2:
            # Work that loses its engine four times ends the run, and a trainer that always dies never ends it.
            wait_for(lambda: alive(newest(run) > before), f"no progress after {sent[-2:]}")  # noqa: B023
        if newest(run) > before:
            before, since = newest(run), 0
        answers = stack.server_answers()
        if event.phase != LOADING:
            # A phase that is missed in one step is not waited for in the next one.
            step = newest(run)
            wait_for(
                lambda: alive(stack.phase == event.phase or newest(run) > step),  # noqa: B023
                f"no {event.phase} after {sent[-2:]}",
            )
        time.sleep(event.delay * (2.0 if event.phase == LOADING else longest))
        while (found := stack.send(event, draw, answers)) is None:
            wait_for(lambda: alive(bool(stack.processes(event.who))), f"no {event.who}")  # noqa: B023
        sent.append(found)
        since += 1
        stack.restore(name, event)
    assert stack.trainer is not None
    assert stack.trainer.wait(_STUCK) == 0, stack.log(name).read_text()[-4000:]
    return sent


def newest(run: Path) -> int:
    """The step of the newest complete checkpoint, 0 if there is none."""
    found = [int(path.parent.name.partition("-")[2]) for path in run.glob("checkpoint-*/trainer_state.json")]
    return max(found, default=0)


def table(sent: Sequence[Sent]) -> str:
    """How many signals met each phase of the trainer, per target and signal, as Markdown."""
    met = Counter((signal.who, signal.sign, signal.phase) for signal in sent)
    phases = [
        phase
        for phase in (LOADING, *PHASES, "verify", "between phases")
        if any(key[2] == phase for key in met)
    ]
    rows = [["signal", *phases, "sum"]]
    for who in TARGETS:
        for sign in ("SIGKILL", "SIGSTOP"):
            counts = [met[who, sign, phase] for phase in phases]
            rows.append([f"{sign} to {who}", *map(str, counts), str(sum(counts))])
    rows.append(
        ["sum", *(str(sum(met[key] for key in met if key[2] == phase)) for phase in phases), str(len(sent))]
    )
    down = sum(not one.answers for one in sent)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(
        [
            lines[0],
            "|---" * len(rows[0]) + "|",
            *lines[1:],
            f"{down} signals met a server that was down or loading",
        ]
    )


def wait_for(seen: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _STUCK
    while not seen():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def kill(pids: Sequence[int], sign: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, sign)


def children(pid: int) -> list[int]:
    """The ids of a process's own child processes."""
    with suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


def runs(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
