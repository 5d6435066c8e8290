"""The errors that Lockstep raises on purpose. The message itself says everything that a reader needs."""

from __future__ import annotations

import difflib
import importlib.util
import shutil
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path

from lockstep.safe_text import masked, visible


class LockstepError(RuntimeError):
    """Base class: Lockstep refuses to continue, for the reason in the message.

    The message may quote data, files and settings of others. It shows their controls and hides their secrets,
    wherever it ends up: in a traceback of a script, in a log, in a file of the run.
    """

    def __init__(self, *said: object) -> None:
        super().__init__(*(visible(masked(text)) if isinstance(text, str) else text for text in said))


# Characters of a sentence, and how many of them stand at its beginning where its middle is left out.
_LONGEST, _BEGINNING = 500, 300


def shortened(text: str) -> str:
    """A text that may quote a long input, with its beginning and its end."""
    return text if len(text) <= _LONGEST else f"{text[:_BEGINNING]} … {text[_BEGINNING + 3 - _LONGEST :]}"


class InputError(LockstepError, ValueError):
    """Invalid input from outside: a config field, a dataset, a model directory or a reward function."""

    def __init__(self, *said: object) -> None:
        super().__init__(*said)
        self.args = tuple(shortened(text) if isinstance(text, str) else text for text in self.args)


def check_extra(what: str, extra: str, *modules: str) -> None:
    """Refuse what a user has asked for where the modules of an extra of pyproject.toml are missing. Imports none."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        found = f"{' and '.join(missing)} cannot be imported here"
        raise InputError(f"{what}: {found}; run pip install 'lockstep-rl[{extra}]'")


class Interrupted(LockstepError):
    """A signal ended the run before its last step.

    Args:
        number: the signal's number; 2 is SIGINT.

    Attributes:
        exit_code: 128 + the number, as shells report it: 130 after SIGINT, 143 after SIGTERM.
    """

    def __init__(self, message: str, number: int = 2) -> None:
        self.exit_code = 128 + number
        super().__init__(message)


class EngineLost(LockstepError):
    """An engine that served before no longer answers, or answers wrongly. It may come back with other weights.

    Args:
        message: which engine, what was asked of it, and what happened.
        recover: waits for a bounded time until the engine answers again, and raises `LockstepError` if it does not.
            All earlier answers and weights of the engine are void.
        refused: whether the engine did answer, with an error of its own.
    """

    def __init__(self, message: str, recover: Callable[[], None], *, refused: bool = False) -> None:
        self.recover = recover
        self.refused = refused
        super().__init__(message)


# Says of every proof what its failure usually means. A check has a row in its table.
PROOFS_PAGE = "docs/troubleshooting/proofs.md"


class ProofError(LockstepError):
    """A proof of agreement between trainer and engine failed.

    The last line of the message names the page that explains the proof.

    Args:
        check: name of the failed proof in the receipt (`echo`, `version`, `handshake`, `gap`, …).
        found: what was measured, with the numbers.
        cause: the likely cause, in one sentence.
        fix: the setting or action that solves it.
    """

    def __init__(self, check: str, found: str, cause: str, fix: str) -> None:
        self.check = check
        self.found = found
        self.cause = cause
        self.fix = fix
        super().__init__(
            f"proof '{check}' failed: {found}\n  likely cause: {cause}\n  what to do: {fix}\n"
            f"  explained in: {PROOFS_PAGE}, row {check}"
        )

    def fields(self) -> tuple[str, str, str, str]:
        """What the error is made of: the arguments of `of_fields`."""
        return self.found, self.check, self.cause, self.fix

    @classmethod
    def of_fields(cls, found: str, check: str, cause: str, fix: str) -> ProofError:
        """The error of another process."""
        return cls(check, found, cause, fix)


@contextmanager
def names_path(path: PathLike[str]) -> Iterator[None]:
    """Within the block, an OSError that names no file, such as that of a write to a full disk, names this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, fspath(path)) from error
        raise


@contextmanager
def writing(what: str, folder: PathLike[str], otherwise: Callable[[], str] = str) -> Iterator[None]:
    """Within the block, libraries write files. Whatever they raise if they cannot is one error, of one line.

    Python's files, safetensors, tokenizers and torch raise four different kinds when a disk is full: tokenizers a
    bare `Exception`, torch a `RuntimeError` that names no file. `otherwise` returns what else the reader should know,
    as a part of a sentence. The folder need not exist.
    """
    from safetensors import SafetensorError

    try:
        yield
    except LockstepError:
        # A failed proof, or another rank that has failed. It says itself what to do.
        raise
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, OSError | SafetensorError | RuntimeError):
            raise
        place = next(place for place in (Path(folder), *Path(folder).absolute().parents) if place.exists())
        free = shutil.disk_usage(place).free / 2**30
        why = "; ".join(filter(None, [one_line(error), otherwise()]))
        raise LockstepError(
            f"{what} could not be written ({free:.1f} GiB free in {folder}): {why}"
        ) from error


# The part of a library's text that an error quotes. Some libraries print whole configurations.
_QUOTED = 300
_PACKAGES = ("site-packages/", "dist-packages/")


@contextmanager
def foreign_errors(what: str, kind: type[LockstepError] = LockstepError) -> Iterator[None]:
    """Within the block, whatever an engine or a library raises becomes one line: its type, its text and its place.

    It may also stand above a function as its decorator. The library's own error, with its traceback, is the new
    error's cause. Errors of Lockstep go on unchanged.

    Args:
        what: what has failed then, as the beginning of a sentence: "vLLM cannot load MODEL".
        kind: the error that is raised; `InputError` if the user can correct it.
    """
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        raise kind(f"{what}: {told(error)}") from error


def told(error: Exception) -> str:
    """The type of an error, its text, and the file and line that raised it, in one line."""
    # A bare assertion has no text.
    text = quoted(error) or "without a text"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return f"{type(error).__name__}: {text}"
    place = frames[-1]
    file = place.filename
    for folder in _PACKAGES:
        file = file.rpartition(folder)[2]
    return f"{type(error).__name__}: {text} ({file}:{place.lineno}, {place.line or place.name})"


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A question that names the closest of the known names; empty if none is close."""
    close = difflib.get_close_matches(given, list(known), 1)
    return f"did you mean {close[0]!r}?" if close else ""


def no_choice(given: str, choices: Sequence[str], what: str) -> str:
    """The end of an error about a text that is none of the choices: the closest one, and all of them."""
    return f"{did_you_mean(given, choices)} The {what} are: {', '.join(choices)}".strip()


def quoted(error: BaseException, most: int = _QUOTED) -> str:
    """The text of an error of other code in one line, as far as a reader needs it. The error itself is the cause."""
    text = one_line(error)
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters in all)"


def reason(error: BaseException) -> str:
    """Why a file cannot be used: what the system says without its number and the file's name, or one line of text."""
    return getattr(error, "strerror", None) or one_line(error)


def one_line(error: BaseException) -> str:
    """The text of an error in one line, without the list of native frames in which PyTorch's text may end."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  the error is of a user's own class
        text = "without a text"
    return " ".join(text.partition("\nframe #")[0].split())
