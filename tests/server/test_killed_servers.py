"""Training continues exactly when its server dies: while it generates, is idle, or in the middle of a push."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import torch
from conftest import VLLM
from server_runs import equal, make_trainer, train
from servers import HTTP, KEY, Server, descendants, serve

import lockstep.weights.wire.shared_memory as shared_memory
from lockstep.errors import EngineLost
from lockstep.run.trainers.methods import GRPOTrainer
from lockstep.watch.receipt import check_receipt
from lockstep.weights.source import PlainSource
from lockstep.weights.wire.network import GlooTransport
from lockstep.weights.wire.shared_memory import TrainerSlots
from lockstep.weights.wire.stream import chunks

pytestmark = [*VLLM, pytest.mark.usefixtures("server_key")]

ROLES = ("api", "core")
MOMENTS = ("generating", "idle", "pushing")
# Half of the pushes with a kill use this transport.
GLOO = "pushing over gloo"
TIMEOUT = 240.0


class Killer:
    """Kills one process of the server in each step, each time another process at another moment.

    Attributes:
        kills: the moment and the process of each kill.
        met: the kills that interrupted the current work.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.kills: list[tuple[str, str]] = []
        self.met: list[tuple[str, str]] = []

    @contextmanager
    def __call__(self, trainer: GRPOTrainer, step: int) -> Iterator[None]:
        moment, role = MOMENTS[step % 3], ROLES[step % 2]
        if moment == "pushing" and step % 12 >= 6:
            with self.pushing_over_gloo(trainer, role):
                yield
        else:
            with getattr(self, moment)(trainer, role):
                yield

    def kill(self, moment: str, role: str) -> None:
        self.kills.append((moment, role))
        self.server.kill(role)

    @contextmanager
    def lost_by(self, moment: str, role: str) -> Iterator[None]:
        """The work that a kill must interrupt; later work does not count."""
        before = len(self.kills)
        try:
            yield
        except EngineLost:
            if self.kills[before:] == [(moment, role)]:
                self.met.append((moment, role))
            raise

    @contextmanager
    def generating(self, trainer: GRPOTrainer, role: str) -> Iterator[None]:
        real, armed = trainer.engine.serve, [True]

        def kill_while_it_samples(before: float, done: threading.Event) -> None:
            core = self.server.processes["core"]
            # The server runs for short times only, so that it cannot finish before the test reads its token count.
            while not done.wait(0.05):
                os.kill(core, signal.SIGSTOP)
                time.sleep(0.1)
                if self.server.sampled_tokens() > before:
                    self.kill("generating", role)
                    return
                os.kill(core, signal.SIGCONT)

        def serve(inbox: Any) -> None:
            if not armed:
                return real(inbox)
            armed.pop()
            done = threading.Event()
            killer = threading.Thread(target=kill_while_it_samples, args=(self.server.sampled_tokens(), done))
            killer.start()
            try:
                with self.lost_by("generating", role):
                    return real(inbox)
            finally:
                done.set()
                killer.join()

        with patch.object(trainer.engine, "serve", serve):
            yield

    @contextmanager
    def idle(self, trainer: GRPOTrainer, role: str) -> Iterator[None]:
        self.kill("idle", role)
        yield

    @contextmanager
    def pushing(self, trainer: GRPOTrainer, role: str) -> Iterator[None]:
        real, armed = TrainerSlots.wait_until_free, [True]

        def free(slots: TrainerSlots, number: int, check: Callable[[], None]) -> Any:
            found = real(slots, number, check)
            # The second of several chunks has been loaded: some layers are new, some are old.
            if number == 3 and armed:
                armed.pop()
                self.kill("pushing", role)
            return found

        small = lambda tensors: chunks(tensors, limit=40_000)  # noqa: E731
        with (
            patch.object(TrainerSlots, "wait_until_free", free),
            patch.object(shared_memory, "chunks", small),
        ):
            trainer.engine.transport.forget()  # type: ignore[union-attr]
            with self.loading(trainer, "pushing", role):
                yield

    @contextmanager
    def pushing_over_gloo(self, trainer: GRPOTrainer, role: str) -> Iterator[None]:
        killer, armed = self, [True]

        class Deadly(PlainSource):
            """The same weights; the server is killed when half of them have been sent."""

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                for number, named in enumerate(super().__iter__()):
                    if number == len(self.names) // 2:
                        killer.kill(GLOO, role)
                    yield named

        def load(tensors: Any, base: str = "") -> Any:
            return (
                real(Deadly(trainer.trained_by_name()["policy"]))
                if armed and armed.pop()
                else real(tensors, base)
            )

        trainer.engine.transport.forget()  # type: ignore[union-attr]
        gloo = GlooTransport("127.0.0.1", 0, TIMEOUT)
        with patch.object(trainer.engine, "transport", gloo), self.loading(trainer, GLOO, role):
            real = trainer.engine.load
            with patch.object(trainer.engine, "load", load):
                yield

    @contextmanager
    def loading(self, trainer: GRPOTrainer, moment: str, role: str) -> Iterator[None]:
        """Records whether the kill interrupted the push."""
        real = trainer.engine.load

        def load(tensors: Any, base: str = "") -> Any:
            with self.lost_by(moment, role):
                return real(tensors, base)

        with patch.object(trainer.engine, "load", load):
            yield


def run(model: str, folder: Path, server: Server, steps: int, kills: bool) -> tuple[dict, Killer]:
    killer = Killer(server)
    settings = {"max_steps": steps, "max_completion_length": 300, "vllm_server_timeout": TIMEOUT}
    trainer = make_trainer(model, folder, server.url, **settings)
    return train(trainer, killer if kills else None), killer


def check(untied_dir: str, tmp_path: Path, steps: int) -> None:
    with serve(untied_dir, tmp_path) as server:
        expected, _ = run(untied_dir, tmp_path / "whole", server, steps, kills=False)
        found, killer = run(untied_dir, tmp_path / "killed", server, steps, kills=True)
        log = server.log.read_text()
    assert len(killer.kills) == steps
    assert killer.met == [kill for kill in killer.kills if kill[0] != "idle"], (
        "a kill missed what it was to hit"
    )
    assert steps <= 6 or GLOO in dict(killer.kills)
    assert log.count("starting it again") >= steps - 1
    assert equal(found, expected), "the weights are not those of the run without faults"
    receipt = tmp_path / "killed" / "receipt.jsonl"
    check_receipt(receipt)
    lines = [json.loads(line) for line in receipt.read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, steps + 1))
    assert all(line["sampled_tokens"] == line["checked_tokens"] for line in lines if line["kind"] == "step")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_kill_at_each_moment_of_a_step_changes_nothing(untied_dir: str, tmp_path: Path) -> None:
    check(untied_dir, tmp_path, len(MOMENTS))


@pytest.mark.release
@pytest.mark.timeout(7200)
def test_twenty_kills_in_one_run_change_nothing(untied_dir: str, tmp_path: Path) -> None:
    check(untied_dir, tmp_path, 20)


def ask(server: Server, path: str, body: dict[str, Any], limit: float) -> int | None:
    """The status of the answer to a call with the key; None if no answer comes in time, or the server ends."""
    with suppress(httpx.HTTPError):
        shown = {"Authorization": f"Bearer {KEY}"}
        return HTTP.post(server.url + path, json=body, headers=shown, timeout=limit).status_code
    return None


def await_restart(server: Server, said: str, limit: float) -> None:
    deadline = time.monotonic() + limit
    while said not in server.log.read_text():
        assert time.monotonic() < deadline, server.log.read_text()[-3000:]
        time.sleep(0.2)
    server.await_health()


def open_files(process: int) -> Iterator[Path]:
    for fd in Path(f"/proc/{process}/fd").iterdir():
        # It may be closed meanwhile.
        with suppress(OSError):
            yield Path(os.readlink(fd))


@pytest.mark.long
def test_a_server_whose_engine_cannot_send_answers_is_started_again_and_leaves_nothing(
    untied_dir: str, tmp_path: Path
) -> None:
    with serve(untied_dir, tmp_path) as server:
        # Before that the supervisor waits for a start, for as long as a start may take.
        await_restart(server, "is ready at", 60)
        # Half of a character, which no answer of the engine can carry: it ends the thread that sends the engine's
        # answers.
        broken = {"method": "lockstep_pictures", "args": [json.dumps(["\ud800"])]}
        asking = threading.Thread(target=ask, args=(server, "/collective_rpc", broken, 60.0))
        asking.start()
        await_restart(server, "starting it again", 60)
        asking.join()
        assert ask(server, "/collective_rpc", {"method": "lockstep_state"}, 60.0) == 200
        # The files through which vLLM's processes meet, of both starts, are in the folder of this server.
        (folder,) = {
            path.parent
            for process in (server.supervisor.pid, *descendants(server.supervisor.pid))
            for path in open_files(process)
            if path.name == "owner.lock"
        }
        assert list(folder.glob("vllm_dist_*"))
        listed = [line.split()[1] for line in (folder / "shared-memory").read_text().splitlines()]
    assert not folder.exists()
    assert [name for name in listed if (Path("/dev/shm") / name).exists()] == []


@pytest.mark.release
@pytest.mark.timeout(600)
def test_a_stopped_engine_is_noticed_within_two_minutes_also_while_calls_are_open(
    untied_dir: str, tmp_path: Path
) -> None:
    with serve(untied_dir, tmp_path) as server:
        server.kill("core", signal.SIGSTOP)
        begun = time.monotonic()
        open_call = {"method": "lockstep_state"}
        asking = threading.Thread(target=ask, args=(server, "/collective_rpc", open_call, 300.0))
        asking.start()
        await_restart(server, "had a stopped process for 120 s", 140)
        assert time.monotonic() - begun > 110
        asking.join()
