"""Which node a generation's record names to write the curves."""

from __future__ import annotations

import pytest

from elastic3d.membership import encoding
from elastic3d.membership.machine.forming import _writer
from elastic3d.values import Cause, Generation, Node


def formed(names: str, writer: int = 0) -> Generation:
    nodes = tuple(Node(name=name, incarnation="1", address="::1", slots=()) for name in names)
    return Generation(number=1, cause=Cause.START, nodes=nodes, writer=writer)


@pytest.mark.parametrize(
    ("before", "writer", "after", "named"),
    [
        ("", 0, "ab", "a"),
        ("ab", 0, "ab", "a"),
        ("ab", 0, "ca", "a"),  # it stays, wherever it stands
        ("ab", 1, "ab", "b"),
        ("abc", 0, "sbc", "b"),  # a newcomer fills the first hole, and has heard nothing
        ("abc", 2, "sab", "a"),
        ("ab", 0, "cd", "c"),
    ],
)
def test_the_node_that_wrote_goes_on_or_else_one_that_heard_the_steps(
    before: str, writer: int, after: str, named: str
) -> None:
    """A newcomer writes only where nobody else is left."""
    nodes = formed(after).nodes
    assert nodes[_writer(formed(before, writer), nodes)].name == named
    assert _writer(None, nodes) == 0


def test_the_record_keeps_it_and_refuses_one_that_is_not_there() -> None:
    """It is left out where it is the first node, so that such records are those of older versions."""
    one = formed("abc", writer=2)
    data = encoding.write_generation(one)
    assert encoding.read_generation(data) == one
    assert "writer" not in encoding.write_generation(formed("abc"))
    for wrong in (3, -1):
        with pytest.raises(ValueError, match="no writer"):
            encoding.read_generation({**data, "writer": wrong})
    for strange in (True, "2", 1.0):
        with pytest.raises(ValueError, match="expected int for writer"):
            encoding.read_generation({**data, "writer": strange})
