"""The place of each rank on the axes of a layout.

rank = ((pp index * dp + dp index) * cp + cp index) * tp + tp index: tp is innermost and cp next, so that both stay
within a node, and the ranks of one pipeline stage are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from elastic3d.errors import LayoutError


class Axes(Protocol):
    """Sizes of the mesh axes: of a layout, or of a mesh that somebody asks about."""

    @property
    def dp(self) -> int:
        """Data-parallel replicas."""
        ...

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        ...

    @property
    def cp(self) -> int:
        """Context-parallel ranks."""
        ...

    @property
    def world(self) -> int:
        """Number of ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank's place on the axes of a layout."""

    pp: int
    dp: int
    tp: int
    cp: int = 0


def place_of(rank: int, layout: Axes) -> RankPlace:
    """Return where a rank is on the axes."""
    if not 0 <= rank < layout.world:
        raise LayoutError(f"rank {rank} is not in a layout of {layout.world} ranks ({layout})")
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    return RankPlace(pp=pp, dp=dp, tp=tp, cp=cp)
