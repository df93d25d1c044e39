"""How near nodes are to each other: rank order, holes and buddies, from the labels that each node brings.

A node's place is its labels from far to near: zone, rack, switch, host. Two nodes are as near as the number of labels
they share from the front; a rack of one zone is never the rack of that name in another. A missing label counts as a
name of its own, so that unlabelled nodes stand together.

Labels matter only if they group nodes: if some nodes are nearer to each other than others. If none are, because nobody
has labels or each node has only its own host, arrival order and ring order stay as they are.

All functions are pure and give the same result on every node. They cost O(n log n).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elastic3d.values import Generation, Layout, Node

LEVELS = ("zone", "rack", "switch", "host")
"""From far to near."""

Path = tuple[str, ...]
"""One name per level."""


def path_of(node: Node) -> Path:
    """Return the node's place."""
    return tuple(node.labels.get(level, "") for level in LEVELS)


def nearness(one: Path, other: Path) -> int:
    """Return how many levels two nodes share: 0 for different zones, `len(LEVELS)` for the same host."""
    for depth, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if mine != theirs:
            return depth
    return len(LEVELS)


def order(nodes: Sequence[Node], layout: Layout | None) -> tuple[Node, ...]:
    """Return `nodes` in the rank order of a first generation; arrival order among equals.

    The nodes of one pipeline chain, which hold the same columns of dp, are taken from one switch, rack or zone that has
    enough of them; whole chains are cut from the nearest groups first. If a node holds whole stages, its pipeline
    neighbours are the nodes before and after it, and near nodes just stand together.
    """
    if not _grouped([path_of(node) for node in nodes]):
        return tuple(nodes)
    columns = _columns(len(nodes), _cells(nodes), layout)
    length = len(columns[0]) if len({len(column) for column in columns}) == 1 else len(nodes)
    placed: list[Node | None] = [None] * len(nodes)
    positions = [position for column in columns for position in column]
    for position, node in zip(positions, _chains(nodes, length), strict=True):
        placed[position] = node
    return tuple(node for node in placed if node is not None)


def arrange(previous: Generation | None, chosen: Sequence[Node], layout: Layout | None) -> tuple[Node, ...]:
    """Return `chosen` in rank order: survivors keep theirs, newcomers fill the holes that others left.

    A hole goes to the newcomer nearest to its pipeline neighbours under `layout`, else to the one nearest to the node
    that stood there.
    Newcomers beyond the holes follow, near ones together. With fewer newcomers than holes the first holes are filled.
    """
    if previous is None or not previous.nodes:
        return order(chosen, layout)
    coming = {(node.name, node.incarnation): node for node in chosen}
    standing = [(old, coming.pop((old.name, old.incarnation), None)) for old in previous.nodes]
    newcomers = [node for node in chosen if (node.name, node.incarnation) in coming]
    filled: list[Node | None] = []
    stood: dict[int, Node] = {}
    for old, survivor in standing:
        if survivor is None and len(stood) < len(newcomers):
            stood[len(filled)] = old
        elif survivor is None:
            continue
        filled.append(survivor)
    pool = _Pool(newcomers)
    cells = _cells(chosen)
    for hole, old in stood.items():
        around = (filled[at] for at in _neighbours(hole, len(chosen), cells, layout) if at < len(filled))
        filled[hole] = pool.take([path_of(node) for node in (*around, old) if node is not None])
    rest = pool.rest()
    return tuple(node for node in filled if node is not None) + tuple(_chains(rest, len(rest)))


def buddies(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Return, for each node, the index of the one that keeps a copy of its snapshots.

    A permutation, without a fixed point for two or more nodes. As few nodes as possible have their buddy in their own
    zone; the same holds for racks, switches and hosts. It is half a turn of the nodes sorted by place: a group of at
    most half of the nodes is turned out of itself entirely, and one of q > n/2 has no more than n - q places to go to,
    all of which it uses; groups of every level are contiguous, so that one turn is the best for all levels at once.
    """
    paths = [path_of(node) for node in nodes]
    count = len(nodes)
    if not _grouped(paths):
        return tuple((at + 1) % count for at in range(count))
    turned = sorted(range(count), key=lambda at: (paths[at], at))
    buddy_of = [0] * count
    for at, index in enumerate(turned):
        buddy_of[index] = turned[(at + count // 2) % count]
    return tuple(buddy_of)


def _grouped(paths: Sequence[Path]) -> bool:
    """Return whether some nodes are nearer to each other than others."""
    for depth in range(1, len(LEVELS) + 1):
        names = len({path[:depth] for path in paths})
        if names > 1:
            return names < len(paths)
    return False


def _cells(nodes: Sequence[Node]) -> int:
    """Return how many ranks a node holds; all hold the same number."""
    return len(nodes[0].slots) if nodes else 0


def _columns(count: int, ranks: int, layout: Layout | None) -> list[list[int]]:
    """Return the positions 0..count-1 by the dp column of their first rank, each column in order of its stages.

    rank = ((pp * dp + dp_i) * cp + cp_i) * tp + tp_i, and position n holds the ranks [n * ranks, (n + 1) * ranks).
    """
    if layout is None or not layout.world or not ranks:
        return [list(range(count))]
    columns: defaultdict[int, list[int]] = defaultdict(list)
    for position in range(count):
        columns[position * ranks % layout.stage_ranks].append(position)
    return [columns[at] for at in sorted(columns)]


def _neighbours(position: int, count: int, ranks: int, layout: Layout | None) -> Iterator[int]:
    """Yield the positions that hold the stages before and after those of `position`, for its dp columns."""
    if layout is None or not layout.world:
        return
    stage = layout.stage_ranks
    seen = {position}
    for shift in (-stage, stage):
        for rank in range(position * ranks + shift, (position + 1) * ranks + shift):
            at = rank // ranks
            if rank >= 0 and at < count and at not in seen:
                seen.add(at)
                yield at


@dataclass(slots=True)
class _Group:
    """The nodes of one name, and the groups one level nearer, in order of arrival."""

    nodes: list[Node] = field(default_factory=list)
    inner: dict[str, _Group] = field(default_factory=dict)


def _chains(nodes: Sequence[Node], length: int) -> list[Node]:
    """Return `nodes` so that as many runs of `length` as possible each lie in one near group; near ones together."""
    root = _Group()
    for node in nodes:
        group = root
        for name in path_of(node):
            group = group.inner.setdefault(name, _Group())
        group.nodes.append(node)
    whole, rest = _cut(root, max(length, 1))
    return whole + rest


def _cut(group: _Group, length: int) -> tuple[list[Node], list[Node]]:
    """Return the whole chains of a group, one after the other, and the nodes left over."""
    whole, rest = [], list(group.nodes)
    for inner in group.inner.values():
        cut, left = _cut(inner, length)
        whole += cut
        rest += left
    fits = len(rest) // length * length
    return whole + rest[:fits], rest[fits:]


class _Pool:
    """Newcomers waiting for a hole, by place."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._waiting = dict(enumerate(nodes))
        near: defaultdict[Path, deque[int]] = defaultdict(deque)
        for number, node in self._waiting.items():
            path = path_of(node)
            for depth in range(len(LEVELS) + 1):
                near[path[:depth]].append(number)
        self._near: Mapping[Path, deque[int]] = near

    def take(self, anchors: Sequence[Path]) -> Node:
        """Take the node nearest to any of the anchors, the first that arrived among equals."""
        for depth in range(len(LEVELS), -1, -1):
            for anchor in anchors:
                nearest = self._near.get(anchor[:depth], deque())
                while nearest and nearest[0] not in self._waiting:
                    nearest.popleft()
                if nearest:
                    return self._waiting.pop(nearest.popleft())
        raise AssertionError("more holes than newcomers")

    def rest(self) -> list[Node]:
        """Return the newcomers left, in order of arrival."""
        return list(self._waiting.values())
