"""A page as a browser would read it, for tests."""

from __future__ import annotations

import re
from html.parser import HTMLParser

HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e</td><img src=x onerror=alert(1)>"
VOID = {"meta", "link", "input", "br", "img"}


class ParsedPage(HTMLParser):
    """Checks that every element is closed where it was opened, and notes elements and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def tags(self) -> list[str]:
        """The names of its elements."""
        return [tag for tag, _ in self.seen]


def parsed(text: str) -> ParsedPage:
    """Return a page that is well formed."""
    parser = ParsedPage()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def assert_loads_nothing(text: str) -> None:
    """Assert that a page names nothing outside, and has neither handlers nor styles in attributes."""
    assert set(re.findall(r"https?://[^\"' ]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|import\(|\bsrc=|XMLHttpRequest|WebSocket|sendBeacon|eval\(|Function\(", text)
    for tag, attributes in parsed(text).seen:
        wrong = [name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset", "data")]
        assert not wrong, tag
        assert attributes.get("href", "#") in ("#", "#main", "data:,", "./")
        assert attributes.get("action", "difference") == "difference"


def assert_usable_without_a_mouse(page: ParsedPage) -> None:
    """Assert that tables have headings, what scrolls can be focused and has a name, and ids are unique."""
    ids = [attributes["id"] for _, attributes in page.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.seen:
        if tag == "th":
            assert attributes["scope"] in ("col", "row", "colgroup")
        if attributes.get("class") == "scroll":
            assert attributes["tabindex"] == "0"
            assert {"aria-label", "aria-labelledby"} & set(attributes)
        if attributes.get("role") == "img":
            assert attributes["aria-label"]
