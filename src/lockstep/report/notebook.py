"""The live panel in a Jupyter notebook: the same lines as on a terminal, as one output that is replaced while the cell runs.

A trainer that is made in a notebook has it. Rich's own live display needs ipywidgets there.
"""

from __future__ import annotations

import contextvars
import io
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.report.busy import busy_seen_by, unseen
from lockstep.report.live import About, LiveView
from lockstep.report.terminal import Terminal

# Seconds between two drawings.
_EVERY = 1.0
_WIDTH = 100


def in_notebook() -> bool:
    """Whether this code runs in the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    return running is not None and hasattr(running, "kernel")


class NotebookView(LiveView):
    """Follows a run as `LiveView` does. It draws with `IPython.display`, once per second and at every step."""

    def __init__(
        self,
        about: About,
        phase: Callable[[], str],
        latest: Callable[[], Mapping[str, float]],
        sample: Callable[[], tuple[float, list[tuple[str, str]]] | None],
        judged: Callable[[], Mapping[str, float]],
        alarms: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        # A step is a line only where there is no panel, so the console of the lines goes nowhere.
        super().__init__(about, phase, latest, sample, judged, Terminal(file=io.StringIO(), width=_WIDTH), alarms)
        self._handle: Any = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from IPython.display import HTML, display

        super().on_train_begin(args, state, control, **kwargs)
        self._ended.clear()
        self._handle = display(HTML(self.page()), display_id=True)
        busy_seen_by(self)
        # The output belongs to the cell that runs now; the kernel keeps this cell in a context variable.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._draw_until_end,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        super().stop()
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        unseen(self)
        self._draw()

    def _print(self, line: str) -> None:
        """Nothing: the notebook shows the panel."""

    def page(self) -> str:
        """The panel as HTML."""
        page = Terminal(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False)
        page.print(self.panel())
        return page.export_html(inline_styles=True, code_format="<pre style='line-height:1.25'>{code}</pre>")

    def _draw_until_end(self) -> None:
        while not self._ended.wait(_EVERY):
            self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML

        self._handle.update(HTML(self.page()))
