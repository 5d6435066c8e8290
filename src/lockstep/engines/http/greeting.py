"""The greeting: trainer and server prove to each other that both have the key. Neither of them sends the key itself.

The trainer sends a nonce to the path `GREETING`. The server answers with its own nonce and a proof, the HMAC-SHA256 of
both nonces under the key. Another program that listens on the server's port cannot compute the proof, so that the
trainer makes no call to it. Every later call contains a proof of the trainer, and every answer contains a proof of the
server. The trainer's proof covers the whole call and its number, and the server takes each number once. Who reads a
call can therefore neither send it again nor make another one of it. One end is in the trainer, and the other is the
guard in the server.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import secrets
from collections.abc import Iterable

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
    """The session of one greeting: it makes and checks the proofs of all later calls. Both ends compute it from the key and nonces.

    Args:
        trainer_nonce: chosen by the trainer for this greeting.
        server_nonce: chosen by the server's process when it starts. A restart therefore ends every session.
    """

    def __init__(self, key: str, trainer_nonce: str, server_nonce: str) -> None:
        self._nonce = trainer_nonce
        self._secret = _mac(key.encode(), "session", trainer_nonce, server_nonce).encode()
        self._numbers = itertools.count(1)

    def authorization(self, method: str, path: str, query: Iterable[tuple[str, str]], body: bytes) -> tuple[str, str]:
        """The number of a call, which no other call of the session has, and its `Authorization` header."""
        call, mark = str(next(self._numbers)), body_mark(body)
        proof = self._trainer_proof(call, method, path, query, mark)
        return call, f"{SCHEME} {self._nonce}.{call}.{mark}.{proof}"

    def is_trainer(
        self, call: str, method: str, path: str, query: Iterable[tuple[str, str]], mark: str, proof: str
    ) -> bool:
        """Whether the proof in a call's header comes from a trainer with the key, for this call with the body of this mark."""
        wanted = self._trainer_proof(call, method, path, query, mark)
        return hmac.compare_digest(wanted.encode(), proof.encode())

    def _trainer_proof(self, call: str, method: str, path: str, query: Iterable[tuple[str, str]], mark: str) -> str:
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
