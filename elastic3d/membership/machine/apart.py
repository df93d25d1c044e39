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
    left = set(pairs)
    aside: dict[str, tuple[str, ...]] = {}
    while left:
        count: dict[str, int] = {}
        for pair in left:
            for id in pair:
                count[id] = count.get(id, 0) + 1
        worst = max(count, key=lambda id: (count[id], order(id), id))
        aside[worst] = tuple(sorted(id for pair in left if worst in pair for id in pair if id != worst))
        left = {pair for pair in left if worst not in pair}
    return aside
