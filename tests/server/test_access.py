"""Only the health path of a real server is open."""

from __future__ import annotations

import base64
import os
import pickle
import re
from contextlib import suppress
from pathlib import Path
from typing import get_args

import httpx
import pytest
import torch
from conftest import VLLM
from servers import KEY, Server, connect
from tiny import make_model

from lockstep.engines.servers.calls import HEALTH
from lockstep.server.command import ServeOptions, command_line
from lockstep.server.keys import KEY_VARIABLE
from lockstep.weights.push import push_weights

pytestmark = VLLM

# Spellings of paths that a guard and a router might understand differently.
ODD = [
    ("GET", "/"),
    ("POST", "/health/../server_info"),
    ("GET", "//server_info"),
    ("GET", "/health/"),
    ("GET", "/%68ealth/../server_info"),
    ("OPTIONS", "/server_info"),
    ("GET", "/nothing/is/here"),
]
WRONG = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}]
UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}


@pytest.fixture(scope="module")
def routes(untied_dir: str) -> list[tuple[str, str]]:
    """Every method and path of vLLM's own application, made like the server's application, for a model of any task."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.tasks import SupportedTask

    from lockstep.engines.vllm.port.engine import server_parser

    options = ServeOptions(untied_dir, "127.0.0.1", 8000, torch.float32, 64, 4, 1, 0.5)
    words = server_parser().parse_args(command_line(options)[3:])
    tasks = [task for kind in get_args(SupportedTask) for task in get_args(kind) or [kind]]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_SERVER_DEV_MODE", "1")
        environment.setenv(KEY_VARIABLE, KEY)
        app = build_app(words, tuple(tasks))
    found = [
        (method, re.sub(r"{.*?}", "x", route.path))
        for route in app.routes
        for method in sorted(getattr(route, "methods", None) or ["GET"])
    ]
    return [route for route in found if route[1] != HEALTH]


def test_no_route_of_vllms_answers_without_the_key(server: Server, routes: list[tuple[str, str]]) -> None:
    assert len(routes) > 40
    assert {"/collective_rpc", "/update_weights", "/pause", "/metrics", "/v1/completions"} <= {
        p for _, p in routes
    }
    with httpx.Client(trust_env=False) as client:
        for method, path in [*routes, *ODD]:
            for shown in WRONG:
                answer = client.request(method, server.url + path, headers=shown)
                assert answer.status_code == 401, (method, path, shown)
                assert method == "HEAD" or "key" in answer.json()["error"]


def test_no_websocket_opens_without_the_key(server: Server, routes: list[tuple[str, str]]) -> None:
    upgrade = UPGRADE | {"Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode()}
    with httpx.Client(trust_env=False) as client:
        for path in dict.fromkeys(path for _, path in routes):
            for shown in WRONG:
                assert client.get(server.url + path, headers=upgrade | shown).status_code in (401, 403), path


def test_the_routes_are_those_that_the_server_has(server: Server, routes: list[tuple[str, str]]) -> None:
    """Send a method that no route takes: an existing path refuses it, and nothing is started."""
    key = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(trust_env=False, headers=key) as client:
        there = {
            path for _, path in routes if client.request("PROPFIND", server.url + path).status_code == 405
        }
    assert {"/collective_rpc", "/update_weights", "/pause", "/resume", "/inference/v1/generate"} <= there


def test_health_is_open_and_the_key_opens_the_rest(server: Server) -> None:
    assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
    answer = httpx.get(
        server.url + "/weight_info", headers={"Authorization": f"Bearer {KEY}"}, trust_env=False
    )
    assert answer.status_code == 200


def test_the_key_calls_no_method_of_vllms_workers(server: Server) -> None:
    with httpx.Client(
        trust_env=False, headers={"Authorization": f"Bearer {KEY}"}, follow_redirects=True
    ) as client:
        for path in (
            "/collective_rpc",
            "/collective_rpc/",
            "/%63ollective_rpc",
            "/collective_rpc?method=lockstep_state",
        ):
            for method in ("shutdown", "get_model", "reset_weights", "lockstep"):
                assert client.post(server.url + path, json={"method": method}).status_code == 403, (
                    path,
                    method,
                )
        alive = client.post(server.url + "/collective_rpc", json={"method": "lockstep_alive"})
        assert alive.json() == {"results": [{}]}


def test_none_of_its_processes_listens_beyond_this_machine(server: Server) -> None:
    sockets = set()
    for pid in server.processes.values():
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
    rows = [
        row.split()
        for t in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{t}").read_text(encoding="utf-8").splitlines()[1:]
    ]
    listening = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}
    # 127.0.0.1, and ::1.
    assert listening
    assert listening <= {"0100007F", "00000000000000000000000001000000"}


def test_the_key_is_in_no_list_of_processes(server: Server) -> None:
    for pid in server.processes.values():
        assert KEY not in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")


class Trace:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def test_nothing_is_unpickled_whatever_the_servers_environment_says(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "unpickled"
    pickled = base64.b64encode(pickle.dumps(Trace(str(path)))).decode()
    pickle.loads(base64.b64decode(pickled)).close()
    assert path.exists()
    path.unlink()
    headers = {"Authorization": f"Bearer {KEY}"}

    def post(where: str, body: dict) -> int:
        return httpx.post(
            server.url + where, json=body, headers=headers, trust_env=False, timeout=60
        ).status_code

    assert post("/start_weight_update", {}) == 200
    for info in ({"ipc_handles_pickled": pickled}, {"transport": "shared_memory", "tensors": [pickled]}):
        assert post("/update_weights", {"update_info": info}) >= 400
    for method in ("lockstep_probe", "lockstep_modules"):
        assert post("/collective_rpc", {"method": method, "args": [pickled, "0", "true"]}) >= 400
    assert not path.exists()
    # The next trainer finds a working server.
    engine = connect(server.url)
    push_weights(make_model(), engine, 1)
    engine.close()
