"""Network namespaces as hosts: each has an address of its own and a link to one switch.

Nothing else can be reached from them.

A program enters its host before it imports anything of its own (`HOST`, read by `fork_server.py`). All processes that
it starts are in the same namespace. The kernel here has no `netem`, so a link can be slow (`tbf`) or down, but it
cannot lose single packets.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

HOST = "LOCKSTEP_TESTS_HOST"
T = TypeVar("T")
_NETWORK, _NAMES = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS


class Host:
    """One host of `hosts`.

    Attributes:
        name: of its namespace.
        address: of its only interface, `eth0`.
    """

    def __init__(self, name: str, switch: str, number: int) -> None:
        self.name, self.address = name, f"10.77.0.{number}"
        self._switch, self._port = switch, f"port{number}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a program starts on this host. gloo would look for the address of its name."""
        return {HOST: self.name, "GLOO_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": self.address}

    def link(self, state: str) -> None:
        """Pull the plug (`down`), or put it back (`up`). Programs on the host notice nothing but silence."""
        _ip("-n", self._switch, "link", "set", self._port, state)

    def limit(self, rate: str) -> None:
        """Make the way to this host slow, for example `100mbit`."""
        words = ["tc", "qdisc", "replace", "dev", self._port, "root", "tbf"]
        _ip("netns", "exec", self._switch, *words, "rate", rate, "burst", "64kbit", "latency", "100ms")

    def do(self, work: Callable[[], T]) -> T:
        """Call a function in a thread that is on this host."""
        found: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                enter(self.name)
                found.append(work())
            except BaseException as error:  # noqa: BLE001 - it is raised again below
                failed.append(error)

        worker = threading.Thread(target=run)
        worker.start()
        worker.join()
        for error in failed:
            raise error
        return found[0]


@contextmanager
def hosts(*names: str) -> Iterator[list[Host]]:
    """Hosts of these names, joined by a switch. Their namespaces are removed at the end.

    Raises:
        PermissionError: this process must not make namespaces.
    """
    mark = f"lockstep-{os.getpid()}"
    switch, made = f"{mark}-switch", []
    try:
        _ip("netns", "add", switch)
        made.append(switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        found = []
        for number, name in enumerate(names, 1):
            host = Host(f"{mark}-{name}", switch, number)
            _ip("netns", "add", host.name)
            made.append(host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            ends = ["link", "add", "eth0", "type", "veth", "peer", "name", f"port{number}", "netns", switch]
            _ip("-n", host.name, *ends)
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", switch, "link", "set", f"port{number}", "master", "bridge")
            _ip("-n", switch, "link", "set", f"port{number}", "up")
            found.append(host)
        yield found
    finally:
        for name in made:
            _ip("netns", "del", name)


@functools.cache
def can_make_hosts() -> bool:
    """Whether this process may make namespaces (root with the programs of iproute2)."""
    try:
        with hosts("try"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def enter(name: str) -> None:
    """Put this thread, and what it starts, into a namespace that `ip netns` has made.

    The host gets the namespace's name.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open(encoding="utf-8") as namespace:
        if libc.setns(namespace.fileno(), _NETWORK) or libc.unshare(_NAMES):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
    socket.sethostname(name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
