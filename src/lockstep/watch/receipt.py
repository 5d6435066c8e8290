"""The receipt of a run: one line per step in `receipt.jsonl`. Each line contains the hash of the line before.

The trainer writes a line after the proofs of each optimizer step have passed, so the receipt shows which a run passed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.files import append_line, check_regular, from_json, replace_text, without_nan
from lockstep.safe_text import without_secrets

RECEIPT = "receipt.jsonl"
# A file in each checkpoint: digests of its content. The receipt has the digest of this file.
DIGESTS = "digests.json"
_FIRST = "0" * 32


class Receipt:
    """Appends chained lines to a file, and continues the chain of an existing file.

    Args:
        path: the receipt's file.
        step: the run's current optimizer step. Later lines are dropped, because they will be written again. At step 0
            an earlier run's receipt is kept beside it as `receipt.previous.jsonl`.

    Raises:
        InputError: the existing chain is broken.

    Attributes:
        entries: the entries that the run had written before, up to `step`.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self._last = _FIRST
        self.entries: list[dict[str, Any]] = []
        if path.exists():
            lines = read_log(path)
            if step == 0 and lines:
                path.rename(path.with_name("receipt.previous.jsonl"))
                return
            lines = lines_up_to(lines, step)
            check_chain(lines)
            replace_text(path, "".join(f"{line}\n" for line in lines))
            self.entries = [json.loads(line) for line in lines]
            if lines:
                self._last = self.entries[-1]["hash"]

    def append(self, entry: dict[str, Any], *, durable: bool = False) -> None:
        """Write one entry without its secrets. If it is `durable`, it is on the disk when this returns.

        An `OSError` leaves the receipt as it was before.
        """
        body = without_nan({**without_secrets(entry, by_name=False), "previous": self._last})
        own = _hash(body)
        append_line(self._path, json.dumps({**body, "hash": own}), durable=durable)
        self._last = own


def read_receipt(path: Path) -> list[dict[str, Any]]:
    """The entries of a receipt with an unbroken chain.

    Raises:
        InputError: the file is empty or not text, or a line was changed, removed or added.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file") from error
    if not lines:
        raise InputError(f"{path} is empty")
    check_chain(lines)
    return [json.loads(line) for line in lines]


def check_receipt(path: Path) -> int:
    """Compute a receipt's chain again, check that it names the checkpoints of its directory, and count its lines.

    Raises:
        InputError: a line was changed, removed or added, or the checkpoints were written with another receipt.
    """
    entries = read_receipt(path)
    sealed = {entry["digests"] for entry in entries if entry["kind"] == "checkpoint"}
    for digests in sorted(path.parent.glob(f"checkpoint-*/{DIGESTS}")):
        if text_digest(digests.read_text(encoding="utf-8")) not in sealed:
            raise InputError(
                f"{digests.parent.name} was written with another receipt: lines were removed or replaced"
            )
    return len(entries)


def read_log(path: Path) -> list[str]:
    """The lines of a log. Bytes that are no text become U+FFFD: such a line of the receipt does not fit its hash."""
    check_regular(path)
    return [line for line in path.read_bytes().decode(errors="replace").split("\n") if line]


def lines_up_to(lines: list[str], step: int) -> list[str]:
    """The entries of a run's log up to and including a step. A last line that a kill cut short is dropped."""
    return [line for line in lines if _step_of(line, otherwise=step + 1) <= step]


def check_chain(lines: list[str]) -> None:
    """Compute the chain of a receipt again. An `InputError` names the line that was changed, removed or added."""
    previous = _FIRST
    for number, line in enumerate(lines, start=1):
        try:
            body = from_json(line)
            claimed = body.pop("hash")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"receipt line {number} is not an entry of a receipt") from error
        if body.get("previous") != previous or claimed != _hash(body):
            raise InputError(
                f"receipt line {number} does not fit the chain: it or the line before was changed"
            )
        previous = claimed


def _step_of(line: str, otherwise: int) -> int:
    try:
        return int(from_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return otherwise


def _hash(body: dict[str, Any]) -> str:
    return text_digest(json.dumps(body, sort_keys=True))


def text_digest(text: str) -> str:
    """Hex digest of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
