"""Which members are cut off, judged by the ring: a pure function of who does not hear whom.

Each member is connected with the two before and the two after it. A connection is cut if either end calls the other
silent; those that are not cut hold the ring together in components. *Main* is the component with more active members
than any other; members outside it are cut off, and every connection between the two sides is cut. Two members of main
at the border that say so themselves are enough to know it (`sure`): a single member's word cuts only its own
connections, so that one that cannot hear isolates nobody but itself, and two members that are cut off together can
confirm nothing about those they lost. What a member that stands apart says is no evidence against it: it may have lost
its neighbours because they died. A connection that the ring has only just made holds nothing together yet: nobody could
have missed it. With one witness, or with no main at all (two nodes, two halves), nobody can tell from the ring who is
at fault: then the silent are asked through etcd.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

REACH = 2
"""How far along the ring connections go."""

Cut = tuple[str, str]
"""Two ids: the first says that the second is silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A member that stands apart from the judge's side, and the witnesses there that it or its companions are silent.

    main: the judge's side is main, whatever else may be cut without anybody knowing. sure: and two members of it say
    so. more: others of that side stand at the border and may say so soon. asked: it is itself a neighbour of the
    judge's side, so that its own silence is witnessed.
    """

    id: str
    witnesses: tuple[str, ...]
    main: bool
    sure: bool
    more: bool
    asked: bool


def cuts_of(ids: Sequence[str], index: dict[str, int], silent: Iterable[Cut]) -> frozenset[Cut]:
    """Return which of the pairs (witness, silent id) are connections of the ring."""
    cuts = set()
    for one, other in silent:
        known = one in index and other in index and one != other
        if known and _apart(index[one], index[other], len(ids)) <= REACH:
            cuts.add((one, other))
    return frozenset(cuts)


def made(ids: Sequence[str], before: dict[str, int]) -> frozenset[Cut]:
    """Return the connections of the ring `ids` that the ring `before`, given by its index, did not have."""
    connections = set()
    for at, id in enumerate(ids):
        for step in range(1, min(REACH, len(ids) - 1) + 1):
            other = ids[(at + step) % len(ids)]
            if not (id in before and other in before and _apart(before[id], before[other], len(before)) <= REACH):
                connections.add((id, other))
    return frozenset(connections)


def suspects(
    ids: Sequence[str], cuts: frozenset[Cut], active: dict[str, int], judge: str, fresh: frozenset[Cut] = frozenset()
) -> tuple[Suspect, ...]:
    """Return the members that the judge's side has lost, in ring order: none if the judge does not stand in main.

    `ids` is the ring without members that are out; `fresh` are its connections that may be cut without anybody knowing.
    """
    if not cuts or judge not in ids:
        return ()
    parts = _components(ids, cuts)
    if len(set(parts)) == 1:
        return ()
    here = ids.index(judge)
    mine, weight = parts[here], _weights(ids, parts, active)
    others = max(w for part, w in weight.items() if part != mine)
    if weight[mine] < others:
        return ()
    strict = weight[mine] > others
    proven = _components(ids, cuts | fresh) if fresh else parts
    ours = proven[here]
    safe = _weights(ids, proven, active)[ours]
    certain = strict and safe > max(others, weight[mine] - safe)
    border: dict[int, set[int]] = {}
    near: dict[int, set[int]] = {}
    asked: set[int] = set()
    for at, part in enumerate(parts):
        if part == mine:
            for step in (-2, -1, 1, 2):
                other = (at + step) % len(ids)
                if parts[other] != mine:
                    near.setdefault(parts[other], set()).add(at)
                    asked.add(other)
                    if (ids[at], ids[other]) in cuts:
                        border.setdefault(parts[other], set()).add(at)
    return tuple(
        Suspect(
            id=id,
            witnesses=tuple(ids[w] for w in sorted(border.get(parts[at], ()))),
            main=certain,
            sure=certain and sum(proven[w] == ours for w in border.get(parts[at], ())) >= 2,
            more=strict and len(near.get(parts[at], ())) >= 2,
            asked=at in asked,
        )
        for at, id in enumerate(ids)
        if parts[at] != mine and (strict or parts[at] in near)
    )


def _apart(one: int, other: int, size: int) -> int:
    apart = (one - other) % size
    return min(apart, size - apart)


def _weights(ids: Sequence[str], parts: list[int], active: dict[str, int]) -> dict[int, int]:
    weight: dict[int, int] = {}
    for id, part in zip(ids, parts, strict=True):
        weight[part] = weight.get(part, 0) + (id in active)
    return weight


def _components(ids: Sequence[str], cuts: frozenset[Cut]) -> list[int]:
    """Return, for each place on the ring, the number of its component."""
    size = len(ids)
    parent = list(range(size))

    def root(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    for at in range(size):
        for step in range(1, REACH + 1):
            other = (at + step) % size
            if (ids[at], ids[other]) not in cuts and (ids[other], ids[at]) not in cuts:
                one, two = root(at), root(other)
                parent[max(one, two)] = min(one, two)
    return [root(at) for at in range(size)]
