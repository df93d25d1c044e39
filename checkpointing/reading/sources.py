"""The protocol of a source of tiles, and what sources may be able to do besides delivering them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from checkpointing.errors import SourceError
from checkpointing.format.tiles import Box, TensorSpec

LITTLE = 1 << 20
"""Bytes that are worth a request to a nearby source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A tile that a source says it has."""

    spec: TensorSpec
    """The tensor."""
    box: Box
    """The part of it."""
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
    """A place that tiles come from. Called from several threads at once.

    A source may also be `Filling`, `Prefetching` or `Repairing`.
    """

    name: str

    def fetch(self, tile: Offered) -> bytes | bytearray | memoryview:
        """Return the bytes of the tile's box, C-contiguous.

        SourceError if it cannot; TileLost if that says nothing about its other tiles.
        """
        ...


@runtime_checkable
class Sparing(Protocol):
    """Offers of which some are left out until they are needed."""

    def spare(self, key: str) -> Iterable[Offered]:
        """Return more offers of a tensor, preferred ones first; called once for each of which the others do not do."""
        ...


@runtime_checkable
class Prefetching(Protocol):
    """A source that wants to know what comes next.

    It is given the tiles that will be fetched, each exactly once and soon, in batches of bounded size, so that it can
    request many tiles at once.
    """

    def prefetch(self, tiles: Sequence[Offered]) -> None:
        """Request these tiles; SourceError is ignored, since `fetch` will raise it again."""
        ...


@runtime_checkable
class Distant(Protocol):
    """A source whose requests cost so much that each should ask for more."""

    little: int
    """Bytes that are worth one request; more memory is used for requests under way only if more is left to read."""


@runtime_checkable
class Filling(Protocol):
    """A source that writes tiles into their destinations; it is then not asked to fetch or prefetch them."""

    def fill(self, wanted: Sequence[tuple[Offered, memoryview]]) -> Iterator[tuple[int, SourceError | None]]:
        """Write each tile into its buffer, of the tile's size; yield its index in `wanted`, and why it failed, if so.

        Each is yielded once, in any order, as soon as it is there. A failed one's buffer may hold anything.
        """
        ...


@runtime_checkable
class Repairing(Protocol):
    """A source that can repair a copy that was found bad."""

    def repair(self, tile: Offered, data: bytes | bytearray | memoryview) -> None:
        """Replace the bad bytes with good ones, already verified; SourceError if it cannot."""
        ...
