"""Images in the report: small ones, inside the page itself, beside the prompt or the rollout that shows them.

They are thumbnails. An entry of the report has them under `images`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lockstep.report.page.markup import NOTHING, Html, html, together

STYLE = ".pictures img { max-width: 96px; max-height: 96px; margin: 0 .3em .3em 0; border: 1px solid var(--edge); }\n"
# Nothing else becomes a part of the page: no address, and no markup.
_INLINE = re.compile(r"data:image/(?:jpeg|png);base64,[A-Za-z0-9+/=]+")


def render_pictures(entry: Mapping[str, Any]) -> Html:
    """The images of an entry as HTML; empty if it has none."""
    urls = [url for url in entry.get("images") or () if isinstance(url, str) and _INLINE.fullmatch(url)]
    shown = together(html("<img src='{}' alt='image {}'>", url, n + 1) for n, url in enumerate(urls))
    return html("<div class='pictures'>{}</div>", shown) if shown else NOTHING
