"""The one place where values become HTML. What is not HTML already is escaped, and its controls are made visible.

`html("<td>{}</td>", value)` makes HTML, and `together` puts pieces together. A text that was made in another way, such
as an f-string with tags, is a value like any other, so that its tags are shown and not obeyed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from markupsafe import Markup

from lockstep.safe_text import visible


class Html(Markup):
    """A piece of a page."""

    @classmethod
    def escape(cls, value: Any, /) -> Self:
        """A value as HTML; HTML stays as it is."""
        return super().escape(value if hasattr(value, "__html__") else visible(str(value)))


def html(form: str, *values: Any, **named: Any) -> Html:
    """HTML with values in the places of a form: `{}`, `{name}` or `{name:.2f}`, as `str.format` has them."""
    return Html(form).format(*values, **named)


def together(pieces: Iterable[Any], between: str = "") -> Html:
    """Pieces one after the other. `between` is HTML."""
    return Html(between).join(pieces)


NOTHING = Html()
