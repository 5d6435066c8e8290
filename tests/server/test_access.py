"""Nothing of a real server is open but its health."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from conftest import VLLM
from servers import KEY, Server

from lockstep.server.command import WEIGHT_TRANSFER_BACKEND

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


def test_the_server_listens_on_this_machine_only(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    listening = {
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }
    own = {address for address in listening if int(address.rpartition(":")[2], 16) == port}
    assert own == {f"0100007F:{port:04X}"}


def test_the_key_is_in_no_list_of_processes(server: Server) -> None:
    for pid in server.processes.values():
        assert KEY not in Path(f"/proc/{pid}/cmdline").read_text()


def test_pickled_weights_are_refused(server: Server) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"update_info": {"transport": WEIGHT_TRANSFER_BACKEND, "ipc_handles_pickled": "gASVAAAA"}}
    httpx.post(server.url + "/start_weight_update", headers=headers, trust_env=False)
    answer = httpx.post(server.url + "/update_weights", json=body, headers=headers, trust_env=False)
    assert answer.status_code >= 400
