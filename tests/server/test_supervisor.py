"""The supervisor with a small real process instead of vLLM; `test_killed_servers.py` kills the real server."""

from __future__ import annotations

import sys

import pytest
from servers import free_port

from lockstep.server.supervisor import Supervisor

# A server that passes two health checks, and ends at the third one.
HEALTHY = """
import http.server, os, sys
asked = 0
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += self.path == "/health"
        if asked > 2:
            os._exit(3)
        self.send_response(200 if self.path == "/health" else 401); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""

# A server that passes three health checks. Then it refuses connections or answers with an error, and it ignores
# SIGTERM.
DYING = """
import signal, sys, time, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
signal.signal(signal.SIGTERM, signal.SIG_IGN)
asked, ill = 0, threading.Event()
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += self.path == "/health"
        self.send_response(401 if self.path == "/" else 200 if asked <= 3 else 503)
        self.end_headers()
        if asked >= 3:
            ill.set()
    def log_message(self, *args):
        pass
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
if sys.argv[2] == "closed":
    ill.wait()
    server.shutdown()
    server.server_close()
time.sleep(600)
"""


# A server whose engine dies before its first health check: it answers, and calls itself ill.
ILL = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(401 if self.path == "/" else int(sys.argv[2])); self.end_headers()
    def log_message(self, *args): pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""

# A server that is healthy. The second program of its session is stopped when it has been asked three times.
STOPPED = """
import os, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
asked = 0
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        if asked == 3 and sys.argv[2] == "core":
            core.send_signal(signal.SIGSTOP)
        silent = asked > 3 and sys.argv[2] == "silent"
        self.send_response(401 if self.path == "/" else 504 if silent else 200)
        self.end_headers()
    def log_message(self, *args):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def test_a_server_that_ends_is_started_again_and_a_line_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.server.supervisor.HEALTH_EVERY", 0.2)
    port, lines, ready = free_port(), [], []
    command = [sys.executable, "-c", HEALTHY, str(port)]

    def say(line: str) -> None:
        lines.append(line)
        if len(ready) >= 2:
            supervisor.stop()

    supervisor = Supervisor(command, {}, f"http://127.0.0.1:{port}", ready=ready.append, say=say)
    supervisor.run()
    assert len(ready) == 2
    assert "ended with exit code 3; starting it again in 1 s" in lines[0]
    assert "again in 2 s" in lines[1]


def test_a_server_that_never_came_up_is_not_tried_for_ever() -> None:
    supervisor = Supervisor(
        [sys.executable, "-c", "raise SystemExit(7)"], {}, "http://127.0.0.1:9", ready=print, say=print
    )
    with pytest.raises(Exception, match="ended with exit code 7 before it was ready"):
        supervisor.run()


@pytest.mark.parametrize(
    ("status", "said"),
    [(503, "reported errors for 1 s"), (504, "has an engine that did not answer for 120 s")],
)
def test_a_server_whose_engine_dies_before_it_is_ready_is_no_start_that_takes_long(
    status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.server.supervisor.FAILING_LIMIT", 1.0)
    monkeypatch.setattr("lockstep.server.supervisor.START_LIMIT", 20.0)
    port = free_port()
    command = [sys.executable, "-c", ILL, str(port), str(status)]
    with pytest.raises(Exception, match=f"{said} before it was ready"):
        Supervisor(command, {}, f"http://127.0.0.1:{port}", ready=print, say=print).run()


def test_the_files_of_a_server_are_its_owners_alone() -> None:
    command = [sys.executable, "-c", "import os; raise SystemExit(os.umask(0))"]
    with pytest.raises(Exception, match=f"ended with exit code {0o077} "):
        Supervisor(command, {}, "http://127.0.0.1:9", ready=print, say=print).run()


@pytest.mark.parametrize("ill", ["closed", "failing"])
def test_a_server_whose_engine_died_and_that_does_not_end_is_ended(
    ill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's server does this if its engine ends while calls are open: it stops listening, and waits for ever."""
    monkeypatch.setattr("lockstep.server.supervisor.FAILING_LIMIT", 1.0)
    monkeypatch.setattr("lockstep.server.supervisor.HEALTH_EVERY", 0.5)
    port, lines = free_port(), []

    def say(line: str) -> None:
        lines.append(line)
        supervisor.stop()

    command = [sys.executable, "-c", DYING, str(port), ill]
    supervisor = Supervisor(command, {}, f"http://127.0.0.1:{port}", ready=lambda seconds: None, say=say)
    supervisor.run()
    assert lines == ["the server reported errors for 1 s; starting it again in 1 s"]


@pytest.mark.parametrize(
    ("ill", "said"),
    [
        ("core", "had a stopped process for 1 s"),
        ("silent", "has an engine that did not answer for 1 s"),
    ],
)
def test_a_server_whose_engine_answers_nothing_is_ended_although_vllm_calls_it_healthy(
    ill: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.server.supervisor.SILENT_LIMIT", 1.0)
    monkeypatch.setattr("lockstep.server.supervisor.HEALTH_EVERY", 0.2)
    port, lines = free_port(), []

    def say(line: str) -> None:
        lines.append(line)
        supervisor.stop()

    command = [sys.executable, "-c", STOPPED, str(port), ill]
    supervisor = Supervisor(command, {}, f"http://127.0.0.1:{port}", ready=lambda seconds: None, say=say)
    supervisor.run()
    assert lines == [f"the server {said}; starting it again in 1 s"]
