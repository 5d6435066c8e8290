"""Servers join and leave a run between two generations, by a file of URLs, or because they stay away.

The weights do not change.

Each run is compared, bit for bit, with the run on one server that nothing happens to.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from conftest import VLLM
from server_runs import equal, make_trainer, train
from servers import Server, descendants, free_port, serve

from lockstep.contract.probe import decode_floats, encode_floats
from lockstep.engines.servers.calls import ServerCalls
from lockstep.engines.servers.requests import ServerRequests
from lockstep.errors import EngineLost
from lockstep.run.trainers.methods import GRPOTrainer
from lockstep.watch.receipt import check_receipt, read_receipt

pytestmark = [*VLLM, pytest.mark.long, pytest.mark.usefixtures("server_key")]


@pytest.fixture(scope="module")
def second(untied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(untied_dir, tmp_path_factory.mktemp("second")) as running:
        yield running


class Steps:
    """Does something before given steps of a run, and notes what each step was.

    Attributes:
        answered: the URLs of the servers that answered in each step.
        in_full: why the push of each step sent everything to the servers that the run had; empty: it did not.
    """

    def __init__(self, before: dict[int, Callable[[GRPOTrainer, ExitStack], object]]) -> None:
        self._before = before
        self.answered: list[set[str]] = []
        self.in_full: list[str] = []

    @contextmanager
    def __call__(self, trainer: GRPOTrainer, step: int) -> Iterator[None]:
        with ExitStack() as held:
            self._before.get(step, lambda *_: None)(trainer, held)
            yield
        engine, proof = trainer.engine, trainer.source.proofs.push.proof
        assert proof is not None
        self.in_full.append(proof.push.in_full)
        self.answered.append({engine.server_of(c.key) for c in trainer.loop.generation.completions})


def server_counts(trainer: GRPOTrainer) -> list[int]:
    return [line["engine/servers"] for line in trainer.state.log_history if "engine/servers" in line]


def changes_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a receipt about servers, without their hashes. The receipt's chain is checked."""
    check_receipt(folder / "receipt.jsonl")
    hashes = {"hash", "previous", "kind"}
    lines = [line for line in read_receipt(folder / "receipt.jsonl") if line["kind"] == "servers"]
    return [{name: value for name, value in line.items() if name not in hashes} for line in lines]


def damaged_answers(url: str, method: str, damage: Callable[[list[Any]], list[Any]]) -> Any:
    """While this is entered, one server's workers answer one of the trainer's calls wrongly."""
    real = ServerCalls.workers

    def workers(self: ServerCalls, called: str, *args: str) -> list[Any]:
        found = real(self, called, *args)
        return damage(found) if (self.url, called) == (url, method) else found

    return patch.object(ServerCalls, "workers", workers)


def other_digest(workers: list[Any]) -> list[Any]:
    workers[0]["tensors"][0][3] = "0" * 32
    return workers


def other_outputs(workers: list[Any]) -> list[Any]:
    return [
        {name: encode_floats(decode_floats(text) + 1) for name, text in worker.items()} for worker in workers
    ]


def gone(workers: list[Any]) -> list[Any]:
    raise EngineLost("the server is gone again", lambda: None)


def other_scores(url: str) -> Any:
    """While this is entered, one server scores the canary wrongly."""
    real = ServerRequests.score_one

    async def score(self: ServerRequests, ids: Any, server: ServerCalls, *more: Any) -> tuple[float, ...]:
        found = await real(self, ids, server, *more)
        return tuple(value - 1 for value in found) if server.url == url else found

    return patch.object(ServerRequests, "score_one", score)


def test_servers_join_when_they_are_proven_and_leave_by_the_file_and_the_weights_stay_the_same(
    server: Server, second: Server, untied_dir: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, one, two = tmp_path / "servers.txt", server.url, second.url
    with serve(untied_dir, tmp_path, max_model_len=256) as other:

        def named(*urls: str, fault: Any = None) -> Callable[[GRPOTrainer, ExitStack], None]:
            def write(trainer: GRPOTrainer, held: ExitStack) -> None:
                file.write_text(
                    "# the servers of this run\n\n" + "".join(f"{url}  # a server\n" for url in urls)
                )
                if fault is not None:
                    held.enter_context(fault)

            return write

        named(one)(None, None)  # type: ignore[arg-type]
        steps = Steps(
            {
                1: named(one, two, fault=damaged_answers(two, "lockstep_acknowledgement", other_digest)),
                2: named(one, two, fault=damaged_answers(two, "lockstep_probe", other_outputs)),
                3: named(one, two, fault=other_scores(two)),
                4: named(one, two, fault=damaged_answers(two, "lockstep_probe", gone)),
                # At step 5 the file is the same: the server that was refused is not tried again, and the run goes on.
                6: named(
                    one, other.url, one.replace("127.0.0.1", "localhost"), f"http://127.0.0.1:{free_port()}"
                ),
                7: named(two, one),
                9: lambda *_: file.write_text("gpu-node"),
                10: named(two),
            }
        )
        common = {"max_steps": 12, "logging_steps": 1}
        expected = train(make_trainer(untied_dir, tmp_path / "whole", one, **common))
        trainer = make_trainer(untied_dir, tmp_path / "run", None, vllm_server_url_file=str(file), **common)
        assert equal(train(trainer, steps), expected)
    printed = capfd.readouterr().out
    assert steps.answered == [{one}] * 7 + [{one, two}] * 3 + [{two}] * 2
    assert steps.in_full == [""] * 12
    assert server_counts(trainer) == [1] * 7 + [2] * 3 + [1] * 2
    assert trainer.source.losses == 0
    first, *changes = [*changes_of(tmp_path / "run")]
    assert first["step"] == 1
    refused = [(line["step"], url, why) for line in [first, *changes] for url, why in line["refused"].items()]
    assert [(step, url) for step, url, _ in refused] == [
        (1, two), (2, two), (3, two), (4, two), (6, other.url), (6, one.replace("127.0.0.1", "localhost")),
    ]  # fmt: skip
    reasons = "'digest'", "'module_probe'", "canary", "gone again", "max_model_len", "lead to the same server"
    for (_, url, why), said in zip(refused, reasons, strict=True):
        assert said in why
        assert f"the server at {url} is refused, and the run goes on without it: {why}" in printed
    assert [(line["step"], line["joined"], line["servers"]) for line in changes if line["joined"]] == [
        (7, [two], [two, one])
    ]
    assert [(line["step"], line["left"], line["servers"]) for line in changes if line["left"]] == [
        (10, {one: f"{file} does not name it any more"}, [two])
    ]
    assert f"the servers of the run stay as they are: vllm_server_url_file={file} has 'gpu-node'" in printed


def kill_for_good(server: Server) -> None:
    pids = [server.supervisor.pid, *descendants(server.supervisor.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    server.supervisor.wait(60)


@pytest.mark.release
def test_a_server_that_does_not_come_back_leaves_and_joins_again_when_it_is_back(
    server: Server, untied_dir: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = {"max_steps": 5, "logging_steps": 1, "max_completion_length": 120}
    expected = train(make_trainer(untied_dir, tmp_path / "whole", server.url, **common))
    with ExitStack() as life:
        lost = life.enter_context(serve(untied_dir, tmp_path))

        def kill_while_it_samples(trainer: GRPOTrainer, held: ExitStack) -> None:
            real, engine = trainer.engine.serve, trainer.engine

            def serve_inbox(inbox: Any) -> None:
                held.enter_context(patch.object(engine, "serve", real))
                # The wait for servers that are lost. The server that stays answers within it.
                held.enter_context(patch.object(engine, "timeout", 6.0))
                kill_for_good(lost)
                real(inbox)

            held.enter_context(patch.object(engine, "serve", serve_inbox))

        def start_again(trainer: GRPOTrainer, held: ExitStack) -> None:
            port = int(lost.url.rpartition(":")[2])
            life.enter_context(serve(untied_dir, tmp_path, port=port))
            engine, choose, failed = trainer.engine, trainer.engine.choose, list[EngineLost]()

            def lost_once(servers: Any) -> Any:
                # One of the servers that the run has is lost while the other one joins. That one is not refused for it.
                if not failed:
                    failed.append(EngineLost("lost", engine.recover))
                    raise failed[0]
                return choose(servers)

            held.enter_context(patch.object(engine, "choose", lost_once))

        steps = Steps({1: kill_while_it_samples, 3: start_again})
        trainer = make_trainer(untied_dir, tmp_path / "run", f"{server.url},{lost.url}", **common)
        assert equal(train(trainer, steps), expected)
    both = {server.url, lost.url}
    assert steps.answered == [both, {server.url}, {server.url}, both, both]
    assert server_counts(trainer) == [2, 1, 1, 2, 2]
    assert trainer.source.losses == 2
    left, joined = changes_of(tmp_path / "run")
    assert (left["step"], left["servers"]) == (1, [server.url])
    assert "did not come back within 6 s" in left["left"][lost.url]
    assert (joined["step"], joined["joined"], joined["servers"]) == (3, [lost.url], [server.url, lost.url])
    assert not joined["refused"]
    said = capfd.readouterr().out
    assert (
        f"the server at {lost.url} has left the run, which goes on with 1 server: it did not come back"
        in said
    )
    assert f"the server at {lost.url} has joined the run, which goes on with 2 servers" in said
    starts = [line for line in read_receipt(tmp_path / "run" / "receipt.jsonl") if line["kind"] == "start"]
    assert [line["servers"] for line in starts] == [[server.url, lost.url]]
