"""What nodes wait for within steps: what a rank waits for others goes to what held those up, and never for longer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.accounting.past_steps import TOGETHER
from elastic3d.health import sheet
from elastic3d.health.sheet import StepSheet
from elastic3d.health.step_waits import APART, StepWaits, Waits, WaitsHeard
from elastic3d.health.step_waits import by_node as of_rows
from elastic3d.values import Cause, Generation, Layout, Node, Schedule, Slot


def made(data: float = 0.0, copy: float = 0.0, busy: float = 0.4, waits: float = 0.1, rounds: float = 4.0) -> StepSheet:
    return StepSheet(work=1.0, rounds=rounds, forward=busy, data=data, copy=copy, wait_dp=waits)


def by_node(sheets: Sequence[StepSheet], nodes: Sequence[str], layout: Layout) -> dict[str, Waits]:
    return of_rows([one.row for one in sheets], nodes, layout)


def formed(nodes: int, slots: int = 1, layout: Layout | None = None, number: int = 1) -> Generation:
    places = tuple(Slot(tile_port=1) for _ in range(slots))
    names = tuple(Node(name=f"n{node}", incarnation="1", address="h", slots=places) for node in range(nodes))
    return Generation(number=number, cause=Cause.START, nodes=names, layout=layout or Layout(pp=1, dp=nodes * slots))


def vote(heard: WaitsHeard, steps: range, sheets: list[StepSheet], generation: Generation) -> list[StepWaits]:
    """Have all ranks' rows ride in the votes of some steps."""
    said = []
    for step in steps:
        rows = [sheets[rank].row for rank in sheet.speakers(step, len(sheets))]
        said.append(heard.heard(step, rows, generation))
    return [one for one in said if one is not None]


def test_a_wait_for_another_ranks_loader_is_a_wait_for_data() -> None:
    """Whoever waits, it is the same reason; what was waited without one is left with the step."""
    sheets = [made(data=0.25, waits=0.02), made(waits=0.27), made(data=0.05, waits=0.22)]
    assert by_node(sheets, "abc", Layout(pp=1, dp=3)) == {
        "a": (0.25, 0.0, 0.0),
        "b": (0.25, 0.0, 0.0),
        "c": (pytest.approx(0.25), 0.0, 0.0),
    }


def test_a_node_that_computed_meanwhile_did_not_wait() -> None:
    """What held another one up counts for as long as it waited itself."""
    sheets = [made(data=0.25, waits=0.0), made(busy=0.6, waits=0.05)]
    waits = by_node(sheets, "ab", Layout(pp=1, dp=2))
    assert waits["b"] == (0.05, 0.0, 0.0)


def test_a_wait_for_the_copy_of_another_rank_and_for_one_that_computes_longer() -> None:
    """In this order; the slow one does not wait for itself."""
    sheets = [made(copy=0.1, waits=0.5), made(busy=0.8, waits=0.1), made(waits=0.5)]
    waits = by_node(sheets, "abc", Layout(pp=1, dp=3))
    assert waits == {
        "a": (0.0, 0.1, pytest.approx(0.4)),
        "b": (0.0, 0.1, 0.0),
        "c": (0.0, 0.1, pytest.approx(0.4)),
    }


def test_more_micro_batches_are_no_slowness_nor_are_fewer_of_a_slow_node() -> None:
    """The layout deals them out: seven to two ranks; and three of eight to one that takes longer for each."""
    seven = [made(busy=0.4, rounds=4, waits=0.0), made(busy=0.3, rounds=3, waits=0.125)]
    assert by_node(seven, "ab", Layout(pp=1, dp=2))["b"] == pytest.approx((0, 0, 0))
    dealt = [made(busy=0.5, rounds=5, waits=0.0), made(busy=0.5, rounds=3, waits=0.0)]
    assert by_node(dealt, "ab", Layout(pp=1, dp=2)) == {"a": (0, 0, 0), "b": (0, 0, 0)}


def test_stages_are_not_compared_with_each_other() -> None:
    """The last one's head is work, and no slowness; within a stage all do the same."""
    layout = Layout(pp=2, dp=2, schedule=Schedule.ONE_F_ONE_B)
    sheets = [made(busy=0.2, waits=0.4), made(busy=0.2, waits=0.4), made(busy=0.6, waits=0), made(busy=0.6, waits=0)]
    assert {*by_node(sheets, "abcd", layout).values()} == {(0.0, 0.0, 0.0)}
    slow = [*sheets[:3], made(busy=0.9, waits=0.0)]
    waits = by_node(slow, "abcd", layout)
    assert [round(waits[node][2], 6) for node in "abcd"] == [0.3, 0.3, 0.0, 0.0]


def test_the_rows_of_eight_steps_are_told_once_all_ranks_have_spoken() -> None:
    """Nodes with several slots as the mean of these; rows of another generation are never mixed in."""
    assert TOGETHER == sheet.EVERY
    sheets = [made(data=0.2, waits=0.0), *[made(waits=0.2)] * 10, made(waits=0.0)]
    heard, generation = WaitsHeard(), formed(6, slots=2)
    assert vote(heard, range(1, 9), sheets, generation) == []
    (said,) = vote(heard, range(9, 17), sheets, generation)
    assert (said.first, said.last, said.others) == (1, 8, (pytest.approx(0.2), 0.0, 0.0))
    assert said.apart == {"n5": (pytest.approx(0.1), 0.0, 0.0)}
    assert vote(heard, range(17, 21), sheets, generation) == []
    after = formed(6, slots=2, number=2)
    assert vote(heard, range(21, 25), sheets, after) == []
    assert [one.first for one in vote(heard, range(25, 33), sheets, after)] == [17]


def test_a_rank_without_a_row_leaves_all_unsaid() -> None:
    """Its first steps compile, or it was ended."""
    heard, generation = WaitsHeard(), formed(3)
    sheets = [made(), StepSheet(work=0.0, rounds=0.0), made()]
    assert vote(heard, range(9, 17), sheets, generation) == []


def test_of_many_nodes_those_that_differ_most_are_named_and_the_sum_is_that_of_all() -> None:
    """However many there are, what is told stays small."""
    sheets = [made(data=0.004 * rank, waits=0.0) for rank in range(100)]
    (said,) = vote(WaitsHeard(), range(9, 17), sheets, formed(100))
    assert len(said.apart) == APART
    told = sum(mine[0] for mine in said.apart.values()) + (100 - APART) * said.others[0]
    assert told == pytest.approx(sum(one.data for one in sheets))
    assert {"n0", "n99"} <= {*said.apart}


SECONDS = st.floats(0.0, 10.0)


@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS.map(lambda s: s + 0.01), SECONDS, st.integers(1, 8)), min_size=1),
    st.integers(1, 3),
)
def test_nobody_waits_longer_than_a_step_takes(numbers: list[tuple[float, ...]], slots: int) -> None:
    """Whatever the rows are; and no wait is negative."""
    sheets = [made(data=d, copy=c, busy=b, waits=w, rounds=r) for d, c, b, w, r in numbers for _ in range(slots)]
    nodes = [f"n{rank // slots}" for rank in range(len(sheets))]
    waits = by_node(sheets, nodes, Layout(pp=1, dp=len(sheets)))
    assert set(waits) == set(nodes)
    for rank, node in enumerate(nodes):
        one, mine = sheets[rank], waits[node]
        assert min(mine) >= 0
        assert sum(mine) <= one.data + one.copy + one.wait_dp + 1e-9
        assert mine[0] >= one.data - 1e-9
        assert mine[1] >= one.copy - 1e-9
