"""Nothing of a real server is open but its health."""

from __future__ import annotations

import base64
import os
import pickle
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from conftest import VLLM
from servers import KEY, Server, connect
from tiny import make_model

from lockstep.sync.push import push_weights

pytestmark = VLLM

PATHS = [
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/ping"),
    ("GET", "/server_info"),
    ("GET", "/weight_info"),
    ("GET", "/is_paused"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/v1/completions"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/sleep"),
    ("POST", "/collective_rpc"),
    ("POST", "/update_weights"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/health/../server_info"),
    ("GET", "//server_info"),
    ("GET", "/health/"),
    ("OPTIONS", "/server_info"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}])
def test_no_path_answers_without_the_key(server: Server, method: str, path: str, header: dict[str, str]) -> None:
    answer = httpx.request(method, server.url + path, headers=header, trust_env=False)
    assert answer.status_code == 401
    assert "key" in answer.json()["error"]


def test_health_is_open_and_the_key_opens_the_rest(server: Server) -> None:
    assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
    answer = httpx.get(server.url + "/weight_info", headers={"Authorization": f"Bearer {KEY}"}, trust_env=False)
    assert answer.status_code == 200


def test_none_of_its_processes_listens_beyond_this_machine(server: Server) -> None:
    sockets = set()
    for pid in server.processes.values():
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
    rows = [row.split() for t in ("tcp", "tcp6") for row in Path(f"/proc/net/{t}").read_text().splitlines()[1:]]
    listening = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}
    # 127.0.0.1, and ::1.
    assert listening
    assert listening <= {"0100007F", "00000000000000000000000001000000"}


def test_the_key_is_in_no_list_of_processes(server: Server) -> None:
    for pid in server.processes.values():
        assert KEY not in Path(f"/proc/{pid}/cmdline").read_text()


class Trace:
    """Leaves a file behind when it is unpickled."""

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
        return httpx.post(server.url + where, json=body, headers=headers, trust_env=False, timeout=60).status_code

    assert post("/start_weight_update", {}) == 200
    for info in ({"ipc_handles_pickled": pickled}, {"transport": "shared_memory", "tensors": [pickled]}):
        assert post("/update_weights", {"update_info": info}) >= 400
    for method in ("lockstep_probe", "lockstep_modules"):
        assert post("/collective_rpc", {"method": method, "args": [pickled, "0", "true"]}) >= 400
    assert not path.exists()
    # And the next trainer finds a server that works.
    engine = connect(server.url)
    push_weights(make_model(), engine, 1)
    engine.close()
