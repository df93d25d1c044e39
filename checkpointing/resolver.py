"""One resolver for all tiers: wanted regions in, verified bytes out.

Whether a tile comes from this host's memory, a peer's memory, local disk or object storage is its source's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from checkpointing.tiles import Box, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A tile that a source says it has.

    source: key of the source in the mapping given to `resolve`. where: a JSON-able locator only its source reads.
    """

    spec: TensorSpec
    box: Box
    digest: str
    source: str
    where: Any


class TileSource(Protocol):
    """A place tiles come from. Called from several threads at once.

    A source may also have `prefetch(tiles: Sequence[Offered]) -> None`: it is told what will be fetched next, each
    exactly once and soon, in batches of bounded size, so that it can ask for many tiles in one request.
    """

    name: str

    def fetch(self, tile: Offered) -> bytes | memoryview:
        """Return the bytes of the tile's box, C-contiguous; raise SourceError when it cannot."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What came from one source and was good."""

    tiles: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One tile that a source offered and could not give, or gave with wrong bytes."""

    source: str
    key: str
    box: Box
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Where everything came from, by source, and what failed on the way."""

    sources: Mapping[str, Tally]
    failures: tuple[Failure, ...] = ()


Destination = Callable[[TensorSpec, Box], memoryview]


def resolve(
    wanted: Iterable[tuple[TensorSpec, Box]],
    offers: Iterable[Offered],
    sources: Mapping[str, TileSource],
    destination: Destination,
    *,
    in_flight: int = 4,
) -> Resolved:
    """Fill the destination of every wanted region from the offered tiles."""
    raise NotImplementedError
