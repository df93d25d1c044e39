"""What `elastic3d islands show --json` prints, beside its `schema`."""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d.islands.record import Sealed, Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandsDocument:
    """What a store holds of the islands that meet there."""

    store: str
    """Where they meet."""
    setup: Setup | None
    """What all of them have in common; null before the first one came."""
    records: tuple[Sealed, ...]
    """All outer steps, the first being that the islands began."""
    asking: tuple[str, ...]
    """Islands that ask to be admitted."""
    left: tuple[str, ...]
    """Islands that are over."""
    consumed: int
    """Chunks of samples that were merged, each the samples of one island in one round."""
    waiting: int
    """Chunks that an island was lost with, and that are handed out again at the next outer step."""
    under_way: int
    """Chunks of the round that is not merged yet."""
    whole: bool
    """Whether every chunk is accounted for exactly once."""
