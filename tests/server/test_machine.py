"""What a server needs from its machine, without vLLM: real processes, real locks, real limits.

Before a release, a process of its own with vLLM's parser refuses a second model. In CI,
`test_keys_guard_and_command.py` calls the function that refuses it.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from servers import descendants, free_port

from lockstep.cli.main import main
from lockstep.engines.vllm.environment import socket_folder
from lockstep.engines.vllm.start import vllm_installed
from lockstep.errors import InputError
from lockstep.server.command import ServeOptions, command_line, environment
from lockstep.server.supervisor import Supervisor, check_file_limit, private_environment, reserved_port

# A server that ignores SIGTERM, with a process of its own that does too, as vLLM's do while calls are open.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "worker"])
    print("up", flush=True)
time.sleep(600)
"""
SUPERVISOR = """
import sys
from lockstep.server.supervisor import Supervisor
Supervisor([sys.executable, sys.argv[1]], {}, "http://127.0.0.1:9", ready=print, say=print).run()
"""


def until(seen: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_killed_supervisor_takes_every_process_of_its_server_with_it(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(STUBBORN)
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "up\n"
        # The server, its worker, and the process that kills both when the supervisor ends.
        until(lambda: len(descendants(supervisor.pid)) == 3, "the worker did not start")
        pids = descendants(supervisor.pid)
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait()
        until(lambda: not any(map(alive, pids)), f"of {pids}, some are left")


def test_a_supervisor_ends_every_process_of_a_server_that_died(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(STUBBORN)
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "up\n"
        until(lambda: len(descendants(supervisor.pid)) == 3, "the worker did not start")
        (server,) = [pid for pid in descendants(supervisor.pid) if descendants(pid)]
        (worker,) = descendants(server)
        os.kill(server, signal.SIGKILL)
        try:
            # The server was never ready, so that it is not started again.
            assert supervisor.wait(60) == 1
            assert not alive(worker)
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_server_finds_no_module_in_the_current_directory(tmp_path: Path, untied_dir: str) -> None:
    (tmp_path / "vllm.py").touch()
    inside = environment(
        "a-key-for-tests-only", ServeOptions(untied_dir, "127.0.0.1", 9, torch.float32, 64, 4, 1, 0.5)
    )
    code = "import importlib.util as u; found = u.find_spec('vllm'); print(found and found.origin)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=inside, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) not in done.stdout


@pytest.mark.release
@pytest.mark.vllm
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed here")
def test_a_second_model_is_refused_in_one_line_and_nothing_of_the_current_directory_is_imported(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm.py").write_text(
        "import os; open('stolen', 'w').write(os.environ['LOCKSTEP_SERVER_KEY'])"
    )
    monkeypatch.chdir(tmp_path)
    options = ServeOptions(
        untied_dir, "127.0.0.1", 9, torch.float32, 64, 4, 1, 0.5, rest=("--seed", "3", "another-model")
    )
    inside = environment("a-key-for-tests-only", options)
    supervisor = Supervisor(command_line(options), inside, options.url, ready=print, say=print)
    with pytest.raises(InputError, match="refuses this command line"):
        supervisor.run()
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("lockstep")]
    assert said == ["lockstep serve: unexpected 'another-model': there is one MODEL, and it comes first"]
    assert not (tmp_path / "stolen").exists()


def test_only_one_server_of_a_user_can_have_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    refused = pytest.raises(InputError, match="another 'lockstep serve' of yours has port 8000")
    with reserved_port(8000), reserved_port(8001), refused, reserved_port(8000):
        pass
    with reserved_port(8000):
        pass


def test_a_second_server_that_is_started_while_the_first_one_loads_is_refused_and_leaves_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untied_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LOCKSTEP_SERVER_KEY", raising=False)
    port = free_port()
    with reserved_port(port):
        assert main(["serve", untied_dir, "--port", str(port)]) == 2
    assert f"yours has port {port}" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.key"))


def test_sockets_are_in_a_folder_of_this_user_alone_with_room_for_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
    with socket_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(str(folder)) + 37 <= 107
        made = private_environment({"A": "b", "TMPDIR": "/shared"}, folder)
        assert made == {"A": "b", "VLLM_RPC_BASE_PATH": str(folder), "TMPDIR": str(folder)}
        (folder / "left").touch()
    assert not folder.exists()


def test_a_low_limit_of_open_files_is_an_error_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    with pytest.raises(InputError, match=r"only 256 files .*ulimit -n 4096"):
        check_file_limit()


def test_the_limit_of_files_is_raised_where_it_may_be() -> None:
    code = (
        "import resource; from lockstep.server.supervisor import check_file_limit; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096)); check_file_limit(); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout == "4096\n"
