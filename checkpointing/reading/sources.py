"""What a place is that tiles come from, and what it may be able to do beside giving them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from checkpointing.errors import SourceError
from checkpointing.format.tiles import Box, TensorSpec

LITTLE = 1 << 20
"""Bytes that are worth a request to a source near by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A tile that a source says it has."""

    spec: TensorSpec
    """The tensor."""
    box: Box
    """Which part of it."""
    digest: str
    """BLAKE3 digest of its bytes, in hex."""
    source: str
    """Key of the source in the mapping given to `resolve`."""
    where: Any
    """A JSON-able locator that only its source reads."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tile."""
        return self.box.numel * self.spec.itemsize


class TileSource(Protocol):
    """A place tiles come from. Called from several threads at once.

    A source may also be `Filling`, `Prefetching` or `Repairing`.
    """

    name: str

    def fetch(self, tile: Offered) -> bytes | bytearray | memoryview:
        """Return the bytes of the tile's box, C-contiguous.

        SourceError when it cannot; TileLost when that says nothing about its other tiles.
        """
        ...


@runtime_checkable
class Prefetching(Protocol):
    """A source that wants to know what comes next.

    It is told what will be fetched, each tile exactly once and soon, in batches of bounded size, so that it can ask for
    many tiles in one request.
    """

    def prefetch(self, tiles: Sequence[Offered]) -> None:
        """Ask for these tiles; SourceError is ignored, for `fetch` will say it again."""
        ...


@runtime_checkable
class Distant(Protocol):
    """A source whose every request costs so much that it wants to be asked for more at a time."""

    little: int
    """Bytes that are worth one request; more memory than that is used for requests under way only if there is more."""


@runtime_checkable
class Filling(Protocol):
    """A source that writes tiles to where they are wanted; it is not asked to fetch or prefetch them then."""

    def fill(self, wanted: Sequence[tuple[Offered, memoryview]]) -> Iterator[tuple[int, SourceError | None]]:
        """Write each tile into its buffer, of the tile's bytes; yield its place in `wanted`, and why it failed if so.

        Each is yielded once, in any order, as soon as it is there. A failed one's buffer may hold anything.
        """
        ...


@runtime_checkable
class Repairing(Protocol):
    """A source that can mend a copy that was found bad."""

    def repair(self, tile: Offered, data: bytes | bytearray | memoryview) -> None:
        """Put good bytes, already verified, in the place of the bad ones; SourceError when it cannot."""
        ...
