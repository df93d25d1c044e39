"""Whether the ordered sum goes from replica to replica: a pure function of the layout, which changes no bit."""

from __future__ import annotations

from elastic3d.values import Layout

LEAST = 4
"""Ranks of a replica from which on a sum that goes on, of 4 bytes a number, is less than all pieces of 2 bytes."""


def passed_on(layout: Layout) -> bool:
    """Return whether sums go from replica to replica, as `parallel/reduction/passed.py` has them.

    A rank of a replica of S ranks sends 4 / S bytes a number in a turn then; without, 2 or 4 bytes of each number to
    all ranks of other replicas. With unequal shares there are turns in which some replicas have no piece.
    """
    return layout.replicas > 1 and layout.shards >= LEAST and not layout.shares
