"""Tensors grouped by their names, like files by their paths, with the totals of each group."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from checkpointing.format.tiles import TensorSpec

_PART = re.compile(r"[^/.]*[/.]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A group of tensors or a single one. alike: how many groups that differ only in a number this one stands for.

    `tensors` and `bytes` count all of those together; `children` are those of one.
    """

    name: str
    tensors: int
    bytes: int
    spec: TensorSpec | None = None
    children: tuple[Node, ...] = ()
    alike: int = 1


def tree(specs: Iterable[TensorSpec], *, fold: bool = True) -> tuple[Node, ...]:
    """Return the groups at the top; with `fold`, numbered groups of the same contents become one, such as `0..11`."""
    paths = [(tuple(part for part in _PART.findall(spec.key) if part), spec) for spec in specs]
    return _level(paths, fold)


def _level(paths: list[tuple[tuple[str, ...], TensorSpec]], fold: bool) -> tuple[Node, ...]:
    nodes = []
    paths = sorted(paths, key=lambda item: (_order(item[0][0]), item[0]))
    for head, group in groupby(paths, key=lambda item: item[0][0].rstrip("/.") or item[0][0]):
        members = list(group)
        own = next((spec for path, spec in members if len(path) == 1), None)
        children = _level([(path[1:], spec) for path, spec in members if len(path) > 1], fold)
        nbytes = sum(spec.box.numel * spec.itemsize for _, spec in members)
        node = Node(name=head, tensors=len(members), bytes=nbytes, spec=own, children=children)
        if own is None and len(children) == 1 and children[0].alike == 1 and not head.isdecimal():
            separator = members[0][0][0].removeprefix(head) or "."
            node = replace(children[0], name=f"{head}{separator}{children[0].name}")
        nodes.append(node)
    return tuple(_folded(nodes)) if fold else tuple(nodes)


def _order(part: str) -> tuple[int, int, str]:
    text = part.rstrip("/.")
    return (0, int(text), text) if text.isdecimal() and text.isascii() and len(text) < 19 else (1, 0, text)


def _folded(nodes: list[Node]) -> list[Node]:
    folded: list[Node] = []
    run: list[Node] = []
    for node in [*nodes, None]:
        if node is not None and run and _follows(run[-1], node) and _contents(run[0]) == _contents(node):
            run.append(node)
            continue
        if len(run) > 1:
            tensors, nbytes = sum(one.tensors for one in run), sum(one.bytes for one in run)
            name = f"{run[0].name}..{run[-1].name}"
            folded.append(replace(run[0], name=name, tensors=tensors, bytes=nbytes, alike=len(run)))
        else:
            folded += run
        run = [] if node is None else [node]
    return folded


def _follows(one: Node, other: Node) -> bool:
    numbers = one.name.isdecimal() and other.name.isdecimal() and len(one.name) < 19 and len(other.name) < 19
    return numbers and int(one.name) + 1 == int(other.name) and one.spec is None and other.spec is None


def _contents(node: Node) -> tuple[object, ...]:
    """Return the values that alike groups share: names, dtypes and shapes below them."""
    own = (node.spec.dtype, node.spec.shape) if node.spec is not None else None
    return own, node.alike, tuple((child.name, _contents(child)) for child in node.children)
