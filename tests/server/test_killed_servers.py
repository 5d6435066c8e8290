"""Training goes on, exactly, when its server dies: at work, idle, and in the middle of a push."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from conftest import VLLM
from servers import KEY, Server, serve
from training import equal, make_trainer, train

import lockstep.sync.shared_memory as shared_memory
from lockstep.engines.server_calls import ServerCalls
from lockstep.parity.receipt import check_receipt
from lockstep.server.keys import KEY_VARIABLE
from lockstep.sync.chunks import chunks
from lockstep.training.grpo import GRPOTrainer

pytestmark = VLLM

ROLES = ("api", "core")
MOMENTS = ("generating", "idle", "pushing")


class Killer:
    """Kills one process of the server in each step, each time another one at another moment."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.kills: list[tuple[str, str]] = []

    @contextmanager
    def __call__(self, trainer: GRPOTrainer, step: int) -> Iterator[None]:
        moment, role = MOMENTS[step % 3], ROLES[(step // 3) % 2]
        with getattr(self, moment)(trainer, role):
            yield

    def kill(self, moment: str, role: str) -> None:
        self.server.kill(role)
        self.kills.append((moment, role))

    @contextmanager
    def generating(self, trainer: GRPOTrainer, role: str) -> Iterator[None]:
        real, armed = trainer.engine.generate, [True]

        def generate(requests: Any, *more: Any) -> Any:
            if not armed:
                return real(requests, *more)
            armed.pop()
            timer = threading.Timer(0.25, self.kill, ("generating", role))
            timer.start()
            try:
                return real(requests, *more)
            finally:
                # On a busy machine the generation may end first; the next call then meets the dead server.
                timer.join()

        with patch.object(trainer.engine, "generate", generate):
            yield

    @contextmanager
    def idle(self, trainer: GRPOTrainer, role: str) -> Iterator[None]:
        self.kill("idle", role)
        yield

    @contextmanager
    def pushing(self, trainer: GRPOTrainer, role: str) -> Iterator[None]:
        real, armed = ServerCalls.update_weights, [True, True]

        def update(calls: ServerCalls, info: dict[str, Any]) -> None:
            real(calls, info)
            # After the second chunk of several: some layers are new, some are old.
            if armed:
                armed.pop()
                if not armed:
                    self.kill("pushing", role)

        small = lambda tensors: chunks(tensors, limit=40_000)  # noqa: E731
        with patch.object(ServerCalls, "update_weights", update), patch.object(shared_memory, "chunks", small):
            trainer.engine._transport.forget()  # type: ignore[union-attr]
            yield


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def run(model: str, folder: Path, server: Server, steps: int, kills: bool) -> tuple[dict, Killer]:
    killer = Killer(server)
    trainer = make_trainer(model, folder, server.url, max_steps=steps, max_completion_length=200)
    return train(trainer, killer if kills else None), killer


def check(untied_dir: str, tmp_path: Path, steps: int) -> None:
    with serve(untied_dir, tmp_path) as server:
        expected, _ = run(untied_dir, tmp_path / "whole", server, steps, kills=False)
        found, killer = run(untied_dir, tmp_path / "killed", server, steps, kills=True)
        log = server.log.read_text()
    assert len(killer.kills) == steps
    assert log.count("starting it again") >= steps - 1
    assert equal(found, expected), "the weights are not those of the run without faults"
    receipt = tmp_path / "killed" / "receipt.jsonl"
    check_receipt(receipt)
    lines = [json.loads(line) for line in receipt.read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, steps + 1))
    assert all(line["sampled_tokens"] == line["checked_tokens"] for line in lines if line["kind"] == "step")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_kill_in_the_middle_of_a_generation_changes_nothing(untied_dir: str, tmp_path: Path) -> None:
    check(untied_dir, tmp_path, 1)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_twenty_kills_in_one_run_change_nothing(untied_dir: str, tmp_path: Path) -> None:
    check(untied_dir, tmp_path, 20)
