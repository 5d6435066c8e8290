"""HTTP calls to one vLLM server, and the greeting by which both sides prove that they have the key.

Each call has a time limit, and none is repeated: after a failed call the state of the server is unknown.

The trainer sends a nonce to the path `GREETING`. The server answers with its own nonce and a proof, the HMAC-SHA256 of
both nonces under the key; the key itself is never sent. Another program that listens on the server's port cannot
compute the proof, so that the trainer makes no call to it. Every later call contains a proof of the trainer, and every
answer one of the server. The trainer's proof covers the whole call and its number, and the server takes each number
once. Who reads a call can therefore neither send it again nor make another one of it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import functools
import hashlib
import hmac
import itertools
import json
import resource
import secrets
import ssl
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from lockstep import bounded_http
from lockstep.contract.protocol import EngineSettings
from lockstep.engines.vllm.arguments import GRAMMAR_BACKEND, SERVER_BACKEND, WORKER_EXTENSION
from lockstep.errors import EngineLost, InputError, LockstepError
from lockstep.files import read_settings
from lockstep.private_caches import expanded
from lockstep.progress import waiting
from lockstep.threads import CallLoop, Pending

# The path of a greeting. It needs no key, and its answer contains only a nonce and a proof.
GREETING = "/lockstep/greeting"
NONCE_HEADER = "x-lockstep-nonce"
PROOF_HEADER = "x-lockstep-proof"
# Seconds for which the caller of a call waits. The server does not take its engine for dead before that.
LIMIT_HEADER = "x-lockstep-limit"
# The authorization scheme of a trainer's calls.
SCHEME = "Lockstep"
_NONCE_BYTES, _LONGEST_NONCE = 16, 64


def make_nonce() -> str:
    """128 random bits, as hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


def is_nonce(text: str) -> bool:
    """Whether a text has the form of a nonce. A shorter text might not be unique."""
    return 2 * _NONCE_BYTES <= len(text) <= _LONGEST_NONCE and text.isascii() and text.isalnum()


def server_proof(key: str, trainer_nonce: str, server_nonce: str) -> str:
    """The proof in the answer to a greeting. It shows that the server has the key."""
    return _mac(key.encode(), "greeting", trainer_nonce, server_nonce)


class Session:
    """The session of one greeting: both ends compute it from the key and the nonces, and prove all later calls with it.

    Args:
        trainer_nonce: chosen by the trainer for this greeting.
        server_nonce: chosen by the server's process when it starts. A restart therefore ends every session.
    """

    def __init__(self, key: str, trainer_nonce: str, server_nonce: str) -> None:
        self._nonce = trainer_nonce
        self._secret = _mac(key.encode(), "session", trainer_nonce, server_nonce).encode()
        self._numbers = itertools.count(1)

    def authorization(
        self, method: str, path: str, query: Iterable[tuple[str, str]], body: bytes
    ) -> tuple[str, str]:
        """The number of a call, which no other call of the session has, and its `Authorization` header."""
        call, mark = str(next(self._numbers)), body_mark(body)
        proof = self._trainer_proof(call, method, path, query, mark)
        return call, f"{SCHEME} {self._nonce}.{call}.{mark}.{proof}"

    def is_trainer(
        self, call: str, method: str, path: str, query: Iterable[tuple[str, str]], mark: str, proof: str
    ) -> bool:
        """Whether a call's proof comes from a trainer with the key, for this call and the body of this mark."""
        wanted = self._trainer_proof(call, method, path, query, mark)
        return hmac.compare_digest(wanted.encode(), proof.encode())

    def _trainer_proof(
        self, call: str, method: str, path: str, query: Iterable[tuple[str, str]], mark: str
    ) -> str:
        whole = json.dumps([method, path, sorted(query), mark])
        return _mac(self._secret, "trainer", call, hashlib.sha256(whole.encode()).hexdigest())

    def proof(self, call: str) -> str:
        """The server's proof in the answer to a call."""
        return _mac(self._secret, "server", call)

    def is_server(self, call: str, proof: str | None) -> bool:
        """Whether an answer comes from the server of the greeting."""
        return hmac.compare_digest(self.proof(call).encode(), (proof or "").encode())


def body_mark(body: bytes) -> str:
    """What a call's header says about its body: the number of bytes and their SHA-256."""
    return f"{len(body)}-{hashlib.sha256(body).hexdigest()}"


def _mac(key: bytes, *parts: str) -> str:
    # Nonces do not contain the separator. Therefore two different lists of parts never give the same text.
    return hmac.new(key, "|".join(("lockstep", *parts)).encode(), hashlib.sha256).hexdigest()


# Number of characters of an answer that an error message shows.
_SHOWN = 300
# Bytes of an answer. The second limit is for programs that have not proved that they have the key, or need not.
LARGEST, _LARGEST_UNPROVEN = 1 << 30, 1 << 16
# The only path that a guarded server answers without its key.
HEALTH = "/health"


class ServerCalls:
    """The calls to one server.

    Args:
        key: the server's key. Every call except `/health` proves that the trainer has it. None: there is no guard.
        timeout: seconds that one call may take, from first to last byte.
        loop: the thread that runs the calls.
        recover: the `recover` of every `EngineLost` that is raised here.
        key_now: reads the key again, for a server that was started again by hand and has made another one.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        timeout: float,
        loop: CallLoop,
        recover: Callable[[], None],
        key_now: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        # Facts about the server, known after its first answer (`set.py`): its settings, what distinguishes its process
        # from others, the dtypes of its parameters, the number of workers that share its model, whether requests may
        # have priorities, the bytes of its cache of pictures (0: it has none), the free main memory of its machine,
        # and whether it was started with LoRA.
        self.settings: EngineSettings | None = None
        self.instance = ""
        self.loads_in: list[str] = []
        self.world_size = 1
        self.takes_priorities = False
        self.picture_cache = 0
        self.available_bytes = 0
        self.takes_adapters = False
        # The calls that begin an update, if one is in progress. Weights are sent only after these calls have ended.
        self.beginning: concurrent.futures.Future[Any] | None = None
        self.loop = loop
        self._recover = recover
        self._key, self._key_now = key, key_now
        # A greeting begins the session. A restart of the server ends it.
        self.session: Session | None = None
        self.client = httpx.AsyncClient(
            base_url=self.url,
            # A new connection per call: the server might close a kept one during a call, which could not be repeated.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            # Ignore the environment's proxies: there is no proxy between trainer and engine.
            trust_env=False,
            verify=_certificates(),
        )

    def of_engine(self, timeout: float, loop: CallLoop, recover: Callable[[], None]) -> ServerCalls:
        """The same server, called by another engine."""
        calls = ServerCalls(self.url, self._key, timeout, loop, recover, self._key_now)
        for name in (
            "settings", "instance", "loads_in", "world_size", "takes_priorities", "picture_cache", "available_bytes",
            "takes_adapters",
        ):  # fmt: skip
            setattr(calls, name, getattr(self, name))
        return calls

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        limit: float | None = None,
        plain: bool = False,
        **query: str,
    ) -> Any:
        """Make one call. Returns the decoded JSON of the answer, or None if the answer is empty.

        Args:
            limit: seconds that the call may take; None: `timeout`.
            plain: return the answer as text, without decoding it.
            query: the parameters in the URL.

        Raises:
            EngineLost: there was no answer within the limit, the answer was cut, or its status is 5xx.
            InputError: the program at the URL did not prove that it has the key, or does not know the path.
            LockstepError: the server refuses the call.
        """
        limit = self.timeout if limit is None else limit
        # `/health` needs no key. Another program may have the port of a server that restarts.
        session = None if path == HEALTH or self._key is None else await self._open_session(self._key, limit)
        call, headers, content = "", {LIMIT_HEADER: f"{limit:.3f}"}, b""
        if body is not None:
            content = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        if session is not None:
            call, headers["Authorization"] = session.authorization(method, path, query.items(), content)

        def most(answer: httpx.Response) -> int:
            """The proof of the server comes before its answer."""
            if self._key is None:
                return LARGEST if path != HEALTH else _LARGEST_UNPROVEN
            is_server = session is not None and session.is_server(call, answer.headers.get(PROOF_HEADER))
            return LARGEST if is_server else _LARGEST_UNPROVEN

        answer, found = await self._send(method, path, limit, headers, most, content=content, params=query)
        if answer.status_code >= 500:
            raise self._lost(path, f"answered {answer.status_code}: {_text(found)}", refused=True)
        if session is not None:
            self._check_session(session, call, answer, path)
        elif answer.status_code == 401 and path != HEALTH and self._has_other_key():
            # The guard has let nothing through. The trainer asked before the server had written its key.
            return await self.ask(method, path, body, limit=limit, plain=plain, **query)
        self._check(answer, _text(found), path)
        if not found or plain:
            return found.decode(errors="replace") or None
        try:
            return msgspec.json.decode(found)
        except (ValueError, RecursionError) as error:
            raise self._lost(path, f"sent a broken answer: {_text(found)!r}") from error

    async def _send(
        self,
        method: str,
        path: str,
        limit: float,
        headers: dict[str, str],
        most: Callable[[httpx.Response], int],
        **rest: Any,
    ) -> tuple[httpx.Response, bytes]:
        """Send one HTTP request. Returns the answer and its body."""
        try:
            with waiting(f"the server at {self.url} to answer {path}", limit):
                return await bounded_http.call(
                    self.client, method, path, seconds=limit, most=most, headers=headers, **rest
                )
        except TimeoutError as error:
            raise self._lost(path, f"did not answer within {limit:.0f} s") from error
        except bounded_http.UnboundedAnswer as error:
            raise self._lost(path, f"{error}") from error
        except httpx.HTTPError as error:
            if (cause := _file_limit_reached(error)) is not None:
                raise LockstepError(cause) from error
            raise self._lost(path, f"cannot be reached ({type(error).__name__}: {error})") from error

    async def _open_session(self, key: str, limit: float) -> Session:
        """The session with the server, which a greeting begins at the first call and after a restart."""
        if self.session is not None:
            return self.session
        session, has_answered = await self._greet(key, limit)
        if session is None and self._has_other_key():
            assert self._key is not None
            session, has_answered = await self._greet(self._key, limit)
        if session is None:
            raise InputError(_why_no_proof(self.url, has_answered=has_answered))
        self.session = session
        return session

    def _has_other_key(self) -> bool:
        """Read the key again, and whether it is another one than before."""
        try:
            found = self._key_now()
        except InputError:
            # Without a file that can be read, the key stays what it was.
            return False
        if found is None or found == self._key:
            return False
        self._key = found
        return True

    async def _greet(self, key: str, limit: float) -> tuple[Session | None, bool]:
        """Greet the server. Returns the session (None: the program lacks this key), and whether it sent any proof."""
        nonce = make_nonce()
        answer, body = await self._send(
            "GET", GREETING, limit, {NONCE_HEADER: nonce}, lambda _: _LARGEST_UNPROVEN
        )
        if answer.status_code >= 500:
            raise self._lost(GREETING, f"answered {answer.status_code}: {_text(body)}")
        try:
            found = msgspec.json.decode(body)
            server_nonce, proof = str(found["nonce"]), str(found["proof"])
        except (ValueError, TypeError, KeyError, RecursionError):
            server_nonce, proof = "", ""
        if not hmac.compare_digest(server_proof(key, nonce, server_nonce).encode(), proof.encode()):
            return None, bool(proof)
        return Session(key, nonce, server_nonce), True

    def _check_session(self, session: Session, call: str, answer: httpx.Response, path: str) -> None:
        """Check that an answer comes from the server of the greeting."""
        if session.is_server(call, answer.headers.get(PROOF_HEADER)):
            return
        self.session = None
        what = (
            "was started again"
            if answer.status_code == 401
            else "sent an answer without a proof that it has the key"
        )
        raise self._lost(path, what)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        limit: float | None = None,
        plain: bool = False,
        **query: str,
    ) -> Any:
        """Make the call of `ask`, and wait for it."""
        return self.loop.run(self.ask(method, path, body, limit=limit, plain=plain, **query))

    def begin(self, method: str, path: str, **query: Any) -> Pending[Any, Any]:
        """Start the call of `ask` without waiting for it."""
        return self.loop.start(self.ask(method, path, limit=None, plain=False, **query), lambda found: found)

    def together(self, *calls: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Make independent calls at the same time. All of them have ended before the first error is raised."""

        async def all_ended() -> list[Any]:
            return await asyncio.gather(*(call() for call in calls), return_exceptions=True)

        answers = self.loop.run(all_ended())
        for error in answers:
            if isinstance(error, BaseException):
                raise error
        return answers

    def init_transfer(self, info: dict[str, Any]) -> None:
        self.call("POST", "/init_weight_transfer_engine", {"init_info": info})

    def update_weights(self, info: dict[str, Any]) -> None:
        if self.beginning is not None:
            self.beginning.result()
        self.call("POST", "/update_weights", {"update_info": info})

    def reset_caches(self) -> bool:
        """Drop what was computed with older weights, for running requests too. Returns whether the server confirms it.

        vLLM's cache of inputs is kept. It contains pixels, which do not depend on weights, and requests need them.
        """
        _, answer = self.together(
            lambda: self.ask("POST", "/reset_encoder_cache"),
            lambda: self.ask("POST", "/reset_prefix_cache", reset_running_requests="true"),
        )
        # vLLM does not report whether it has reset its encoder cache, so that the workers are asked.
        holding = self.picture_cache and any(worker["holding"] for worker in self.workers("lockstep_encoded"))
        return bool(answer == {"success": True}) and not holding

    def workers(self, method: str, *args: str) -> list[Any]:
        """Make the call of `ask_workers`, and wait for it."""
        return self.loop.run(self.ask_workers(method, *args))

    async def ask_workers(self, method: str, *args: str) -> list[Any]:
        """The JSON answers of every worker of the server, by rank, to a method of `engines/vllm/worker.py`."""
        answer = await self.ask("POST", "/collective_rpc", {"method": method, "args": list(args)})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not results:
            raise self._lost("/collective_rpc", f"gave no result of {method}")
        return list(results)

    def weight_version(self) -> str:
        """The stamp of the weights that the server holds."""
        answer = self.call("GET", "/weight_info")
        if not isinstance(answer, dict) or "weight_version" not in answer:
            raise self._lost("/weight_info", "did not report which weights it holds")
        return str(answer["weight_version"])

    def health_problem(self, limit: float) -> str | None:
        """The reason why a health check failed or took longer than the limit; None: the server is healthy."""
        try:
            self.call("GET", HEALTH, limit=limit)
        except EngineLost as lost:
            return str(lost)
        return None

    def _check(self, answer: httpx.Response, text: str, path: str) -> None:
        if answer.status_code == 401:
            raise InputError(
                f"the server at {self.url} needs a key: set LOCKSTEP_SERVER_KEY, or set vllm_server_key_file "
                "to the file that 'lockstep serve' named"
            )
        if answer.status_code == 404 and "does not exist" in text:
            raise self._lost(path, f"was started again: {text}")
        if answer.status_code in (403, 404):
            # Some paths of vLLM exist, but vLLM refuses them unless its command line opens them.
            raise InputError(f"the server at {self.url} does not have {path}, or refuses it. {HOW_TO_START}")
        if answer.status_code >= 300:
            raise LockstepError(
                f"the server at {self.url} refused {path} with status {answer.status_code}: {text}"
            )

    def _lost(self, path: str, what: str, *, refused: bool = False) -> EngineLost:
        return EngineLost(f"the server at {self.url} {what} (at {path})", self._recover, refused=refused)


def _text(body: bytes) -> str:
    """The beginning of an answer, for an error."""
    return body[: 4 * _SHOWN].decode(errors="replace")[:_SHOWN]


def server_urls(base_url: str | None, host: str, port: int) -> list[str]:
    """Base URL of each server, from a comma-separated list. If there is no list, the URL consists of host and port."""
    if not base_url:
        # TRL's default host 0.0.0.0 is an address to listen on. A client reaches such a server at 127.0.0.1.
        return [f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"]
    return [url.strip().rstrip("/") for url in base_url.split(",")]


def urls_of_file(name: str, file: str) -> list[str]:
    """Base URL of each server, from a text file with one URL per line. Empty lines and what follows a # are ignored."""
    try:
        lines = read_settings(expanded(file)).splitlines()
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name}={file!r} cannot be read ({error}); it must be a text file with one base URL per line"
        ) from error
    urls = [line.partition("#")[0].strip().rstrip("/") for line in lines]
    urls = [url for url in urls if url]
    check_urls(f"{name}={file}", urls, "one per line")
    return urls


def check_urls(name: str, urls: Sequence[str], given: str = "separated by commas") -> None:
    """Refuse base URLs that cannot belong to servers. The error never shows a password.

    Args:
        name: name of the field or argument that has the URLs, for the error.
        given: how several URLs are written there.
    """
    if not urls:
        raise InputError(f"{name} names no server")
    example = f"it must be different URLs such as http://127.0.0.1:8000, {given}"
    for url in urls:
        if "@" in url:
            raise InputError(
                f"{name} contains a user name or password; remove it: the key belongs in LOCKSTEP_SERVER_KEY "
                f"or in the key file"
            )
        try:
            parts = urlsplit(url)
            is_valid = (
                parts.scheme in ("http", "https") and bool(parts.hostname) and not any(map(str.isspace, url))
            )
            is_valid = is_valid and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise InputError(f"{name} has {url!r}; {example}")
    if len(set(urls)) != len(urls):
        raise InputError(f"{name} names {max(urls, key=urls.count)} twice; {example}")


def _why_no_proof(url: str, *, has_answered: bool) -> str:
    """The error for a program that sent no proof of the key or, if it `has_answered`, a wrong one."""
    if has_answered:
        return (
            f"the server at {url} does not accept the key: it has another key, or it is another program. Set "
            "LOCKSTEP_SERVER_KEY, or set vllm_server_key_file to the file that 'lockstep serve' named. The "
            "key was not sent"
        )
    return (
        f"the program at {url} could not prove that it has the key, so that the key was not sent. Is it "
        "'lockstep serve'? A server without a guard needs no key: unset LOCKSTEP_SERVER_KEY. To give vLLM's "
        "own server the guard, start it with --middleware lockstep.server.guard.KeyGuard and the key in "
        "LOCKSTEP_SERVER_KEY"
    )


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The certificates that OpenSSL finds (SSL_CERT_FILE). They are read once, because reading takes 20 ms."""
    return ssl.create_default_context()


def _file_limit_reached(error: BaseException) -> str | None:
    """The message for a call that failed because this process has too many open files; None: it has not."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"this process may open only {limit} files and connections ({cause.strerror}): raise the "
                "limit (ulimit -n 4096) and start the same command again"
            )
        cause = cause.__cause__ or cause.__context__
    return None


HOW_TO_START = (
    "Start it with 'lockstep serve MODEL'. Otherwise the server needs the environment variable VLLM_SERVER_DEV_MODE=1, "
    f"lockstep installed beside vLLM, and the arguments --enable-scale-out --worker-extension-cls {WORKER_EXTENSION} "
    f'--weight-transfer-config \'{{"backend": "{SERVER_BACKEND}"}}\' --logprobs-mode '
    "processed_logprobs --no-enable-chunked-prefill --generation-config vllm "
    f'--structured-outputs-config \'{{"backend": "{GRAMMAR_BACKEND}"}}\''
)
