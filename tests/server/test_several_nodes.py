"""A run whose ranks and servers are on hosts of their own: network namespaces (`tests/hosts.py`), joined by a switch.

Two trainer hosts (torchrun) and two server hosts must end with the weights and the metrics of the same run on one
host, whatever happens to links, servers and trainers meanwhile. The death of a trainer host is tested before a
release (`make test-release`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from conftest import VLLM
from forked import Program
from hosts import Host, can_make_hosts, hosts
from long_schedule import kill, newest
from servers import KEY, Server, descendants, free_port, serve
from test_long_schedule import curve, final_weights

from lockstep.server.keys import KEY_VARIABLE

pytestmark = [
    *VLLM,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="only root can make network namespaces"),
]

STEPS = 6
LIMIT = 400.0
REWARDS = """
def score(completion_ids, **_):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


class Cluster:
    """Four hosts: two run a server each, two run a rank each.

    Args:
        home: the folder of the run's files, which all hosts see.
    """

    def __init__(self, model: str, home: Path, held: ExitStack) -> None:
        self.model, self.home, self._held = model, home, held
        self.first, self.second, *places = held.enter_context(hosts("first", "second", "third", "fourth"))
        self.rewards = home / "rewards.py"
        self.rewards.write_text(REWARDS)
        self.servers: list[Server] = []
        for host in places:
            (folder := home / host.name).mkdir()
            served = serve(model, folder, "--max_num_seqs", "16", await_health=False, host=host)
            self.servers.append(held.enter_context(served))
        for server in self.servers:
            server.await_health()
        self.starts = 0

    def start(self, name: str, ranks: Sequence[Host], processes: int = 1, **more: str) -> list[Program]:
        """Start `torchrun` on each of these hosts, as a user would: one command, but for the number of the node."""
        self.starts += 1
        fields = {
            "model_name_or_path": self.model, "dataset_name": "arithmetic", "train_size": "64", "bf16": "false",
            "reward_funcs": f"{self.rewards}:score", "output_dir": str(self.home / name), "vllm_server_timeout": "120",
            "vllm_server_base_url": ",".join(server.url for server in self.servers),
            "vllm_weight_transport": "gloo", "vllm_group_host": ranks[0].address,
            "vllm_importance_sampling_correction": "false", "per_device_train_batch_size": "4", "num_generations": "4",
            "max_completion_length": "16", "max_steps": str(STEPS), "learning_rate": "1e-3", "logging_steps": "1",
            "save_steps": "1", "save_total_limit": "2", **more,
        }  # fmt: skip
        words = [word for key, value in fields.items() for word in (f"--{key}", value)]
        meeting = [
            "--nnodes",
            str(len(ranks)),
            "--master_addr",
            ranks[0].address,
            "--master_port",
            str(free_port()),
        ]
        programs = []
        for number, host in enumerate(ranks):
            launcher = [
                "torch.distributed.run",
                *meeting,
                "--node_rank",
                str(number),
                "--nproc_per_node",
                str(processes),
            ]
            out = self._held.enter_context(self.log(name, number).open("w"))
            command = [sys.executable, "-m", *launcher, "-m", "lockstep.cli.main", "grpo", *words]
            programs.append(Program(command, stdout=out, stderr=out, env={**os.environ, **host.environment}))
        return programs

    def log(self, name: str, node: int) -> Path:
        return self.home / f"{name}-{node}-{self.starts}.log"

    def finish(self, name: str, programs: Sequence[Program]) -> list[int]:
        """Wait for the end of all nodes; returns their exit codes."""
        deadline = time.monotonic() + LIMIT
        try:
            return [program.wait(max(deadline - time.monotonic(), 1)) for program in programs]
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run hung:\n{self.said(name)}")
        finally:
            for program in programs:
                kill_host(program)

    def said(self, name: str) -> str:
        logs = [self.log(name, node) for node in (0, 1)]
        return "\n".join(f"-- {log.name}\n{log.read_text()[-3000:]}" for log in logs if log.exists())

    def check_equal(self, name: str) -> None:
        """Compare a finished run with `whole`: every weight, and every metric that does not depend on the clock."""
        ends = [final_weights(self.home / run, STEPS) for run in ("whole", name)]
        assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
        assert curve(self.home / name) == curve(self.home / "whole")


def await_step(cluster: Cluster, name: str, step: int, programs: Sequence[Program]) -> None:
    deadline = time.monotonic() + LIMIT
    while newest(cluster.home / name) < step:
        ended = [program.poll() for program in programs]
        assert ended == [None] * len(programs), f"{ended}\n{cluster.said(name)}"
        assert time.monotonic() < deadline, cluster.said(name)
        time.sleep(0.02)


def kill_host(program: Program) -> None:
    """Kill a program and all that it started, as a host that loses power."""
    if program.poll() is None:
        kill([program.pid, *descendants(program.pid)], signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster(untied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patched, ExitStack() as held:
        patched.setenv(KEY_VARIABLE, KEY)
        cluster = Cluster(untied_dir, tmp_path_factory.mktemp("nodes"), held)
        # The run that the others are compared with: both ranks on one host, and one server.
        programs = cluster.start("whole", [cluster.first], 2, vllm_server_base_url=cluster.servers[0].url)
        assert cluster.finish("whole", programs) == [0], cluster.said("whole")
        yield cluster


def test_two_trainer_hosts_and_two_server_hosts_equal_one_trainer_host(cluster: Cluster) -> None:
    programs = cluster.start("spread", [cluster.first, cluster.second])
    assert cluster.finish("spread", programs) == [0, 0], cluster.said("spread")
    cluster.check_equal("spread")


Disturbance = Callable[[Cluster], None]


def unplug_a_server(cluster: Cluster) -> None:
    host = cluster.servers[1].host
    assert host is not None
    host.link("down")
    time.sleep(4)
    host.link("up")


def unplug_a_rank(cluster: Cluster) -> None:
    cluster.second.link("down")
    time.sleep(4)
    cluster.second.link("up")


def kill_a_server(cluster: Cluster) -> None:
    cluster.servers[1].kill("api")


def slow_links(cluster: Cluster) -> None:
    for host in (cluster.second, cluster.servers[0].host):
        assert host is not None
        host.limit("20mbit")


@pytest.mark.release
def test_links_that_fall_silent_or_slow_and_a_server_host_that_restarts_change_nothing(
    cluster: Cluster,
) -> None:
    programs = cluster.start("disturbed", [cluster.first, cluster.second])
    for step, disturb in enumerate((unplug_a_server, unplug_a_rank, kill_a_server, slow_links), 1):
        await_step(cluster, "disturbed", step, programs)
        disturb(cluster)
    assert cluster.finish("disturbed", programs) == [0, 0], cluster.said("disturbed")
    cluster.check_equal("disturbed")


@pytest.mark.release
def test_a_trainer_host_that_dies_ends_the_other_one_and_the_same_commands_go_on(cluster: Cluster) -> None:
    programs = cluster.start("resumed", [cluster.first, cluster.second])
    await_step(cluster, "resumed", 2, programs)
    kill_host(programs[1])
    assert cluster.finish("resumed", programs)[0] != 0
    programs = cluster.start("resumed", [cluster.first, cluster.second])
    assert cluster.finish("resumed", programs) == [0, 0], cluster.said("resumed")
    cluster.check_equal("resumed")
