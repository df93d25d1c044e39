"""Who has to stand aside where two nodes cannot connect to each other, and everybody else reaches both.

Which of the two is at fault nobody can tell. Of all pairs together there is more to know: whoever is part of more of
them goes first, so that a node that reaches few, or lies, goes alone. Where that leaves a choice, the last in the order
of preference goes: a newcomer, a spare, the highest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Pair = frozenset[str]
"""Two ids."""


def apart(pairs: Iterable[Pair], order: Callable[[str], tuple[int, int]]) -> dict[str, tuple[str, ...]]:
    """Return who is to stand aside, so that no pair is left of the others, each with whom it does not reach, sorted.

    order: the smaller, the rather a node stays.
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
