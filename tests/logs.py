"""This process's events, as a test reads them."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from typing import Any


class _Lines(io.StringIO):
    def __init__(self, entries: list[Any]) -> None:
        super().__init__()
        self._entries = entries

    def write(self, text: str) -> int:
        self._entries += [json.loads(line) for line in text.splitlines()]
        return len(text)


@contextlib.contextmanager
def recorded() -> Iterator[list[Any]]:
    """Record stderr under `ELASTIC3D_LOG=json`."""
    entries: list[Any] = []
    before = os.environ.get("ELASTIC3D_LOG")
    os.environ["ELASTIC3D_LOG"] = "json"
    try:
        with contextlib.redirect_stderr(_Lines(entries)):
            yield entries
    finally:
        del os.environ["ELASTIC3D_LOG"]
        if before is not None:
            os.environ["ELASTIC3D_LOG"] = before
