"""A node is convicted for its links only where nobody else can be at fault."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.health.hearing import Finding
from elastic3d.health.links import HOUR, FailedLinks, RankLink

NODES = "abcde"


def heard(*events: list[tuple[int, int]], nodes: str = NODES, apart: float = 1.0) -> tuple[Finding, tuple[int, ...]]:
    """Return the last finding; events: the links that failed at once, one event after the other."""
    links = FailedLinks(nodes)
    found = [
        links.hear([RankLink(sender=sender, receiver=receiver) for sender, receiver in event], number * apart)
        for number, event in enumerate(events)
    ]
    return found[-1].finding, found[-1].culprits


CASES = {
    "once": (heard([(0, 1)]), ()),
    "once, with everybody": (heard([(0, 1), (2, 1), (3, 1)]), ()),
    "the same link again": (heard([(0, 1)], [(0, 1)], [(0, 1)], [(1, 0)]), ()),
    "a second one of a node": (heard([(0, 1)], [(2, 1)]), ()),
    "a third one of a node": (heard([(0, 1)], [(1, 2)], [(3, 1)]), (1,)),
    "everybody's, twice": (heard([(0, 1), (2, 1), (3, 1)], [(0, 1)]), (1,)),
    "long ago": (heard([(0, 1)], [(1, 2)], [(3, 1)], apart=HOUR), ()),
    "two nodes' links": (heard([(0, 1)], [(1, 2)], [(3, 1)], [(3, 2)]), ()),
    "ranks of one node": (heard([(0, 2)], [(3, 1)], [(1, 4)], nodes="aabcd"), (0, 1)),
    "within a node": (heard([(0, 1)], [(1, 0)], nodes="aabcd"), (0, 1)),
    "its own": (heard([(1, 1)], [(1, 1)]), (1,)),
    "three nodes": (heard([(0, 1)], [(2, 1)], [(0, 1), (2, 1)], nodes="abc"), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_the_table(name: str) -> None:
    """The first time is an accident, and one pair never says which of the two it is."""
    (finding, got), culprits = CASES[name]
    assert got == culprits
    assert finding is (Finding.PERSISTENT if culprits else Finding.TRANSIENT)


@given(
    broken=st.sets(st.integers(0, 5), min_size=1, max_size=2),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.booleans()), min_size=1, max_size=12),
    nodes=st.integers(2, 6),
)
@settings(max_examples=500, deadline=None)
def test_the_honest_are_never_convicted(broken: set[int], events: list[tuple[bool, int, bool]], nodes: int) -> None:
    """Whatever the links of up to two broken nodes do, towards whomever, at whichever end."""
    ends = sorted(one for one in broken if one < nodes)
    if not ends:
        return
    links = FailedLinks(NODES + "f")
    for number, (first, other, sends) in enumerate(events):
        one = ends[0 if first else -1]
        pair = (one, other % nodes) if sends else (other % nodes, one)
        got = links.hear([RankLink(sender=pair[0], receiver=pair[1])], float(number))
        assert set(got.culprits) <= broken
