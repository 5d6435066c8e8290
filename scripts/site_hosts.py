"""Checks that the pages of a built site load nothing from other hosts: no font, script, style or picture.

    python scripts/site_hosts.py build/site

Exit code 1 with a list of what a page would load. Links that a reader may follow are not loads.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

# The attribute by which each element loads something.
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
# Kinds of `link` that load nothing.
NAMES_ONLY = {"canonical", "prev", "next", "alternate", "author"}


class Loads(HTMLParser):
    """Collects in `found` the addresses on other hosts that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(LOADS.get(tag, "")) or ""
        if address.startswith(("http://", "https://", "//")) and given.get("rel") not in NAMES_ONLY:
            self.found.append(address)


def loads(text: str) -> list[str]:
    """The addresses on other hosts that a page of HTML loads."""
    parser = Loads()
    parser.feed(text)
    return parser.found


def main(site: Path) -> int:
    """Check every page of a site; prints what is wrong."""
    pages = sorted(site.rglob("*.html"))
    wrong = [
        f"{page.relative_to(site)} loads {address}"
        for page in pages
        for address in loads(page.read_text(encoding="utf-8"))
    ]
    print("\n".join(wrong) or f"{len(pages)} pages, which load nothing from other hosts")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
