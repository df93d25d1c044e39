"""What follows from a generation alone: ranks, names and the ring. Computed once per record, however many ask.

A record of 10,000 nodes is one object for a member, and for all members of a simulation. Results are therefore kept by
the object's identity (its values cannot be hashed: labels are dicts), for the few newest records.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic3d.values import Generation, Node

KEPT = 32
"""Results that are kept: more than there are records alive at once, even with several members in one process."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationIndex:
    """The members of one generation by id. node_ranks: position among the active nodes."""

    ids: tuple[str, ...]
    node_ranks: dict[str, int]
    spares: dict[str, int]
    nodes: dict[str, Node]
    names: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Members in the order in which they watch each other."""

    nodes: tuple[Node, ...]
    ids: tuple[str, ...]
    index: dict[str, int]

    def after(self, id: str, out: Container[str], count: int = 2) -> list[Node]:
        """Return the next `count` members of the ring after `id`, without those that are out."""
        return list(self._walk(id, out, count, 1))

    def before(self, id: str, out: Container[str], count: int = 2) -> list[Node]:
        """Return the `count` members of the ring before `id`, nearest first."""
        return list(self._walk(id, out, count, -1))

    def around(self, id: str, out: Container[str]) -> tuple[str, ...]:
        """Return the ids of all members connected with `id`: up to two on each side."""
        near = (*self._walk(id, out, 2, 1), *self._walk(id, out, 2, -1))
        return tuple(dict.fromkeys(node.id for node in near))

    def _walk(self, id: str, out: Container[str], count: int, step: int) -> Iterator[Node]:
        size = len(self.ids)
        at = self.index[id]
        for _ in range(size - 1):
            at = (at + step) % size
            if self.ids[at] not in out:
                yield self.nodes[at]
                count -= 1
                if not count:
                    return


_kept: dict[tuple[int, ...], tuple[tuple[Any, ...], Any]] = {}


def _once(make: Callable[..., T], *records: Generation | None) -> T:
    key = (id(make), *map(id, records))
    entry = _kept.get(key)
    if entry is None:
        if len(_kept) >= KEPT:
            _kept.clear()
        # The records are kept as well: an identity means something only while its object lives.
        entry = _kept[key] = (records, make(*records))
    made: T = entry[1]
    return made


def index_of(generation: Generation) -> GenerationIndex:
    """Return the members of this generation, by id."""
    return _once(_index, generation)


def ring_of(current: Generation | None, proposed: Generation | None) -> Ring:
    """Return the ring: active nodes, spares, and those that a proposal adds; callers leave out the buried ones."""
    return _once(_ring, current, proposed)


def _index(generation: Generation) -> GenerationIndex:
    ids = tuple(node.id for node in generation.nodes)
    spares = tuple(node.id for node in generation.spares)
    nodes = dict(zip((*ids, *spares), (*generation.nodes, *generation.spares), strict=True))
    return GenerationIndex(
        ids=ids,
        node_ranks={id: at for at, id in enumerate(ids)},
        spares={id: at for at, id in enumerate(spares)},
        nodes=nodes,
        names={node.name: id for id, node in nodes.items()},
    )


def _ring(current: Generation | None, proposed: Generation | None) -> Ring:
    members = dict(index_of(current).nodes) if current is not None else {}
    if proposed is not None:
        for id, node in index_of(proposed).nodes.items():
            members.setdefault(id, node)
    ids = tuple(members)
    return Ring(nodes=tuple(members.values()), ids=ids, index={id: at for at, id in enumerate(ids)})
