"""One or several vLLM servers behind the engine protocol.

Each request goes to the least busy server; weights go to all servers, through a transport of `weights/wire/`. When a
server does not answer, the engine raises `EngineLost`. Before it sends requests again, the server must answer, pass the
checks of `engines/servers/set.py`, and receive the weights again. A server that does not come back in time leaves, if
another one remains. Servers can also leave and join between two pushes.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lockstep.contract.adapters import NoAdapters
from lockstep.contract.inbox import (
    Inbox,
    answer_all,
    check_request,
    check_requests,
    check_scores,
    check_scoring,
)
from lockstep.contract.probe import EngineModules, HeldPart, ProbedModule, decode_floats
from lockstep.contract.protocol import Completion, EngineSettings, GenerationRequest, OnAnswer, RequestKey
from lockstep.contract.tensors import LoadedWeights, dtype_name
from lockstep.engines.servers.calls import HOW_TO_START, ServerCalls
from lockstep.engines.servers.messages import agreed_answers, loaded_by, one_acknowledgement
from lockstep.engines.servers.requests import ServerRequests
from lockstep.engines.servers.set import HEALTH_EVERY, Pauses, ServerSet, agreed_settings, unreachable
from lockstep.engines.vllm.port.engine import changed_settings
from lockstep.errors import EngineLost, InputError, LockstepError, ProofError
from lockstep.extensions import ADAPTERS, load
from lockstep.progress import waiting
from lockstep.threads import CallLoop, Pending
from lockstep.weights.wire.transport import WeightTransport

TransportChoice = Callable[[Sequence[ServerCalls]], WeightTransport]


class VLLMServer:
    """One or more vLLM servers that hold the same weights.

    Args:
        urls: base URL of each server.
        keys: key of each server; None for a server without a guard.
        timeout: seconds that a call or the wait for a server may take.
        generation_timeouts: the time limit of one request for a completion, and of the wait for requests, as a
            multiple of `timeout`.
        transport: chooses the weight transport. It is called after the servers have answered.
        key_now: reads the key of the server with a URL again (`ServerCalls`).
        run: distinguishes a run that trains an adapter from others on the same servers. It stays the same when the
            run is resumed.

    Attributes:
        session: distinguishes this trainer's weights from the weights of other trainers and of earlier runs.
        servers: the servers that the engine has.
        is_wanted: whether the run should still have the server with this URL. The engine does not wait for a lost
            server that it should not have.

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
        key_now: Callable[[str], str | None] = lambda url: None,
    ) -> None:
        self.timeout, self.generation_timeouts, self.choose = timeout, generation_timeouts, transport
        self.loop = CallLoop()
        self.servers = ServerSet(
            [
                ServerCalls(url, key, timeout, self.loop, self.recover, partial(key_now, url))
                for url, key in zip(urls, keys, strict=True)
            ]
        )
        self._servers = self.servers.all
        self.pauses = Pauses(self.servers)
        self._closed = threading.Event()
        self._version: int | None = None
        self._wire_dtype: torch.dtype | None = None
        self.session = secrets.token_hex(6)
        self.is_wanted: Callable[[str], bool] = lambda url: True
        self._stamps: dict[str, int] = {}
        self._run, self.adapters = run, NoAdapters()
        self.requests = ServerRequests(
            self._servers, self._stamps, self.recover, lambda: self.adapters.used()
        )
        self._committed: list[int] = []
        self.transport: WeightTransport | None = None
        try:
            self.servers.greet(timeout, self._closed)
            self._settings, self._wire_dtype = self.servers.agreed()
            self._find_adapters()
            self.transport = transport(self._servers)
        except EngineLost as lost:
            # Nothing can be recovered yet. If a healthy server has refused a call, its workers do not have our methods.
            self.close()
            raise (
                InputError(f"{lost}. {HOW_TO_START}") if lost.refused else LockstepError(str(lost))
            ) from lost
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def members(self) -> tuple[str, ...]:
        """URL of each server, in their order."""
        return self.servers.urls

    def settings(self) -> EngineSettings:
        return self._settings

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype of the servers' parameters, to which wider tensors are cast for sending; None: several."""
        return self._wire_dtype

    @property
    def scores_first(self) -> bool:
        """Whether the servers answer scoring requests before the generation requests that wait."""
        return all(server.takes_priorities for server in self._servers)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[GenerationRequest], on_answer: OnAnswer | None = None
    ) -> dict[RequestKey, Completion]:
        """Answer every request. Weights pushed meanwhile give the tokens of one completion several versions."""
        settings = self.settings()
        check_requests(
            requests, self._version, settings.max_model_len, settings.vocab_size, settings.request_limits
        )
        return answer_all(self.serve, requests, on_answer)

    def serve(self, inbox: Inbox) -> None:
        """Send each request in a separate call. Weights may be pushed meanwhile."""

        def begin(request: GenerationRequest) -> Callable[[], Sequence[int]]:
            settings = self._settings
            check_request(request, self._version, settings.max_model_len, settings.vocab_size)
            since = len(self._committed) - 1
            return lambda: self._committed[since:]

        limit = self.timeout * self.generation_timeouts
        self.requests.serve(inbox, self.loop, begin, limit, self._settings.vocab_size)

    def score(self, sequences: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[float, ...]]:
        return self.submit_scores(sequences).result()

    def submit_scores(
        self, sequences: Mapping[str, tuple[int, ...]], *, limit: float | None = None
    ) -> Pending[Any, dict[str, tuple[float, ...]]]:
        """Begin `score` without waiting for it. All sequences together may take `limit` seconds; None: `timeout`."""
        check_scoring(sequences, self._version, self._settings.max_model_len)

        def checked(answers: list[tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
            scores = dict(zip(sequences, answers, strict=True))
            check_scores(sequences, scores)
            return scores

        stamp = self._stamp(self._committed[-1])
        return self.loop.start(
            self.requests.score(list(sequences.values()), stamp, limit or self.timeout), checked
        )

    # ---- proofs -----------------------------------------------------------------------------------------------------

    def modules(self, checkpoint_names: tuple[str, ...]) -> EngineModules:
        probed: dict[str, ProbedModule] = {}
        unreached: list[str] = []
        for number, workers in enumerate(
            self.servers.workers("lockstep_modules", json.dumps(checkpoint_names))
        ):
            # Workers of one server have different layers (pipeline) or parts of the same layers (tensor parallelism).
            for entry in (entry for found in workers for entry in found["probed"]):
                name = self._prefix(number) + entry["name"]
                probed[name] = ProbedModule(**{**entry, "name": name, "tensors": tuple(entry["tensors"])})
            unreached += [self._prefix(number) + name for found in workers for name in found["unreached"]]
        return EngineModules(probed, tuple(dict.fromkeys(unreached)))

    def probe(self, names: Sequence[str], seed: int, *, every: bool) -> dict[str, torch.Tensor]:
        def arguments(prefix: str) -> tuple[str, ...] | None:
            own = [name for name in names if name.rpartition("/")[0] == prefix]
            return (json.dumps(own), str(seed), json.dumps(every), self.adapters.name or "") if own else None

        answers = self._agreed("lockstep_probe", arguments)
        return {name: decode_floats(text) for name, text in answers.items()}

    def held(self, parts: Sequence[HeldPart], dtype: torch.dtype, key: int | None) -> dict[str, str]:
        # The servers do not know the URLs under which the trainer has their modules.
        own = {part: part._replace(name=part.name.rpartition("/")[2]) for part in parts}

        def arguments(server: str) -> tuple[str, ...] | None:
            asked = [own[part] for part in parts if part.name.rpartition("/")[0] == server]
            return (
                (json.dumps(asked), dtype_name(dtype), "" if key is None else f"{key:x}") if asked else None
            )

        return self._agreed("lockstep_held", arguments, prefixed=True)

    def _agreed(
        self, method: str, arguments: Callable[[str], Sequence[str] | None], *, prefixed: bool = False
    ) -> dict[str, str]:
        """The answers of all servers' workers.

        Args:
            arguments: gives those of a server, by its name; None: this server is not asked.
            prefixed: whether a server's prefix is put before the names of its answers.
        """

        def answers_of(number: int) -> dict[str, str]:
            server, given = self._servers[number], arguments(self.servers.name_of(number))
            if given is None:
                return {}
            found = agreed_answers(server.workers(method, *given), f"the server at {server.url}")
            return {(self._prefix(number) if prefixed else "") + name: text for name, text in found.items()}

        found = self.servers.each_number(answers_of)
        return {name: text for answers in found for name, text in answers.items()}

    def ask_workers(
        self, question: str, arguments: Callable[[str], Sequence[Any] | None]
    ) -> dict[str, Sequence[Any]]:
        def answers_of(number: int) -> tuple[str, list[Any]]:
            server, name = self._servers[number], self.servers.name_of(number)
            given = arguments(name)
            workers = [] if given is None else server.workers("lockstep_ask", question, json.dumps(given))
            return name, [worker["answer"] for worker in workers]

        return {name: answers for name, answers in self.servers.each_number(answers_of) if answers}

    def server_of(self, key: RequestKey) -> str:
        """URL of the server that has answered a request; empty if the request is too old."""
        return self.requests.answered.get(key[:2], "")

    def _prefix(self, number: int) -> str:
        """Prefix of the names of a server's modules; empty if there is only one server."""
        return f"{self.servers.name_of(number)}/" if len(self._servers) > 1 else ""

    # ---- weights ----------------------------------------------------------------------------------------------------

    def refuse_requests(self) -> None:
        self._version = None

    def lost(self, what: str) -> EngineLost:
        return EngineLost(what, self.recover)

    def open_requests(self, version: int) -> None:
        """Accept requests for a version whose weights are the base model with an adapter."""
        self._stamps[self._stamp(version)] = version
        self._committed.append(version)
        self._version = version

    def begin_update(self) -> None:
        """Begin to pause the servers; `load` waits for it. Running requests go on with new weights after the commit."""
        self._version = None
        self.adapters.check_whole_push_allowed()
        self.adapters.use_none()
        self.pauses.begin()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        assert self.transport is not None
        try:
            self.transport.send(tensors, self._servers, base)
        except BaseException as error:
            self.pauses.wait()
            if isinstance(error, RuntimeError) and not isinstance(error, LockstepError):
                # gloo and NCCL raise a plain RuntimeError for a peer that is late or gone.
                raise self.lost(f"the weights did not reach the servers: {str(error)[:300]}") from error
            raise
        self.pauses.check()
        self.servers.each(lambda server: server.call("POST", "/finish_weight_update", {}))
        return one_acknowledgement(
            [
                loaded
                for number, workers in enumerate(self.servers.workers("lockstep_acknowledgement"))
                for loaded in loaded_by(workers, [self.servers.name_of(number)] * len(workers))
            ]
        )

    def reset_caches(self) -> bool:
        """Drop all caches. Running requests compute their keys and values again with the new weights."""
        done = self.servers.each(lambda server: server.reset_caches())
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

        found = self.servers.each(commit)
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
        self.servers.each(lambda server: server.call("POST", "/resume"))
        self._version = version

    def _stamp(self, version: int) -> str:
        """The stamp by which the servers know a weight version of this trainer."""
        return f"{self.session}:{version}"

    # ---- servers that leave and join --------------------------------------------------------------------------------

    def recover(self) -> None:
        """Drop all agreements with the servers, and wait until every server answers again.

        A server that does not answer within the time limit leaves, if another server does; one that is not wanted
        leaves at once.
        """
        self._version = None
        self.requests.forget_pictures()
        self.adapters.forget()
        if self.transport is not None:
            self.transport.forget()
        before = self._settings
        self._await_all()
        self._settings, self._wire_dtype = self.servers.agreed()
        self._find_adapters()
        if self._settings != before:
            raise ProofError(
                "handshake",
                f"a server came back with other settings: {changed_settings(before, self._settings)}",
                "the server was started again with another command line or model",
                "start it with the earlier command line, and resume from the last checkpoint",
            )

    def _await_all(self) -> None:
        """Wait until every server can be used. The ones that leave are dropped."""
        deadline, problems = time.monotonic() + self.timeout, dict[ServerCalls, str]()
        urls = ", ".join(server.url for server in self._servers)
        with waiting(
            f"the server at {urls} to come back", self.timeout, lambda: "; ".join(problems.values())
        ):
            while problems := self.servers.problems(self.timeout):
                self._drop_gone(
                    problems, is_late=self._closed.wait(HEALTH_EVERY) or time.monotonic() > deadline
                )

    def _drop_gone(self, problems: dict[ServerCalls, str], *, is_late: bool) -> None:
        """Go on without the servers that are not wanted any more or, if it `is_late`, without all that are unusable."""
        gone = [server for server in problems if is_late or not self.is_wanted(server.url)]
        if len(gone) < len(self._servers):
            for server in gone:
                waited = (
                    f"did not come back within {self.timeout:.0f} s" if is_late else "is not wanted any more"
                )
                self._drop([server], f"it {waited} ({problems[server]})")
        elif is_late:
            raise unreachable(gone[0], self.timeout, problems[gone[0]])

    def leave(self, urls: Collection[str], why: str) -> None:
        """Send nothing more to some servers, which may still answer requests that they have. Another server remains."""
        gone = [server for server in self._servers if server.url in urls]
        for server in gone:
            self.adapters.leave_server(server)
        self._drop(gone, why)

    def _drop(self, gone: Sequence[ServerCalls], why: str) -> None:
        self.servers.drop(gone, why)
        self._forget_agreements()

    def _forget_agreements(self) -> None:
        """Make the next push agree on its transport again, because the engine has other servers now."""
        self._find_adapters()
        self.adapters.forget_servers()
        if self.transport is not None:
            self.transport.forget()

    def _find_adapters(self) -> None:
        """Load the extra that sends adapters alone, if a server takes them."""
        if isinstance(self.adapters, NoAdapters) and any(server.takes_adapters for server in self._servers):
            self.adapters = load(ADAPTERS["servers"])(self, self._run)

    def healthy(self, urls: Collection[str]) -> list[str]:
        """The URLs, of servers outside this engine, at which a server says within a second that it is healthy."""
        return self.servers.healthy(urls, self.loop)

    def name_versions_as(self, other: VLLMServer) -> None:
        """Name weight versions and adapters as another engine does, which this one's servers can join after a push."""
        agreed_settings([*other.servers.all, *self.servers.all])
        self.session = other.session
        self.adapters.name_as(other.adapters)

    def take(self, other: VLLMServer, order: Sequence[str]) -> None:
        """Let the servers of another engine join. They hold this engine's version of the weights.

        Args:
            other: it has called `name_versions_as` before its push. Afterwards it can only be closed.
            order: URLs of all servers. Of servers with the same load, the first one in this order gets a prompt.
        """
        assert (other.session, other.version) == (self.session, self.version)
        come = [server.of_engine(self.timeout, self.loop, self.recover) for server in other.servers.all]
        # Servers on another machine may need another transport. If they cannot have it, nothing has changed.
        transport, before = self.choose([*self._servers, *come]), self.transport
        other.adapters.use_none()
        self.servers.add(come, order)
        self._forget_agreements()
        self.transport = transport
        if before is not None:
            before.close()

    def close(self) -> None:
        """Disconnect from the servers. They keep running."""
        self._version = None
        self.adapters.close()
        self._closed.set()
        if self.transport is not None:
            self.transport.close()
        self.loop.close()
        self.servers.close()
