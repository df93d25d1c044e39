"""Takes values out of JSON that a stranger may have written (format.md, section 10)."""

from __future__ import annotations

from typing import Any

from checkpointing.errors import FormatError
from checkpointing.format.codecs import Codec
from checkpointing.format.names import is_digest
from checkpointing.format.tiles import ITEMSIZE, Box, TensorSpec

LARGEST_TILE = 64 << 20
"""The largest tile in bytes that a reader accepts: what a stranger's number can make it allocate."""

_INTEGERS = 1 << 63
_DIMS = 64
_KEY = 4096


class Fields:
    """One JSON object under a name; every method returns a checked field or raises FormatError naming both."""

    __slots__ = ("_body", "_where")

    def __init__(self, body: object, where: str) -> None:
        if not isinstance(body, dict):
            raise FormatError(f"{where}: expected an object")
        self._body = body
        self._where = where

    def fail(self, what: str) -> FormatError:
        """Return the error for this object."""
        return FormatError(f"{self._where}: {what}")

    def inner(self, field: str, what: str) -> Fields:
        """Return the object in a field, whose errors say `what` it is."""
        return Fields(self.raw(field), f"{self._where}: {what}")

    def raw(self, field: str) -> Any:
        """Return a field as it is."""
        if field not in self._body:
            raise self.fail(f"has no field {field!r}")
        return self._body[field]

    def integer(self, field: str) -> int:
        """Return a whole number from 0 to 2^63 - 1."""
        value = self.raw(field)
        return value if type(value) is int and 0 <= value < _INTEGERS else self._integer(field, value)

    def text(self, field: str) -> str:
        """Return a short text without control characters."""
        value = self.raw(field)
        if not isinstance(value, str) or len(value) > _KEY or not value.isprintable():
            raise self.fail(f"{field} is not a text of at most {_KEY} printable characters")
        return value

    def digest(self, field: str) -> str:
        """Return 64 hex digits."""
        value = self.raw(field)
        if not is_digest(value):
            raise self.fail(f"{field} is not 64 hex digits")
        return str(value)

    def optional(self, field: str) -> Any:
        """Return a field as it is, None if it is not there."""
        return self._body.get(field)

    def items(self, field: str) -> list[Any]:
        """Return a list."""
        value = self.raw(field)
        if not isinstance(value, list):
            raise self.fail(f"{field} is not a list")
        return value

    def integers(self, field: str) -> tuple[int, ...]:
        """Return a short list of whole numbers."""
        value = self.items(field)
        if len(value) > _DIMS:
            raise self.fail(f"{field} has more than {_DIMS} entries")
        for item in value:
            if type(item) is not int or not 0 <= item < _INTEGERS:
                self._integer(field, item)
        return tuple(value)

    def spec(self) -> TensorSpec:
        """Return the tensor of the fields key, dtype, shape."""
        spec = TensorSpec(key=self.text("key"), dtype=self.text("dtype"), shape=self.integers("shape"))
        if spec.dtype not in ITEMSIZE:
            raise self.fail(f"{spec.key}: dtype {spec.dtype!r} is not one this reader knows")
        if spec.box.numel * spec.itemsize >= _INTEGERS:
            raise self.fail(f"{spec.key}: shape {spec.shape} is too large")
        return spec

    def box(self, spec: TensorSpec) -> Box:
        """Return the tile's box of the fields start and stop, which lies in the tensor and has an element."""
        start, stop = self.integers("start"), self.integers("stop")
        fits = len(start) == len(stop) == len(spec.shape)
        for low, high, length in zip(start, stop, spec.shape, strict=False):
            if not low < high <= length:
                fits = False
        if not fits:
            raise self.fail(f"{spec.key}: {list(start)} to {list(stop)} is not a box in shape {list(spec.shape)}")
        box = Box(start=start, stop=stop)
        if box.numel * spec.itemsize > LARGEST_TILE:
            raise self.fail(f"{spec.key}: {box} is larger than the {LARGEST_TILE} bytes that a tile may have")
        return box

    def codec(self) -> Codec:
        """Return how the bytes are stored."""
        value = self.text("codec")
        try:
            return Codec(value)
        except ValueError:
            raise self.fail(f"codec {value!r} is not one this reader knows: a newer version wrote it") from None

    def _integer(self, field: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _INTEGERS:
            raise self.fail(f"{field} is {value!r:.40}, not a whole number from 0")
        return value
