"""Pushes of an adapter alone to vLLM's servers, which several runs may share and which answer requests during a push.

The bytes go through the same transport as pushes of whole weights, into the memory of the workers. vLLM's own
endpoints then load the adapter, and later unload it. The adapter of each push has a new name: the run, this trainer's
session, and the number of the push. A request names its adapter and uses it to its end. The name therefore gives the
weight version of the request's tokens. vLLM's stamp on each token shows that the base model is still the one that was
proven.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from lockstep.contract.adapters import AdapterLimits, NoAdapters, UsedAdapter
from lockstep.contract.probe import decode_floats
from lockstep.contract.tensors import LoadedWeights
from lockstep.engines.servers.calls import ServerCalls
from lockstep.engines.servers.messages import agreed_answers, loaded_from, one_acknowledgement
from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.extras.lora_alone.engine_adapters import AdapterCalls
from lockstep.progress import waiting
from lockstep.weights.wire.transport import WeightTransport

# vLLM needs a path for each adapter. This prefix and the adapter's name take its place (`engines/vllm/port/lora.py`).
PATH = "lockstep:"
_BASE = "base:"
_JOIN = "/"
# Seconds between two attempts to reserve the servers.
_RESERVE_EVERY = 0.1


class ServerAdapters:
    """The adapters of one trainer on its servers.

    Args:
        run: distinguishes this run from other runs on the same servers, and stays the same when the run is resumed.
    """

    def __init__(self, engine: VLLMServer, run: str) -> None:
        self._engine, self._servers = engine, engine.servers
        self._transport: WeightTransport | None = None
        self._adapter_calls = [AdapterCalls(server) for server in engine.servers.all]
        self._run, self._session = run or engine.session, engine.session
        self._pushes, self._coming = 0, ""
        self._lock = threading.Lock()
        self._used: UsedAdapter | None = None
        self._stamp = ""
        # Requests that have not ended, by adapter.
        self.running: Counter[str] = Counter()

    @property
    def name(self) -> str | None:
        """The adapter of new requests; None: they use the base model, or merged weights."""
        return None if self._used is None else self._used.name

    @property
    def limits(self) -> AdapterLimits | None:
        states = [state for workers in self._servers.workers("lockstep_adapters") for state in workers]
        if not all(states):
            return None
        dtypes = {state["dtype"] for state in states}
        if len(dtypes) > 1:
            raise InputError(
                f"the servers keep adapters in {' and '.join(sorted(dtypes))}: start them with the same --lora_dtype"
            )
        return AdapterLimits(min(state["rank"] for state in states), getattr(torch, dtypes.pop()))

    # ---- requests ---------------------------------------------------------------------------------------------------

    @contextmanager
    def used(self) -> Iterator[UsedAdapter | None]:
        """The adapter that one request uses (None: none), which the servers keep at least until the context ends."""
        with self._lock:
            used = self._used
            if used is not None:
                self.running[used.name] += 1
        try:
            yield used
        finally:
            if used is not None:
                with self._lock:
                    self.running[used.name] -= 1

    # ---- base -------------------------------------------------------------------------------------------------------

    def base_digest(self) -> str:
        found = {base["digest"] for workers in self._servers.workers("lockstep_base") for base in workers}
        stamps = set(self._servers.each(lambda server: server.weight_version()))
        digest = found.pop() if len(found) == 1 else ""
        if digest and stamps == {_BASE + digest}:
            self._stamp = _BASE + digest
            return digest
        return ""

    def check_base_replaceable(self) -> None:
        for number, names in enumerate(self.held()):
            if others := sorted({name.partition(_JOIN)[0] for name in names} - {self._run}):
                raise InputError(
                    f"the server{_at_url(self._servers.name_of(number))} holds adapters of {len(others)} other "
                    f"{'run' if len(others) == 1 else 'runs'}, and its base model is not this trainer's base "
                    f"model: runs that "
                    "share a server need the same base model in the same dtype; use another server for this run"
                )

    @contextmanager
    def reserved(self) -> Iterator[None]:
        deadline = time.monotonic() + self._engine.timeout
        with waiting("another run, which pushes to the same server", self._engine.timeout):
            while not self._reserve(self._engine.timeout):
                self._reserve(0.0)
                if time.monotonic() > deadline:
                    raise InputError(
                        "another run is pushing to the same server, and its push does not end; start this run "
                        "again later"
                    )
                # Two runs may each have reserved some of the servers. The random wait keeps them from colliding again.
                time.sleep(_RESERVE_EVERY * (1 + secrets.randbelow(100) / 100))
        try:
            yield
        except BaseException:
            # The caller gets the first error. If a server is lost, its reservation ends by itself.
            with suppress(LockstepError):
                self._reserve(0.0)
            raise
        self._reserve(0.0)

    def _reserve(self, seconds: float) -> bool:
        found = self._servers.workers("lockstep_reserve", self._run, str(seconds))
        return all(one["granted"] for workers in found for one in workers)

    def commit_base(self, digest: str) -> None:
        self._stamp = _BASE + digest

        def commit(server: ServerCalls) -> str:
            server.call("POST", "/update_weight_version", {"new_version": self._stamp})
            return server.weight_version()

        found = self._servers.each(commit)
        if set(found) != {self._stamp}:
            raise ProofError(
                "version",
                f"the stamp {self._stamp!r} was set, but the servers report {', '.join(sorted(set(found)))}",
                "another program sets versions on these servers",
                "let one trainer own these servers, or let all of them train adapters of the same base "
                "(vllm_enable_lora)",
            )
        self._servers.each(lambda server: server.call("POST", "/resume"))

    # ---- adapter ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._engine.refuse_requests()
        self.use_none()
        with self._lock:
            kept = {name for name, count in self.running.items() if count > 0}
            self.running = Counter({name: self.running[name] for name in kept})
        own = self._run + _JOIN
        # No request uses the adapters of an earlier session of this run.
        for server_names in self.held():
            self._drop([name for name in server_names if name.startswith(own) and name not in kept])

    def load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        self._check_room()
        self._pushes += 1
        name = self._coming = _JOIN.join((self._run, self._session, f"{version}.{self._pushes}"))
        if self._transport is None:
            self._transport = self._engine.choose(self._servers.all)
        for calls in self._adapter_calls:
            calls.begin(name)
        try:
            self._transport.send(tensors, self._adapter_calls)
        except RuntimeError as error:
            if isinstance(error, LockstepError):
                raise
            # gloo and NCCL raise a plain RuntimeError for a peer that is late or gone.
            raise self._engine.lost(f"the adapter did not reach the servers: {str(error)[:300]}") from error
        arrived = [
            loaded_from(found, self._servers.name_of(number))
            for number, calls in enumerate(self._adapter_calls)
            for found in calls.arrived
        ]
        self._servers.each(lambda server: _load(server, name))
        return one_acknowledgement(arrived)

    def read_back(self) -> LoadedWeights:
        return one_acknowledgement(
            [
                replace(
                    loaded_from(found, self._servers.name_of(number)), untouched=tuple(sorted(in_no_worker))
                )
                for number, workers in enumerate(self._servers.workers("lockstep_held_adapter", self._coming))
                # Each stage of a pipeline has some of the layers.
                for in_no_worker in [set.intersection(*(set(found["untouched"]) for found in workers))]
                for found in workers
            ]
        )

    def commit(self, version: int) -> None:
        with self._lock:
            self._used = UsedAdapter(self._coming, version, self._stamp)
        self._engine.open_requests(version)

    def probe(self, layers: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
        assert self.name is not None
        answers: dict[str, torch.Tensor] = {}
        arguments = self.name, json.dumps(list(layers)), str(seed)
        for number, workers in enumerate(self._servers.workers("lockstep_probe_adapter", *arguments)):
            server = self._servers.name_of(number)
            for layer, text in agreed_answers(workers, f"the server at {server or 'the URL given'}").items():
                answers[f"{server}/{layer}" if server else layer] = decode_floats(text).view(3, -1)
        return answers

    def held(self) -> list[list[str]]:
        """The names of the adapters that each server holds."""
        return [workers[0]["names"] for workers in self._servers.workers("lockstep_adapters")]

    def _drop(self, names: Sequence[str]) -> None:
        if names:
            self._servers.each(lambda server: _unload(server, names))
            self._servers.workers("lockstep_drop_adapters", json.dumps(list(names)))

    def _check_room(self) -> None:
        for number, workers in enumerate(self._servers.workers("lockstep_adapters")):
            for state in workers:
                if len(state["names"]) >= state["room"]:
                    own = sum(name.startswith(self._run + _JOIN) for name in state["names"])
                    raise InputError(
                        f"the server{_at_url(self._servers.name_of(number))} holds {len(state['names'])} "
                        f"adapters ({own} of this run) and has no room for another one: start it with a "
                        "larger --max_cpu_loras, or end the other runs"
                    )

    def check_whole_push_allowed(self) -> None:
        """Check that whole weights may be pushed. vLLM drops all adapters when it loads whole weights."""
        for server in self._servers.all:
            names = server.workers("lockstep_adapters")[0]["names"] if server.takes_adapters else []
            if any(not name.startswith(self._run + _JOIN) for name in names):
                raise InputError(
                    f"the server at {server.url} holds {len(names)} adapters of other runs "
                    f"(vllm_enable_lora), which a push of "
                    "whole weights would remove: use another server, or restart this one when those runs have ended"
                )

    def use_none(self) -> None:
        """Let new requests use no adapter."""
        with self._lock:
            self._used = None

    def forget(self) -> None:
        """Drop all agreements with the servers, because they may have been started again."""
        self.use_none()
        if self._transport is not None:
            self._transport.forget()

    def leave_server(self, server: ServerCalls) -> None:
        """Remove this run's adapters from a server that leaves, except the adapters of requests that still run."""
        if not server.takes_adapters:
            return
        # The server may be gone already.
        with suppress(LockstepError):
            held = server.workers("lockstep_adapters")[0]["names"]
            own = [name for name in held if name.startswith(self._run + _JOIN) and not self.running[name]]
            _unload(server, own)
            server.workers("lockstep_drop_adapters", json.dumps(own))

    def forget_servers(self) -> None:
        """The engine has other servers now."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self._adapter_calls = [AdapterCalls(server) for server in self._servers.all]

    def name_as(self, other: ServerAdapters | NoAdapters) -> None:
        """Give the next push the name of another engine's last one: its requests then find their adapter here."""
        if isinstance(other, ServerAdapters):
            self._session, self._pushes = other._session, other._pushes - 1

    def close(self) -> None:
        """Remove this run's adapters from the servers, if they answer, and release the transport."""
        if self._used is not None:
            with suppress(LockstepError):
                self._drop([self._used.name])
        self.use_none()
        if self._transport is not None:
            self._transport.close()


def _load(server: ServerCalls, name: str) -> None:
    try:
        server.call(
            "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": PATH + name}, plain=True
        )
    except InputError as error:
        raise InputError(
            f"the server at {server.url} does not load adapters: start it with 'lockstep serve MODEL "
            f"--enable_lora' (vLLM's own "
            "server also needs the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)"
        ) from error


def _unload(server: ServerCalls, names: Sequence[str]) -> None:
    for name in names:
        # The API process does not know an adapter whose push failed before its `_load`. It then refuses the call.
        with suppress(InputError):
            server.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, plain=True)


def _at_url(name: str) -> str:
    return f" at {name}" if name else ""
