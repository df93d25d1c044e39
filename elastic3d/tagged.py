"""Frozen values of several classes as JSON: each under the name of its class, so that a reader knows which it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from elastic3d.values import from_json, to_json

T = TypeVar("T")


class Tagged(Generic[T]):
    """The classes that one connection carries, their union being T."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def to_json(self, value: T) -> tuple[str, Any]:
        """Return the name of a value's class, and its fields as plain JSON data."""
        return type(value).__name__, to_json(value)

    def from_json(self, name: str, fields: Any) -> T:
        """Return the value; ValueError for what is none of these."""
        if name not in self._kinds:
            raise ValueError(f"a message of kind {name[:80]!r}; known are {', '.join(self._kinds)}")
        value: T = from_json(self._kinds[name], fields)
        return value
