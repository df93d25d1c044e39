"""Which rank stands where on the axes of a layout.

rank = (pp index * dp + dp index) * tp + tp index: tp is innermost, so that it stays within a node, and the ranks of one
pipeline stage are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d.errors import LayoutError
from elastic3d.values import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's place on the axes of a layout."""

    pp: int
    dp: int
    tp: int


def place_of(rank: int, layout: Layout) -> Place:
    """Return where a rank is on the axes."""
    if not 0 <= rank < layout.world:
        raise LayoutError(f"rank {rank} is not in a layout of {layout.world} ranks ({layout})")
    rest, tp = divmod(rank, layout.tp)
    pp, dp = divmod(rest, layout.dp)
    return Place(pp=pp, dp=dp, tp=tp)
