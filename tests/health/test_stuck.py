"""Whoever holds a job up is named, whatever the layout; and nobody is while anybody moves or has not spoken."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.health.phases import Axis
from elastic3d.health.stuck import Fault, judge
from elastic3d.membership.stalls import AxisCount, RankStall, RankState, Stall, Verdict, Wait
from elastic3d.values import Generation, Layout
from tests.health.standstill import STEPS, Op, generation, program, stalls, standstill, with_rank

LAYOUTS = st.builds(
    lambda pp, shards, replicas, tp: Layout(pp=pp, dp=shards * replicas, tp=tp, replicas=replicas),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 2),
).filter(lambda layout: layout.world > 1)
FOUR = Layout(pp=2, dp=2)
ALONE = Layout(pp=1, dp=4)


def programs(layout: Layout) -> dict[int, list[list[Op]]]:
    return {rank: [program(layout, rank) for _ in range(STEPS)] for rank in range(layout.world)}


def verdict(layout: Layout, ranks: dict[int, RankStall], since: float = 0.0, slots: int = 1) -> Verdict | None:
    """Return what is found; since: seconds for which all have been silent for longer."""
    whole = generation(layout, slots)
    older = {number: replace(rank, silent=rank.silent + int(since * 1000)) for number, rank in ranks.items()}
    return judge(whole, stalls(whole, older), since)


def sink(layout: Layout, rank: int, at: int = 5) -> dict[int, RankStall]:
    """Return the records of a world in which `rank` does not begin the operation `at` of its last step."""
    steps = programs(layout)
    where = sum(map(len, steps[rank][:-1])) + at % len(steps[rank][-1])
    return standstill(layout, steps, {rank: where})


@given(LAYOUTS, st.data())
def test_a_rank_that_goes_no_further_is_named_whatever_the_layout(layout: Layout, data: st.DataObject) -> None:
    """Everybody waits for it, directly or not; its state says what it is."""
    rank, at = data.draw(st.integers(0, layout.world - 1)), data.draw(st.integers(0, 40))
    state, fault = data.draw(
        st.sampled_from(
            [
                (RankState.STOPPED, Fault.STOPPED),
                (RankState.HELD, Fault.HELD),
                (RankState.BLOCKED, Fault.BLOCKED),
                (RankState.IDLE, Fault.IDLE),
            ]
        )
    )
    held = verdict(layout, with_rank(sink(layout, rank, at), rank, state=state))
    assert held is not None
    assert (held.fault, held.ranks, held.culprits) == (fault, (rank,), (f"n{rank}@1",))
    assert held.act
    assert not held.program


@given(LAYOUTS, st.data())
def test_nobody_is_named_while_a_rank_moves_or_a_node_is_silent(layout: Layout, data: st.DataObject) -> None:
    """One sign of progress within a second, or one node without a word on this generation, and there is no verdict."""
    rank, other = (data.draw(st.integers(0, layout.world - 1)) for _ in range(2))
    ranks = with_rank(sink(layout, rank), rank, state=RankState.STOPPED)
    assert verdict(layout, with_rank(ranks, other, silent=900)) is None
    whole = generation(layout)
    said = stalls(whole, ranks)
    assert judge(whole, {id: stall for id, stall in said.items() if id != f"n{other}@1"}, 0.0) is None
    said[f"n{other}@1"] = replace(said[f"n{other}@1"], key="3.0")
    assert judge(whole, said, 0.0) is None


@given(LAYOUTS, st.data())
def test_a_rank_that_leaves_the_program_is_named_by_its_own_last_step(layout: Layout, data: st.DataObject) -> None:
    """Skipped, done in another order, or of other sizes: its own past convicts it.

    What comes in the place of a skipped collective may not fit together, which is then what is said of it.
    """
    rank = data.draw(st.integers(0, layout.world - 1))
    steps = programs(layout)
    last = steps[rank][-1]
    met = [at for at, (axis, _) in enumerate(last) if axis in (Axis.SHARD, Axis.REPLICA, Axis.TP)]
    if not met:
        return
    at = data.draw(st.sampled_from(met))
    kind = data.draw(st.sampled_from(["skip", "order", "shape"]))
    if kind == "skip":
        del last[at]
    elif kind == "order":
        last[at : at + 1] = [(Axis.WORLD, 21)]
    else:
        last[at] = (last[at][0], last[at][1] + 1000)
    ranks = standstill(layout, steps)
    assert any(each.wait for each in ranks.values()), "the fault has to stop the job"
    held = verdict(layout, ranks)
    assert held is not None
    assert held.ranks == (rank,)
    assert held.culprits == (f"n{rank}@1",)
    assert held.program
    assert held.fault in ([Fault.MISMATCH] if kind == "shape" else [Fault.LEFT, Fault.MISMATCH])


@given(LAYOUTS, st.data())
def test_the_order_in_which_nodes_speak_changes_nothing(layout: Layout, data: st.DataObject) -> None:
    """A verdict is a function of what was said, and not of who said it first."""
    rank = data.draw(st.integers(0, layout.world - 1))
    whole = generation(layout)
    said = stalls(whole, sink(layout, rank))
    items = list(said.items())
    random.Random(data.draw(st.integers(0, 99))).shuffle(items)
    assert judge(whole, dict(items), 1.0) == judge(whole, said, 1.0)


@given(LAYOUTS.filter(lambda layout: layout.world % 2 == 0), st.data())
def test_the_node_of_a_rank_is_named_where_nodes_have_two(layout: Layout, data: st.DataObject) -> None:
    """Ranks count across nodes in order."""
    rank = data.draw(st.integers(0, layout.world - 1))
    held = verdict(layout, with_rank(sink(layout, rank), rank, state=RankState.STOPPED), slots=2)
    assert held is not None
    assert held.culprits == (f"n{rank // 2}@1",)


def test_a_stopped_rank_is_named_within_a_collective_too() -> None:
    """All have posted it; the one that the kernel calls stopped is why it does not end."""
    ranks = sink(ALONE, 2)
    stopped = {rank: replace(each, wait=ranks[0].wait, axes=ranks[0].axes) for rank, each in ranks.items()}
    held = verdict(ALONE, with_rank(stopped, 2, state=RankState.STOPPED))
    assert held is not None
    assert (held.fault, held.ranks) == (Fault.STOPPED, (2,))


@pytest.mark.parametrize(
    ("changes", "since", "fault"),
    [
        ({"phase": "data", "allowed_idle": 30_000}, 0.0, None),
        ({"phase": "data", "allowed_idle": 30_000}, 26.0, Fault.LOADER),
        ({"phase": "data", "allowed_idle": 4_000, "loader_moves": True}, 0.0, None),
        ({"phase": "user", "allowed_idle": 60_000}, 20.0, None),
        ({"phase": "user"}, 0.0, Fault.USER),
        ({"phase": "copy"}, 0.0, Fault.COPY),
        ({"phase": "leave"}, 0.0, Fault.LEFT),
        ({"state": RankState.BUSY, "cpu": 1900}, 0.0, None),
        ({"state": RankState.BUSY, "cpu": 1900}, 26.0, Fault.SPINNING),
        ({"state": RankState.HELD, "cpu": 1900}, 0.0, None),
        ({"state": RankState.HELD, "cpu": 0}, 0.0, Fault.HELD),
        ({"state": RankState.DEAD}, 0.0, None),
        ({"silent": 2_000}, 0.0, None),
        ({"silent": 2_000}, 1.0, Fault.IDLE),
    ],
)
def test_deadlines_and_classes_of_a_rank_that_waits_for_nobody(
    changes: dict[str, object], since: float, fault: Fault | None
) -> None:
    """Each phase and state has its own time; before it is over there is no verdict."""
    held = verdict(ALONE, with_rank(sink(ALONE, 1), 1, **changes), since)
    assert (held.fault if held else None) == fault
    assert held is None or held.ranks == (1,)


def test_long_work_between_steps_is_told_long_before_anything_is_done() -> None:
    """One rank that evaluates without `run.pause` would otherwise cost its node at every turn."""
    ranks = with_rank(sink(ALONE, 1), 1, phase="user", state=RankState.BUSY, cpu=1900, allowed_busy=60_000)
    assert verdict(ALONE, ranks) is None
    for since, act in ((60.0, False), (600.0, True)):
        held = verdict(ALONE, ranks, since)
        assert held is not None
        assert (held.fault, held.ranks, held.act) == (Fault.USER, (1,), act)


def test_what_all_ranks_compute_is_told_long_before_anything_is_done() -> None:
    """As when all of them compile in the midst of a run: none waits for another, and to begin anew would not help."""
    layout = Layout(pp=1, dp=2)
    ranks = {n: replace(r, wait=None, state=RankState.BUSY, cpu=1900) for n, r in sink(layout, 1).items()}
    for since, act in ((30.0, False), (300.0, True)):
        held = verdict(layout, ranks, since)
        assert held is not None
        assert (held.fault, held.culprits, held.act) == (Fault.SPINNING, (), act)


def test_what_one_rank_does_last_is_only_told() -> None:
    """All steps are made, and the others wait for it in a collective of the script's own, or are at their end."""
    ranks = with_rank(sink(ALONE, 1), 1, phase="leave")
    held = verdict(ALONE, {number: replace(rank, phase="leave") for number, rank in ranks.items()})
    assert held is not None
    assert (held.fault, held.ranks, held.act) == (Fault.USER, (1,), False)


def test_where_all_stand_at_the_same_nobody_is_named_and_nothing_done() -> None:
    """A store that is away holds up every rank at once: that is told, and a new generation would not help."""
    ranks = sink(ALONE, 0)
    for rank in range(4):
        ranks = with_rank(ranks, rank, wait=None, phase="data")
    held = verdict(ALONE, ranks)
    assert held is not None
    assert (held.fault, held.act, held.culprits) == (Fault.STALLED, False, ())
    two = {rank: replace(ranks[rank], rank=rank) for rank in range(2)}
    held = verdict(Layout(pp=1, dp=2), two)
    assert held is not None
    assert not held.act
    alone = verdict(Layout(pp=1, dp=1), {0: ranks[0]})
    assert alone is not None
    assert (alone.act, alone.culprits) == (True, ("n0@1",))
    assert not verdict(Layout(pp=1, dp=1), {0: replace(ranks[0], phase="user")}).act  # type: ignore[union-attr]


def test_an_idle_rank_is_not_named_before_one_that_computes_is_over_its_time() -> None:
    """The idle one may wait for it within a layer, which nobody records."""
    ranks = with_rank(sink(ALONE, 1), 2, wait=None, state=RankState.BUSY, cpu=1900)
    assert verdict(ALONE, ranks) is None
    held = verdict(ALONE, ranks, 26.0)
    assert held is not None
    assert (held.fault, held.ranks) == (Fault.SPINNING, (2,))


@pytest.mark.parametrize("stopped", [(1, 2), (0, 3), (0, 1, 2, 3)])
def test_all_that_are_stopped_at_once_are_named(stopped: tuple[int, ...]) -> None:
    """The others wait for one of them; where it is all of them, no node is at fault, and trainers start again."""
    ranks = sink(ALONE, stopped[0])
    for rank in stopped:
        ranks = with_rank(ranks, rank, wait=None, state=RankState.STOPPED)
    held = verdict(ALONE, ranks)
    assert held is not None
    assert (held.fault, held.ranks, held.act) == (Fault.STOPPED, stopped, True)
    assert held.culprits == (tuple(f"n{rank}@1" for rank in stopped) if len(stopped) < 4 else ())


def test_a_stopped_rank_is_named_while_another_computes_within_its_time() -> None:
    """What the kernel says of it is certain."""
    ranks = with_rank(sink(ALONE, 1), 2, wait=None, state=RankState.BUSY, cpu=1900)
    held = verdict(ALONE, with_rank(ranks, 1, state=RankState.STOPPED))
    assert held is not None
    assert held.ranks == (1,)


def test_a_connection_that_passes_nothing_is_named_by_its_ends() -> None:
    """Sent and not received: the pair; two such pairs share the node at fault."""
    layout = Layout(pp=4, dp=1)
    ranks = standstill(layout, programs(layout), {1: 0})
    waits = Wait(axis="FROM_PREVIOUS", number=1)
    sent = with_rank(ranks, 1, wait=waits)
    held = verdict(layout, sent)
    assert held is not None
    assert (held.fault, held.ranks, held.culprits) == (Fault.LINK, (0, 1), ())
    assert held.act
    assert "rank 0 of n0" in held.detail


def test_operations_of_one_name_are_named_once() -> None:
    """A switch that fails breaks the same operation of hundreds of groups: a person reads its name, not all of them."""
    layout = Layout(pp=4, dp=1)
    ranks = standstill(layout, programs(layout), {1: 0})
    waits = Wait(axis="FROM_PREVIOUS", number=1)
    sent = (*ranks[2].axes, AxisCount(axis="TO_NEXT", posted=1, done=1))
    held = verdict(layout, with_rank(with_rank(ranks, 1, wait=waits), 2, axes=sent))
    assert held is not None
    assert (held.fault, held.ranks) == (Fault.LINK, (0, 1, 2, 3))
    assert held.detail.count("from_previous 1") == 1


def test_the_only_one_to_whom_not_all_arrives_is_an_end_of_the_broken_connection() -> None:
    """All have posted the operation and all others have seen it done: whoever sends to it, it is one end."""
    steps = programs(ALONE)
    whole = standstill(ALONE, steps, {rank: len(program(ALONE, rank)) * STEPS - 1 for rank in range(4)})
    at = Wait(axis="SHARD", number=next(count.posted for count in whole[2].axes if count.axis == "SHARD"))
    short = tuple(replace(count, done=count.done - (count.axis == "SHARD")) for count in whole[2].axes)
    later = Wait(axis="WORLD", number=3)
    ranks = {n: replace(rank, wait=later) for n, rank in whole.items()}
    ranks = with_rank(ranks, 2, wait=at, axes=tuple(count for count in short if count.axis != "WORLD"))
    held = verdict(ALONE, ranks)
    assert held is not None
    assert (held.fault, held.ranks, held.culprits) == (Fault.LINK, (2,), ("n2@1",))
    assert "not all arrives at rank 2 of n2" in held.detail


def test_where_three_do_the_same_work_the_fourth_left_the_program() -> None:
    """Without a last step to compare with, most of a place's ranks say what the program is."""
    steps = programs(ALONE)
    del steps[3][-1][0]
    steps[3][-1][0:0] = [(Axis.WORLD, 21)]
    ranks = {rank: replace(each, odd="") for rank, each in standstill(ALONE, steps).items()}
    held = verdict(ALONE, ranks)
    assert held is not None
    assert (held.fault, held.ranks) == (Fault.LEFT, (3,))


def test_ranks_that_wait_for_each_other_are_told_as_a_deadlock() -> None:
    """Nobody is odd and nobody in the minority: the edges are what can be said."""
    layout = Layout(pp=1, dp=2)
    steps = programs(layout)
    for step in steps[1]:
        step.reverse()
    ranks = {rank: replace(each, odd="") for rank, each in standstill(layout, steps).items()}
    held = verdict(layout, ranks)
    assert held is not None
    assert (held.fault, held.culprits, held.program) == (Fault.DEADLOCK, (), True)
    assert held.waits == (
        "rank 0 of n0 waits in shard 1 for rank 1 of n1",
        "rank 1 of n1 waits in world 1 for rank 0 of n0",
    )


@pytest.mark.parametrize(
    ("places", "fault", "program"),
    [
        (("train.py:30 in main", "train.py:34 in main"), Fault.DEADLOCK, True),
        (("train.py:30 in main", "train.py:30 in main"), Fault.LINK, False),
        (("", ""), Fault.LINK, False),
    ],
)
def test_collectives_of_the_scripts_own_wait_for_each_other_where_they_were_called_apart(
    places: tuple[str, str], fault: Fault, program: bool
) -> None:
    """Two of four ranks are in one group, two in another; their stacks alone say so."""
    ranks = {
        number: replace(
            each,
            odd="",
            axes=(AxisCount(axis="user", posted=1, done=0),),
            wait=Wait(axis="user", number=1),
            top_frame=places[number % 2],
        )
        for number, each in standstill(ALONE, programs(ALONE)).items()
    }
    held = verdict(ALONE, ranks, since=120.0)
    assert held is not None
    assert (held.fault, held.culprits, held.ranks, held.program) == (fault, (), (0, 1, 2, 3), program)
    assert ("different collectives" in held.detail) == program
    assert ("groups of the script's own wait for each other" in held.detail) != program


def test_sizes_that_differ_without_a_last_step_name_the_minority() -> None:
    """In the first step there is no past; three against one is enough, one against one names nobody."""
    for layout, ranks_named, culprits in ((ALONE, (2,), ("n2@1",)), (Layout(pp=1, dp=2), (0, 1), ())):
        steps = {rank: [program(layout, rank)] for rank in range(layout.world)}
        wrong = 2 % layout.world
        steps[wrong][0][0] = (Axis.SHARD, 999)
        held = verdict(layout, standstill(layout, steps))
        assert held is not None
        assert (held.fault, held.ranks, held.culprits) == (Fault.MISMATCH, ranks_named, culprits)


def test_a_rank_that_died_of_sizes_that_do_not_fit_is_named_by_its_last_record() -> None:
    """gloo ends everybody over them; what they recorded outlives them.

    A step of another kind than the last one is compared with nothing: then it is the odd one of four, and of two nobody
    is named. Where all is alike nothing is said.
    """
    for layout, calm_ranks, calm_culprits in ((FOUR, (0, 1), ()), (ALONE, (1,), ("n1@1",))):
        steps = programs(layout)
        steps[1][-1] = [(axis, print + 1000 if axis is Axis.SHARD else print) for axis, print in steps[1][-1]]
        dead = {rank: replace(each, state=RankState.DEAD) for rank, each in standstill(layout, steps).items()}
        held = verdict(layout, dead)
        assert held is not None
        assert (held.fault, held.ranks, held.program) == (Fault.MISMATCH, (1,), True)
        held = verdict(layout, {rank: replace(each, odd="") for rank, each in dead.items()})
        assert held is not None
        assert (held.fault, held.ranks, held.culprits) == (Fault.MISMATCH, calm_ranks, calm_culprits)
    alike = standstill(FOUR, programs(FOUR), {0: 3})
    assert verdict(FOUR, {rank: replace(each, state=RankState.DEAD) for rank, each in alike.items()}) is None


@pytest.mark.parametrize("layout", [Layout(pp=1, dp=4), Layout(pp=2, dp=2), Layout(pp=4, dp=1)], ids=str)
def test_two_that_stand_still_at_once_are_both_named_and_nobody_else(layout: Layout) -> None:
    """On two nodes; if one of them is stopped, that is certain, and the other one comes next."""
    whole = generation(layout)
    steps = {rank: [program(layout, rank) for _ in range(STEPS)] for rank in range(layout.world)}
    begin = {rank: sum(map(len, steps[rank][:-1])) for rank in steps}
    for one, other in itertools.combinations(range(layout.world), 2):
        ranks = standstill(layout, steps, {one: begin[one], other: begin[other]})
        held = judge(whole, stalls(whole, ranks), 0.0)
        assert held is not None
        assert held.act
        assert held.ranks == (one, other)
        stopped = judge(whole, stalls(whole, with_rank(ranks, other, state=RankState.STOPPED)), 0.0)
        assert stopped is not None
        assert (stopped.fault, stopped.ranks) == (Fault.STOPPED, (other,))


@st.composite
def forged(draw: st.DrawFn) -> tuple[Generation, dict[str, Stall], set[str]]:
    """Return a standstill in which one rank says of itself what is not so, and the nodes of it and of the culprit."""
    layout, slots = draw(st.sampled_from([(Layout(pp=1, dp=2), 1), (Layout(pp=1, dp=4), 2), (Layout(pp=2, dp=2), 1)]))
    steps = {rank: [program(layout, rank) for _ in range(STEPS)] for rank in range(layout.world)}
    culprit, forger = draw(st.integers(0, layout.world - 1)), draw(st.integers(0, layout.world - 1))
    where = sum(map(len, steps[culprit][:-1])) + draw(st.integers(0, len(steps[culprit][-1]) - 1))
    ranks = {n: replace(one, silent=60_000) for n, one in standstill(layout, steps, {culprit: where}).items()}
    numbers = st.integers(0, 40)
    counts = st.builds(AxisCount, axis=st.sampled_from([axis.name for axis in Axis]), posted=numbers, done=numbers)
    waits = st.none() | st.builds(Wait, axis=st.sampled_from([axis.name for axis in Axis]), number=numbers)
    said = {
        "axes": draw(st.just(ranks[forger].axes) | st.lists(counts, max_size=6).map(tuple)),
        "wait": draw(st.just(ranks[forger].wait) | waits),
        "odd": draw(st.sampled_from(["", "operation 3 of this step is another one"])),
    }
    whole = generation(layout, slots)
    ids = [node.id for node in whole.nodes]
    given = stalls(whole, with_rank(ranks, forger, **said))
    return whole, given, {ids[culprit // slots], ids[forger // slots]}


@given(forged())
def test_who_forges_its_record_has_nobody_else_blamed(case: tuple[Generation, dict[str, Stall], set[str]]) -> None:
    """Whatever it says of its counts, its wait and its step: no node but its own and that of the culprit."""
    whole, said, may_be = case
    verdict = judge(whole, said, 0.0)
    assert verdict is None or set(verdict.culprits) <= may_be, verdict


def test_a_verdict_names_the_sources_that_loaders_wait_for() -> None:
    """In its sentence, which the event and `elastic3d explain` show; most ranks' first, where all wait."""
    at_data = {"phase": "data", "silent": 31_000, "allowed_idle": 30_000, "wait": None}
    held = verdict(ALONE, with_rank(sink(ALONE, 1), 1, source="s3://bucket/a.bin", **at_data))
    assert held is not None
    assert held.fault == Fault.LOADER
    assert "its data loader, whose processes do nothing (it waits for s3://bucket/a.bin), at data" in held.detail
    ranks = sink(ALONE, 1)
    for rank, name in enumerate(("s3://bucket/a.bin", "s3://bucket/b.bin", "s3://bucket/b.bin", "")):
        ranks = with_rank(ranks, rank, source=name, **at_data)
    held = verdict(ALONE, ranks)
    assert held is not None
    assert held.fault == Fault.STALLED
    assert held.detail.endswith("is read from (they wait for s3://bucket/b.bin, s3://bucket/a.bin)")
