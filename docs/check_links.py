"""Check a built site: links lead somewhere, and no page loads anything from a network.

``python docs/check_links.py FOLDER`` prints every broken link and ends with status 1 if there is
one. Links to other sites are not followed.
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}
EXTERNAL_LINKS = {"canonical", "author", "license"}


class Page(HTMLParser):
    """Anchors and links of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = {"", "top"}, [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Collect what a tag names, links to and loads."""
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        state = unquote(values.get("href", ""))
        if state.startswith("#") and "=" in state:  # a view that the page's script shows
            self.anchors.add(state[1:])
        for name in ("href", "src"):
            if name in values and values.get("rel") not in EXTERNAL_LINKS:
                (self.loaded if (tag, name) in LOADED else self.links).append(values[name])


page_of = cache(Page)


def problems(root: Path) -> list[str]:
    """Return a line for each broken link of each page."""
    found = []
    for path in sorted(root.rglob("*.html")):
        page = page_of(path)
        for link in page.loaded:
            if urlsplit(link).netloc:
                found.append(f"{path}: loads {link}")
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path.parent / unquote(parts.path) if parts.path else path
            if not target.is_file():
                found.append(f"{path}: no file {link}")
            elif (
                target.suffix == ".html"
                and unquote(parts.fragment) not in page_of(target.resolve()).anchors
            ):
                found.append(f"{path}: no anchor {link}")
    return found


if __name__ == "__main__":
    lines = problems(Path(sys.argv[1]).resolve())
    print("\n".join(lines))
    sys.exit(bool(lines))
