"""The greeting: trainer and server prove to each other that both have the key. Neither of them sends the key itself.

The trainer sends a nonce to the path `GREETING`. The server answers with its own nonce and a proof, the HMAC-SHA256 of both nonces
under the key. Another program that listens on the server's port cannot compute the proof, so that the trainer makes no call to it.
Every later call contains a proof of the trainer, and every answer contains a proof of the server. The trainer's end is
`engines/http/server_calls.py`, and the server's end is `server/guard.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

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

    def authorization(self, call: str) -> str:
        """The `Authorization` header of a call.

        Args:
            call: a nonce that is used for this call only.
        """
        return f"{SCHEME} {self._nonce}.{call}.{_mac(self._secret, 'trainer', call)}"

    def is_trainer(self, call: str, proof: str) -> bool:
        """Whether the proof in a call's header comes from a trainer with the key."""
        return hmac.compare_digest(_mac(self._secret, "trainer", call).encode(), proof.encode())

    def proof(self, call: str) -> str:
        """The server's proof in the answer to a call."""
        return _mac(self._secret, "server", call)

    def is_server(self, call: str, proof: str | None) -> bool:
        """Whether an answer comes from the server of the greeting."""
        return hmac.compare_digest(self.proof(call).encode(), (proof or "").encode())


def _mac(key: bytes, *parts: str) -> str:
    # Nonces do not contain the separator. Therefore two different lists of parts never give the same text.
    return hmac.new(key, "|".join(("lockstep", *parts)).encode(), hashlib.sha256).hexdigest()
