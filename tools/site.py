"""Check the built documentation: every internal link has a target, and pages load nothing from elsewhere.

    python -m tools.site site

Zensical's strict build checks links between pages; it does not follow those of included files and of docstrings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
"""Elements that a browser fetches by itself."""


class _Page(HTMLParser):
    """One page: its anchors, where it links to, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if not value:
                continue
            if name in ("id", "name"):
                self.anchors.add(value)
            if tag == "a" and name == "href":
                self.links.append(value)
            # Links in the head to other pages, or to the page itself, load nothing.
            relation = dict(attrs).get("rel") or ""
            if (tag, name) in _LOADED and relation not in ("canonical", "prev", "next", "alternate", "edit"):
                self.loaded.append(value)


def problems(site: Path) -> Iterator[str]:
    """Return what is wrong with the built site, a line each."""
    pages: dict[Path, _Page] = {}
    for path in sorted(site.resolve().rglob("*.html")):
        pages[path] = _Page()
        pages[path].feed(path.read_text())
    for path, page in pages.items():
        # Served for any address, so its own links are not relative to it.
        if path.name == "404.html":
            continue
        where = path.relative_to(site.resolve())
        for link in page.loaded:
            if urlsplit(link).netloc:
                yield f"{where} loads {link}"
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{where}: {link} leads nowhere"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{where}: {link}: the page has no such anchor"


def main() -> None:
    """Print what is wrong with the site named on the command line; exit with 1 if anything is."""
    broken_links = list(problems(Path(sys.argv[1])))
    for line in broken_links:
        print(line)
    sys.exit(1 if broken_links else 0)


if __name__ == "__main__":
    main()
