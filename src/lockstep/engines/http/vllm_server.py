"""One or several vLLM servers behind the engine protocol. Each request goes to the least busy server; weights go to all servers.

Requests come from an inbox (`engines/inbox.py`) and are sent over HTTP as ids. Weights go through a transport of `sync/wire/`. When
a server does not answer, the engine raises `EngineLost`. Before it sends requests again, every server must answer, pass the checks
of `engines/http/server_checks.py`, and receive the weights again.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar

import torch

from lockstep.engines.adapters.servers import ServerAdapters, Servers
from lockstep.engines.answers import check_request, check_requests, check_scores, check_scoring
from lockstep.engines.http.call_loop import CallLoop, Pending
from lockstep.engines.http.server_calls import HOW_TO_START, ServerCalls
from lockstep.engines.http.server_checks import HEALTH_EVERY, check_servers
from lockstep.engines.http.server_messages import agreed_answers, loaded_from
from lockstep.engines.http.server_requests import ServerRequests
from lockstep.engines.http.transport import WeightTransport, finish_all
from lockstep.engines.inbox import Inbox, answer_all
from lockstep.engines.probe import EngineModules, ProbedModule, decode_floats
from lockstep.engines.protocol import (
    Completion,
    EngineSettings,
    GenerationRequest,
    LoadedWeights,
    OnAnswer,
    RequestKey,
)
from lockstep.engines.vllm.settings import changed_settings
from lockstep.errors import EngineLost, InputError, LockstepError, ProofError

T = TypeVar("T")
TransportChoice = Callable[[Sequence[ServerCalls]], WeightTransport]

# Seconds between two questions whether a server is paused.
_PAUSED_EVERY = 0.001


class VLLMServer:
    """One or more vLLM servers that hold the same weights.

    Args:
        urls: base URL of each server.
        keys: key of each server; None for a server without a guard.
        timeout: seconds that a call or the wait for a server may take.
        generation_timeouts: the time limit of one request for a completion, and of the wait for requests, as a multiple of
            `timeout`.
        transport: chooses the weight transport. It is called after the servers have answered.
        run: distinguishes a run that trains an adapter from others on the same servers. It stays the same when the run is resumed.

    Attributes:
        session: distinguishes this trainer's weights from the weights of other trainers and of earlier runs.

    Raises:
        InputError: a server does not accept the key, or was started without an option that training needs.
        LockstepError: a server did not answer in time.
    """

    def __init__(
        self,
        urls: Sequence[str],
        keys: Sequence[str | None],
        *,
        timeout: float,
        transport: TransportChoice,
        generation_timeouts: float = 1.0,
        run: str = "",
    ) -> None:
        self._timeout, self._generation_timeouts = timeout, generation_timeouts
        self._loop = CallLoop()
        self._servers = [
            ServerCalls(url, key, timeout, self._loop, self.recover) for url, key in zip(urls, keys, strict=True)
        ]
        self._pool = ThreadPoolExecutor(max(len(self._servers), 1), thread_name_prefix="lockstep-servers")
        self._beginning: list[Future[Pending]] = []
        self._closed = threading.Event()
        self._version: int | None = None
        self._wire_dtype: torch.dtype | None = None
        self.session = secrets.token_hex(6)
        self._stamps: dict[str, int] = {}
        parts = Servers(
            self._servers,
            self._each,
            self._workers,
            self._lost,
            self._name,
            timeout,
            self._refuse_requests,
            self._open_requests,
        )
        self.adapters = ServerAdapters(parts, transport, run, self.session)
        self._requests = ServerRequests(self._servers, self._stamps, self.recover, self.adapters)
        self._committed: list[int] = []
        self._transport: WeightTransport | None = None
        try:
            self._settings, self._wire_dtype = self._check()
            self._transport = transport(self._servers)
        except EngineLost as lost:
            # Nothing can be recovered yet. If a healthy server has refused a call, its workers do not have our methods.
            self.close()
            raise (InputError(f"{lost}. {HOW_TO_START}") if lost.refused else LockstepError(str(lost))) from lost
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int | None:
        return self._version

    def settings(self) -> EngineSettings:
        return self._settings

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype of the servers' parameters. Wider tensors are cast to it before they are sent. None: there are several."""
        return self._wire_dtype

    @property
    def scores_first(self) -> bool:
        """Whether the servers answer scoring requests before the generation requests that wait."""
        return all(server.takes_priorities for server in self._servers)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[GenerationRequest], on_answer: OnAnswer | None = None
    ) -> dict[RequestKey, Completion]:
        """Answer every request. If weights are pushed meanwhile, the tokens of one completion may have several versions."""
        check_requests(requests, self._version, self._settings.max_model_len, self._settings.vocab_size)
        return answer_all(self.serve, requests, on_answer)

    def serve(self, inbox: Inbox) -> None:
        """Send each request in a separate call. Weights may be pushed meanwhile."""

        def begin(request: GenerationRequest) -> Callable[[], Sequence[int]]:
            check_request(request, self._version, self._settings.max_model_len)
            since = len(self._committed) - 1
            return lambda: self._committed[since:]

        limit = self._timeout * self._generation_timeouts
        self._requests.serve(inbox, self._loop, begin, limit, self._settings.vocab_size)

    def score(self, sequences: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[float, ...]]:
        return self.submit_scores(sequences).result()

    def submit_scores(
        self, sequences: Mapping[str, tuple[int, ...]], *, limit: float | None = None
    ) -> Pending[Any, dict[str, tuple[float, ...]]]:
        """Begin `score` without waiting for it.

        Args:
            limit: seconds for all sequences together; None: `timeout`.
        """
        check_scoring(sequences, self._version, self._settings.max_model_len)

        def checked(answers: list[tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
            scores = dict(zip(sequences, answers, strict=True))
            check_scores(sequences, scores)
            return scores

        stamp = self._stamp(self._committed[-1])
        return self._loop.start(self._requests.score(list(sequences.values()), stamp, limit or self._timeout), checked)

    # ---- proofs -----------------------------------------------------------------------------------------------------

    def modules(self, checkpoint_names: tuple[str, ...]) -> EngineModules:
        probed: dict[str, ProbedModule] = {}
        unreached: list[str] = []
        for number, workers in enumerate(self._workers("lockstep_modules", json.dumps(checkpoint_names))):
            # Workers of one server have different layers (pipeline) or different parts of the same layers (tensor parallelism).
            for entry in (entry for found in workers for entry in found["probed"]):
                name = self._prefix(number) + entry["name"]
                probed[name] = ProbedModule(**{**entry, "name": name, "tensors": tuple(entry["tensors"])})
            unreached += [self._prefix(number) + name for found in workers for name in found["unreached"]]
        return EngineModules(probed, tuple(dict.fromkeys(unreached)))

    def probe(self, names: Sequence[str], seed: int, *, every: bool) -> dict[str, torch.Tensor]:
        def outputs_of(number: int) -> dict[str, str]:
            server = self._servers[number]
            own = [name for name in names if name.rpartition("/")[0] == self._name(number)]
            arguments = json.dumps(own), str(seed), json.dumps(every), self.adapters.name or ""
            return agreed_answers(server.workers("lockstep_probe", *arguments), server.url) if own else {}

        answers = self._each_number(outputs_of)
        return {name: decode_floats(text) for found in answers for name, text in found.items()}

    def server_of(self, key: RequestKey) -> str:
        """URL of the server that has answered a request; empty if there is only one server, or if the request is too old."""
        number = self._requests.answered.get(key[:2])
        return "" if number is None else self._name(number)

    def _name(self, number: int) -> str:
        """A server's name in the names of modules and in errors: its URL; empty if there is only one server."""
        return self._servers[number].url if len(self._servers) > 1 else ""

    def _prefix(self, number: int) -> str:
        """Prefix of the names of a server's modules; empty if there is only one server."""
        return f"{self._name(number)}/" if len(self._servers) > 1 else ""

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _refuse_requests(self) -> None:
        self._version = None

    def _lost(self, what: str) -> EngineLost:
        return EngineLost(what, self.recover)

    def _open_requests(self, version: int) -> None:
        """Accept requests for a version whose weights are the base model with an adapter."""
        self._stamps[self._stamp(version)] = version
        self._committed.append(version)
        self._version = version

    def begin_update(self) -> None:
        """Pause the servers. Running requests stay, and continue with the new weights after the commit.

        This method only starts the calls; `load` waits for their answers.
        """
        self._version = None
        self.adapters.check_whole_push_allowed()
        self.adapters.use_none()
        self._await_pauses()
        self._beginning = [self._pool.submit(_begin, server) for server in self._servers]
        for server, beginning in zip(self._servers, self._beginning, strict=True):
            server.beginning = beginning

    def _await_pauses(self) -> None:
        """Wait until every call that begins an update has ended, with or without an error. A pause after that would never end."""
        wait(self._beginning)
        for beginning in self._beginning:
            if beginning.exception() is None:
                beginning.result().wait()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        assert self._transport is not None
        try:
            self._transport.send(tensors, self._servers, base)
        except BaseException as error:
            self._await_pauses()
            if isinstance(error, RuntimeError) and not isinstance(error, LockstepError):
                # gloo raises a plain RuntimeError for a peer that is late or gone.
                raise self._lost(f"the weights did not reach the servers: {str(error)[:300]}") from error
            raise
        for pause in finish_all(self._beginning):
            pause.result()
        self._each(lambda server: server.call("POST", "/finish_weight_update", {}))
        first, *others = [
            loaded_from(found, self._name(number))
            for number, workers in enumerate(self._workers("lockstep_acknowledgement"))
            for found in workers
        ]
        return replace(first, others=tuple(others))

    def reset_caches(self) -> bool:
        """Drop all caches. Running requests compute their keys and values again with the new weights."""
        done = self._each(lambda server: server.reset_caches())
        if len(self._servers) > 1 and not all(done):
            refused = [server.url for server, is_done in zip(self._servers, done, strict=True) if not is_done]
            raise ProofError(
                "caches",
                f"the server at {', '.join(refused)} did not confirm the reset of its caches",
                "the server still uses cached keys and values of older weights",
                "look at the log of that server; restart it, and resume from the last checkpoint",
            )
        return all(done)

    def commit_version(self, version: int) -> None:
        stamp = self._stamp(version)

        def commit(server: ServerCalls) -> str:
            server.call("POST", "/update_weight_version", {"new_version": stamp})
            return server.weight_version()

        found = self._each(commit)
        if set(found) != {stamp}:
            raise ProofError(
                "version",
                f"weight version {stamp!r} was set, but "
                + ", ".join(
                    f"the server at {server.url} reports {one!r}"
                    for server, one in zip(self._servers, found, strict=True)
                    if one != stamp
                ),
                "another program sets versions on these servers",
                "let one trainer own these servers",
            )
        self._stamps[stamp] = version
        self._committed.append(version)
        self._each(lambda server: server.call("POST", "/resume"))
        self._version = version

    def _stamp(self, version: int) -> str:
        """The stamp by which the servers know a weight version of this trainer."""
        return f"{self.session}:{version}"

    # ---- life -------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Drop all agreements with the servers, and wait until every server answers again.

        Raises:
            LockstepError: a server did not come back within the time limit.
            ProofError: a server came back with other settings.
        """
        self._version = None
        self._requests.forget_pictures()
        self.adapters.forget()
        if self._transport is not None:
            self._transport.forget()
        before, deadline = self._settings, time.monotonic() + self._timeout
        while True:
            try:
                self._settings, self._wire_dtype = self._check()
                break
            except EngineLost as lost:
                # A server answered the health check and then failed. It may be stopping or starting.
                if self._closed.wait(HEALTH_EVERY) or time.monotonic() > deadline:
                    raise LockstepError(f"{lost}; the trainer waited for it, but it did not stay healthy") from lost
        if self._settings != before:
            raise ProofError(
                "handshake",
                f"a server came back with other settings: {changed_settings(before, self._settings)}",
                "the server was started again with another command line or model",
                "start it with the earlier command line, and resume from the last checkpoint",
            )

    def close(self) -> None:
        """Disconnect from the servers. They keep running."""
        self._version = None
        self.adapters.close()
        self._closed.set()
        if self._transport is not None:
            self._transport.close()
        self._loop.close()
        self._pool.shutdown(wait=False)

    def _check(self) -> tuple[EngineSettings, torch.dtype | None]:
        return check_servers(self._servers, self._each, self._timeout, self._closed)

    def _workers(self, method: str, *args: str) -> list[list[Any]]:
        """Call a method of all workers of all servers. Returns one list of answers per server."""
        return self._each(lambda server: server.workers(method, *args))

    def _each(self, call: Callable[[ServerCalls], T]) -> list[T]:
        return self._each_number(lambda number: call(self._servers[number]))

    def _each_number(self, call: Callable[[int], T]) -> list[T]:
        """Call a function for all servers at once. All calls have ended before an error is raised."""
        return finish_all([self._pool.submit(call, number) for number in range(len(self._servers))])


def _begin(server: ServerCalls) -> Pending[Any, Any]:
    """Pause a server and begin an update.

    Returns:
        The call that pauses. vLLM answers it only 20 ms after the server has stopped.
    """
    # By default the pause would also drop the pictures that requests need. `reset_caches` drops what depends on weights.
    pause = server.begin("POST", "/pause", mode="keep", clear_cache="false")
    try:
        workers, paused = server.together(
            lambda: server.ask_workers("lockstep_update"), lambda: server.ask("GET", "/is_paused")
        )
        while paused != {"is_paused": True} and not pause.done():
            time.sleep(_PAUSED_EVERY)
            paused = server.call("GET", "/is_paused")
        # Workers in separate processes may still run a step that began before the pause.
        if server.world_size > 1 or pause.done():
            pause.result()
        if any(worker["open"] for worker in workers):
            # An earlier trainer left this update open, and vLLM would refuse every further update.
            server.call("POST", "/finish_weight_update", {})
        server.call("POST", "/start_weight_update")
    except BaseException:
        pause.wait()
        raise
    return pause
