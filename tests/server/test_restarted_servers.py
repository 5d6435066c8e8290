"""Servers that restart during a run: with their first weights, with other settings, and with the key that they made."""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from conftest import VLLM
from faulty_proxy import faulty_proxy
from server_runs import equal, make_trainer, train
from servers import HTTP, KEY, Server, serve
from tiny import make_model

from lockstep.engines import connect
from lockstep.errors import ProofError
from lockstep.run.files.checkpoints import last_checkpoint
from lockstep.run.trainers.methods import GRPOTrainer
from lockstep.server.keys import KEY_VARIABLE, read_key

pytestmark = [*VLLM, pytest.mark.long]

PRINTED = re.compile(r"its key is in (\S+), where")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of this user's files, for the server and the trainers that read its key; neither is given one."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(folder))
        environment.delenv(KEY_VARIABLE, raising=False)
        yield folder


@pytest.fixture(scope="module")
def keyless(home: Path, untied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that was given no key."""
    with serve(untied_dir, tmp_path_factory.mktemp("keyless"), key=None) as running:
        yield running


def printed(server: Server) -> tuple[str, Path]:
    """The key of a server, and the key file that it has named in its log."""
    deadline = time.monotonic() + 30
    while not (found := PRINTED.findall(server.log.read_text())):
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.2)
    (file,) = found
    return read_key(Path(file)), Path(file)


def status(server: Server, **headers: str) -> int:
    return HTTP.get(server.url + "/weight_info", headers=headers).status_code


def check_key(server: Server, home: Path) -> None:
    """The key is in a file that only this user can read, in no log and no process list, and no other key works."""
    key, file = printed(server)
    assert key not in server.log.read_text()
    assert file.is_relative_to(home)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    pids = [server.supervisor.pid, *server.processes.values()]
    assert not any(key in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8") for pid in pids)
    assert status(server, Authorization=f"Bearer {key}") == 200
    assert status(server) == status(server, Authorization=f"Bearer {KEY}") == 401


def test_a_server_without_a_key_makes_one_that_no_log_shows_and_trainers_here_find_it(
    keyless: Server, home: Path
) -> None:
    check_key(keyless, home)
    found = connect(keyless.url)
    found.update_weights(make_model(), 1)
    found.close()


class BeforeTheRequests:
    """Runs a function in a step, after the push of its weights and before the first request."""

    def __init__(self, step: int, what: Callable[[], None]) -> None:
        self.step, self.what = step, what
        self.left = 1

    @contextmanager
    def __call__(self, trainer: GRPOTrainer, step: int) -> Iterator[None]:
        real = trainer.engine.serve

        def serve(inbox: Any) -> None:
            if step == self.step and self.left:
                self.left = 0
                self.what()
            real(inbox)

        with patch.object(trainer.engine, "serve", serve):
            yield


def test_a_server_restarted_after_a_push_is_found_out_by_its_greeting(
    keyless: Server, home: Path, untied_dir: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = train(make_trainer(untied_dir, tmp_path / "whole", keyless.url))
    restart = BeforeTheRequests(1, keyless.restart)
    trainer = make_trainer(untied_dir, tmp_path / "restarted", keyless.url)
    found = train(trainer, restart)
    assert not restart.left
    assert trainer.source.losses == 1
    assert "was started again (at /inference/v1/generate); waiting for it" in capfd.readouterr().out
    assert equal(found, expected)
    check_key(keyless, home)


def test_a_server_that_comes_back_with_other_settings_ends_the_run_which_resumes_with_the_old_ones(
    server: Server, untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    common = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    expected = train(make_trainer(untied_dir, tmp_path / "whole", server.url, **common))
    with faulty_proxy(server.url) as proxy, serve(untied_dir, tmp_path, max_model_len=256) as other:
        # The same address leads first to one server and then to the other.
        change = BeforeTheRequests(1, lambda: setattr(proxy, "target", other.url))
        with pytest.raises(ProofError, match="max_model_len was 512 and is 256") as refused:
            train(make_trainer(untied_dir, tmp_path / "run", proxy.url, **common), change)
        assert refused.value.check == "handshake"
        proxy.target = server.url
        checkpoint = last_checkpoint(tmp_path / "run")
        assert checkpoint is not None
        assert checkpoint.name == "checkpoint-1"
        again = make_trainer(untied_dir, tmp_path / "run", proxy.url, **common)
        assert equal(train(again, resume_from_checkpoint=str(checkpoint)), expected)
