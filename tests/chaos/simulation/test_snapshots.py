"""Which steps are still in memory when nodes are lost, by what their ranks hold of the state."""

from __future__ import annotations

import pytest

from chaos.simulation.snapshots import Snapshots, parts_of
from elastic3d.values import Cause, Generation, Layout, Node, Slot


def generation(layout: Layout | None, *, nodes: int) -> Generation:
    """Return one of nodes that are alike, of one rank each, in their order."""
    made = [
        Node(name=f"n{at}", incarnation="1", address="127.0.0.1", slots=(Slot(tile_port=1),)) for at in range(nodes)
    ]
    return Generation(number=1, cause=Cause.START, nodes=tuple(made), layout=layout)


@pytest.mark.parametrize(
    ("layout", "alike"),
    [
        (Layout(pp=1, dp=8), []),
        (Layout(pp=1, dp=8, replicas=2), [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (Layout(pp=2, dp=4, replicas=2), [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (Layout(pp=1, dp=4, tp=2, replicas=4), [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (Layout(pp=1, dp=4, cp=2), []),
        (None, []),
    ],
    ids=str,
)
def test_ranks_of_several_replicas_hold_the_same(layout: Layout | None, alike: list[tuple[int, ...]]) -> None:
    """Those at one place of the pipeline, of tp and among the shards; of one replica no two."""
    held = [part for (part,) in parts_of(generation(layout, nodes=8))]
    same = {part: tuple(rank for rank, other in enumerate(held) if other == part) for part in held}
    assert [ranks for ranks in same.values() if len(ranks) > 1] == alike


@pytest.mark.parametrize(
    ("replicas", "there", "newest"),
    [
        (1, [0, 1, 2, 3], 9),
        (1, [0, 2, 3], 7),  # the buddy of the lost one has an older copy
        (1, [2, 3], 0),  # a node and its buddy
        (2, [0, 2, 3], 9),
        (2, [2, 3], 9),
        (2, [1, 2], 9),
        (2, [1, 3], 7),  # whoever computes a part is lost
        (4, [2], 9),
    ],
)
def test_the_newest_step_is_the_one_of_which_the_whole_state_is_there(
    replicas: int, there: list[int], newest: int
) -> None:
    """Whoever has it: its own ranks, their buddies, or another replica."""
    made = generation(Layout(pp=1, dp=4, replicas=replicas), nodes=4)
    snapshots = Snapshots()
    snapshots.began(made, 4, behind=2)
    for step in range(5, 10):
        snapshots.stepped(made, step)
    assert snapshots.newest([made.nodes[at].id for at in there])[0] == newest
