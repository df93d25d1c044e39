"""Mistakes that let a device lie unseen, or an honest one be convicted, show within a few audits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from elastic3d.health import audit, digest, hearing
from elastic3d.health.audit import audit_at, plan
from elastic3d.health.digest import Words, digest_of
from elastic3d.health.hearing import Statement, hear
from elastic3d.owners import Owners
from elastic3d.values import Layout

Plant = Callable[[pytest.MonkeyPatch], None]

STEPS = 60
RIGHT = torch.arange(64, dtype=torch.float32)


def violations() -> list[str]:
    """Audit some jobs in each of which all devices of one node compute wrongly, and return what went wrong."""
    wrong = []
    for nodes in ([0, 1], [0, 0, 1, 1], [0, 0, 1], [0, 1, 2], [0, 1, 2, 3]):
        for liar in set(nodes):
            wrong += audited(nodes, liar)
    return wrong


def audited(nodes: Sequence[int], liar: int) -> list[str]:
    dp = len(nodes)
    made = plan(Layout(pp=1, dp=dp), budget=1.0, blocks=4, counts=[2 * dp], nodes=nodes)
    said = [digest_of(swapped() if node == liar else RIGHT) for node in nodes]
    wrong, seen = [], False
    for step in range(STEPS):
        one = audit_at(made, step, seed=3, owners=Owners(dp=dp), micro_batches=2 * dp)
        if one is None:
            continue
        for column in range(dp):
            other = (column + one.shift) % dp
            if 2 * max(map(list(nodes).count, nodes)) <= dp and nodes[column] == nodes[other]:
                wrong.append(f"column {column} is audited by its own node")
            if said[column] == said[other]:
                continue
            seen = True
            ranks = {rank: f"node{node}" for rank, node in enumerate(nodes)}
            given = [Statement(rank=r, node=ranks[r], device="k", digest=said[r]) for r in (column, other)]
            given += [Statement(rank=r, node=ranks[r], device="k", digest=said[r], repeated=True) for r in range(dp)]
            convicted = hear(given).culprits
            wrong += [f"rank {rank} is honest and convicted" for rank in convicted if nodes[rank] != liar]
    return wrong if seen else [*wrong, f"node {liar} of {nodes} lies unseen"]


def swapped() -> torch.Tensor:
    """Return right numbers of which two words changed places, as a wrong address may leave them."""
    changed = RIGHT.clone()
    changed[0:2], changed[6:8] = RIGHT[6:8], RIGHT[0:2]
    return changed


def ask_the_same_node(patch: pytest.MonkeyPatch) -> None:
    """Columns are audited by any other one, be it of the same node."""
    patch.setattr(audit, "shifts", lambda layout, nodes: tuple(range(1, layout.dp)))


def count_witnesses_not_nodes(patch: pytest.MonkeyPatch) -> None:
    """Two witnesses convict, though one node made both of them."""

    def groups(last: Sequence[Statement]) -> list[list[Statement]]:
        by = {one.digest: [other for other in last if other.digest == one.digest] for one in last}
        return [group for group in by.values() if len(group) > 1]

    patch.setattr(hearing, "_independent", groups)


def convict_upon_two_statements(patch: pytest.MonkeyPatch) -> None:
    """The word of one rank against another's is enough, if there is no third."""

    def groups(last: Sequence[Statement]) -> list[list[Statement]]:
        by = {one.digest: [other for other in last if other.digest == one.digest] for one in last}
        return sorted(by.values(), key=len, reverse=True)[:1]

    patch.setattr(hearing, "_independent", groups)


def digest_by_exclusive_or(patch: pytest.MonkeyPatch) -> None:
    """Words are combined without regard to their places."""

    def combined(words: Words, first: int = 0) -> int:
        return int(np.bitwise_xor.reduce(words))

    patch.setattr(digest, "words_digest", combined)


def test_an_honest_audit_finds_who_lies_and_nobody_else() -> None:
    """Whatever node it is, and however the others are spread."""
    assert violations() == []


@pytest.mark.parametrize(
    "plant",
    [ask_the_same_node, count_witnesses_not_nodes, convict_upon_two_statements, digest_by_exclusive_or],
)
def test_a_planted_bug_shows(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake is one that a careless change could make."""
    plant(monkeypatch)
    assert violations()
