"""Shows the messages of Lockstep's loggers on standard output, beside a run's own lines.

Standard error is for the error that ends a run. There is one exception: messages about settings go to standard error, because
`--dry_run` writes a config to standard output. Every module writes to the logger of its own name. A program that handles logs
itself removes the handler: `logging.getLogger("lockstep").handlers.clear()` and `.propagate = True`. `import lockstep`
installs the handler.
"""

from __future__ import annotations

import logging
import sys

from lockstep.secret import masked
from lockstep.visible import visible

_ABOUT_SETTINGS = ("lockstep.training.config.", "lockstep.training.methods.")
# Programs that read TRL's logs find its words here (CONTRIBUTING.md). The logger is not a child of `trl`, which does not
# propagate once TRL is imported, and not of `lockstep`, whose lines are printed. Without a handler, Python would print the
# words itself.
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
        except Exception:  # noqa: BLE001  as in logging's own handlers: a closed terminal must not end a run
            self.handleError(record)


def show_messages() -> None:
    """Install the handler, unless the program has given the logger `lockstep` a handler or a level of its own."""
    logger = logging.getLogger("lockstep")
    if not logger.handlers and logger.level == logging.NOTSET:
        logger.addHandler(TerminalHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False
