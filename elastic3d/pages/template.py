"""The style of all pages, and how values are put into a page. Pure, but for the files of this package."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files

_PLACE = re.compile(r"@@([a-z_]+)@@")


@functools.cache
def style() -> str:
    """Return the style sheet: light or dark as the reader has it, from a phone's width on."""
    return files("elastic3d.pages").joinpath("style.css").read_text(encoding="utf-8")


@functools.cache
def style_source() -> str:
    """Return what a Content-Security-Policy allows of styles: this one alone, by its digest."""
    digest = hashlib.sha256(style().encode()).digest()
    return f"style-src 'sha256-{base64.b64encode(digest).decode()}'"


def filled(template: str, places: Mapping[str, str]) -> str:
    """Return a template with a value in each of its places, `@@name@@`; values are not looked into."""
    return _PLACE.sub(lambda match: places[match[1]], template)
