"""Where one node begins to write: decided from what the storage has and how the run has come here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic3d.trackers.points import Void
from elastic3d.trackers.tracker import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One generation in which this node writes.

    restored: the step of the state that the run went on from, if this node has heard no step of the run before; then
    the points after it are those of another life of the run, and are made again. None otherwise.
    """

    generation: int
    config: Mapping[str, str | int] = field(default_factory=dict)
    voids: tuple[Void, ...] = ()
    restored: int | None = None


def rewound_to(turn: Turn, position: Position | None) -> int | None:
    """Return the step up to which what the storage has is right, if it has more than that; else None."""
    if position is None:
        return None
    wrong = [void.step for void in turn.voids if void.covers(position.step, position.generation)]
    if turn.restored is not None and turn.restored < position.step:
        wrong.append(turn.restored)
    return min(wrong, default=None)
