"""Which node stands aside when two cannot connect to each other and everybody else reaches both.

Nobody can tell which of the two is at fault. All such pairs together say more: the node that is in most of them goes
first, so that a node that reaches few, or lies, goes alone. Where that leaves a choice, the last in the order of
preference goes: a newcomer, a spare, the highest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Pair = frozenset[str]
"""Two ids."""


def apart(pairs: Iterable[Pair], order: Callable[[str], tuple[int, int]]) -> dict[str, tuple[str, ...]]:
    """Return the nodes that stand aside, each with those it does not reach, sorted; no pair is left of the others.

    order: nodes with smaller values are preferred.
    """
    near: dict[str, set[str]] = {}
    for one, other in pairs:
        near.setdefault(one, set()).add(other)
        near.setdefault(other, set()).add(one)
    places = {id: (*order(id), id) for id in near}
    aside: dict[str, tuple[str, ...]] = {}
    while near:
        worst = max(near, key=lambda id: (len(near[id]), places[id]))
        others = near.pop(worst)
        aside[worst] = tuple(sorted(others))
        for id in others:
            near[id].discard(worst)
            if not near[id]:
                del near[id]
    return aside
