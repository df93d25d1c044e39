"""Rankings: only legal layouts that fit, deterministic, and better machines do better."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic3d.errors import LayoutError
from elastic3d.planner import Costs, Ranking, legal_layouts, plan, plan_below, rank
from elastic3d.planner.enumeration import Cluster, options
from elastic3d.planner.schedules import problem
from elastic3d.shortfall import MemoryBound
from elastic3d.values import Layout, ModelProfile, Schedule
from tests.planner.machines import MIB, costs, profile

FREE = Layout(tp=0, zero=0, replicas=0)
CLUSTERS = st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 4, 8]))
MODELS = st.builds(
    profile, blocks=st.integers(1, 12), micro_batches=st.integers(1, 24), heads=st.sampled_from([0, 2, 8, 12])
)
MEMORIES = st.sampled_from([64 * MIB, 128 * MIB, 512 * MIB, 2**40])


def best(made: Ranking) -> float:
    return made.ranking[0].seconds if made.ranking else float("inf")


@settings(deadline=None, max_examples=60)
@given(CLUSTERS, MODELS, MEMORIES)
def test_only_legal_layouts_that_fit_are_ranked(cluster: tuple[int, int], model, memory: int) -> None:  # type: ignore[no-untyped-def]
    """Of whole nodes, with tp inside a node; the others say why not."""
    nodes, slots = cluster
    made = rank(nodes, slots, model, FREE, costs(memory=memory))
    for one in made.ranking:
        layout = one.layout
        assert problem(layout, blocks=model.blocks, micro_batches=model.micro_batches) is None
        assert layout.world == one.nodes * slots
        assert one.nodes + one.spares == nodes
        assert slots % layout.tp == 0
        assert layout.tp == 1 or model.heads % layout.tp == 0
        assert layout.dp <= model.micro_batches
        splits = layout.schedule is not None and layout.schedule.splits_backward
        assert not (splits and layout.zero == 3 and layout.dp > 1)
        assert one.memory_bytes == sum(one.memory.values()) <= memory
        assert one.seconds == pytest.approx(sum(one.time.values()))
    assert [one.seconds for one in made.ranking] == sorted(one.seconds for one in made.ranking)
    assert all(one.reason for one in made.rejected)
    assert made == rank(nodes, slots, model, FREE, costs(memory=memory)), "the same inputs give the same ranking"


@settings(deadline=None, max_examples=40)
@given(CLUSTERS, MODELS, MEMORIES)
# With faster links the layout that cuts make the fastest is not among the first while its stages are even.
@example((3, 2), profile(blocks=8, micro_batches=5, heads=2), 512 * MIB)
# With one more node there are more layouts whose stages cannot be cut any better, and they came before those that can.
@example((6, 8), profile(blocks=12, micro_batches=21, heads=2), 512 * MIB)
def test_better_machines_do_no_worse(cluster: tuple[int, int], model, memory: int) -> None:  # type: ignore[no-untyped-def]
    """With more memory, faster devices, links or interpreters, or one more node the best layout is no slower."""
    nodes, slots = cluster
    plain = best(rank(nodes, slots, model, FREE, costs(memory=memory)))
    machines = costs(memory=memory)
    inside = replace(machines.inside, bandwidth=5e11)
    for better in (
        rank(nodes, slots, model, FREE, costs(memory=4 * memory)),
        rank(nodes, slots, model, FREE, costs(memory=memory, between=5e10)),
        rank(nodes, slots, model, FREE, costs(memory=memory, latency=1e-6)),
        rank(nodes, slots, model, FREE, replace(machines, overlap=0.9)),
        rank(nodes + 1, slots, model, FREE, machines),
    ):
        assert best(better) <= plain * (1 + 1e-9)
    # Cuts balance the time of the device and the interpreter alone, and gain a little less.
    for better in (
        rank(nodes, slots, model, FREE, replace(machines, inside=inside)),
        rank(nodes, slots, model, FREE, costs(memory=memory, flops=2e12)),
        rank(nodes, slots, model, FREE, replace(machines, forward=1e-6)),
    ):
        assert best(better) <= plain * 1.01


@settings(deadline=None, max_examples=30)
@given(CLUSTERS, MODELS, st.lists(st.sampled_from([0.5, 0.7, 1.0]), min_size=6, max_size=6))
# Five columns have seven micro-batches, and the two slow ones need not compute in the second turn.
@example((5, 2), profile(blocks=1, micro_batches=7, heads=2), [1.0, 0.7, 1.0, 0.7, 0.7, 1.0])
def test_a_slow_node_that_recovers_does_no_harm(cluster: tuple[int, int], model, every: list[float]) -> None:  # type: ignore[no-untyped-def]
    """With one slow node less, or one more node even if it is slow, the best layout is as fast or faster."""
    nodes, slots = cluster
    speeds = every[:nodes]
    slow = best(rank(nodes, slots, model, FREE, costs(), speeds=speeds))
    for place in (place for place, speed in enumerate(speeds) if speed < 1.0):
        well = [1.0 if other == place else speed for other, speed in enumerate(speeds)]
        assert best(rank(nodes, slots, model, FREE, costs(), speeds=well)) <= slow * (1 + 1e-9)
    assert best(rank(nodes + 1, slots, model, FREE, costs(), speeds=[*speeds, 0.5])) <= slow * (1 + 1e-9)


def test_too_little_memory_is_named() -> None:
    """The largest contributors are in the reason, and in the plan's error."""
    made = rank(2, 2, profile(), Layout(), costs(memory=32 * MIB))
    assert not made.ranking
    reasons = [one.reason for one in made.rejected if one.out_of_memory]
    assert reasons
    assert "of 32.0 MiB on the fullest device" in reasons[0]
    with pytest.raises(LayoutError, match="on the fullest device: "):
        plan(2, 2, profile(), Layout(), costs=costs(memory=32 * MIB))


@pytest.mark.parametrize("asked", [Layout(tp=3), Layout(tp=16), Layout(tp=2)])
def test_impossible_values_of_tp_are_not_ranked(asked: Layout) -> None:
    """tp divides the slots of a node and the model's heads, and needs a plan."""
    model = profile(heads=0 if asked.tp == 2 else 12)
    made = rank(4, 8, model, asked, costs())
    assert not made.ranking
    assert all(f"tp={asked.tp}" in one.reason or "ranks, not a whole number" in one.reason for one in made.rejected)


def test_the_present_layout_is_kept_unless_a_change_pays() -> None:
    """A change must save more seconds than it costs before the next change is expected."""
    model, machines = profile(), costs()
    made = rank(4, 1, model, Layout(), machines)
    chosen, other = made.ranking[0], made.ranking[3]
    assert plan(4, 1, model, Layout(), costs=machines).layout == chosen.layout
    saved = 1 - chosen.seconds / other.seconds
    soon, late = 0.9 * machines.change / saved, 1.1 * machines.change / saved
    kept = plan(4, 1, model, Layout(), costs=machines, previous=other.layout, expected_change_s=soon)
    assert kept.layout == other.layout
    assert plan(4, 1, model, Layout(), costs=machines, previous=other.layout, expected_change_s=late).layout == (
        chosen.layout
    )


@given(CLUSTERS, MODELS, st.sampled_from([1, 2, 4]), st.booleans())
@settings(deadline=None, max_examples=60)
def test_tp_never_changes_within_a_run(cluster: tuple[int, int], model, tp: int, known: bool) -> None:  # type: ignore[no-untyped-def]
    """Whatever else a run's next layout is."""
    nodes, slots = cluster
    before = Layout(pp=1, dp=1, tp=tp)
    try:
        made = plan(nodes, slots, model, FREE, previous=before, costs=costs() if known else None)
    except LayoutError:
        return
    assert made.layout.tp == tp
    with pytest.raises(LayoutError, match=f"tp={tp}"):
        plan(nodes, slots, model, Layout(tp=3), previous=before)


def test_a_layout_that_no_longer_fits_is_replaced() -> None:
    """Three nodes cannot keep a layout of four."""
    made = plan(3, 1, profile(), Layout(), costs=costs(), previous=Layout(pp=1, dp=4), expected_change_s=0.0)
    assert made.nodes == 3


@settings(deadline=None, max_examples=60)
@given(CLUSTERS, MODELS, st.sets(st.integers(1, 6), min_size=1), st.booleans())
def test_only_allowed_numbers_of_nodes_are_used(
    cluster: tuple[int, int], model: ModelProfile, counts: set[int], known: bool
) -> None:
    """The best layout of one of them, below a bound of memory, too; none where none of them has one."""
    (nodes, slots), machines = cluster, costs() if known else None
    there = [used for used in counts if used <= nodes and any(_of(used, slots, model, machines))]
    bound = MemoryBound(most=256 * MIB)
    for planned in (partial(plan, nodes), partial(plan_below, bound, nodes)):
        make = partial(planned, slots, model, Layout(), costs=machines, counts=counts)
        if not there:
            with pytest.raises(LayoutError):
                make()
            continue
        assert make().nodes in there
        # The present layout is kept only where it is of an allowed number as well.
        for before in _of(nodes, slots, model, machines):
            assert make(previous=before).nodes in there
    if there and known:
        seconds = {one.layout: one.seconds for one in rank(nodes, slots, model, Layout(), costs()).ranking}
        fastest = plan(nodes, slots, model, Layout(), costs=costs(), counts=counts).layout
        rest = [taken for layout, taken in seconds.items() if layout.world // slots in counts]
        assert fastest not in seconds or seconds[fastest] <= min(rest)


def _of(nodes: int, slots: int, model: ModelProfile, machines: Costs | None) -> list[Layout]:
    """Return the layouts of exactly so many nodes."""
    if machines is None:
        return legal_layouts(nodes * slots, model, Layout())
    ranking = rank(nodes, slots, model, Layout(), machines).ranking
    return [one.layout for one in ranking if one.nodes == nodes]


@pytest.mark.parametrize("nodes", [17, 40, 101])
def test_many_nodes_have_a_layout_of_each_allowed_number(nodes: int) -> None:
    """Also of those that are not looked at where any number will do."""
    for count in (nodes, nodes - 1, nodes - 3):
        made = plan(nodes, 1, profile(blocks=4, micro_batches=512), Layout(), costs=costs(), counts=(count,))
        assert made.nodes == count


def test_slow_nodes_get_fewer_blocks() -> None:
    """With a node of half the speed in a pipeline, its stage is the smaller one."""
    model = profile(blocks=12)
    asked = Layout(pp=2, schedule=Schedule.ONE_F_ONE_B)
    (cut,) = rank(2, 1, model, asked, costs(), speeds=(1.0, 0.5)).ranking[0].layout.cuts
    assert cut > model.blocks // 2
    (other,) = rank(2, 1, model, asked, costs(), speeds=(0.5, 1.0)).ranking[0].layout.cuts
    assert other < model.blocks // 2


def test_large_clusters_are_searched_in_few_steps() -> None:
    """16,384 devices leave some ten thousand layouts to judge, not millions."""
    model = profile(blocks=126, micro_batches=16384)
    counted = sum(1 for _ in options(Cluster(nodes=2048, slots=8), model, FREE))
    assert 1_000 < counted < 100_000
    assert sum(1 for _ in options(Cluster(nodes=128, slots=8), model, FREE)) < 50_000


def test_requests_are_respected() -> None:
    """All layouts have what a request fixes."""
    asked = Layout(pp=2, tp=2, zero=2, schedule=Schedule.ZBV)
    made = rank(4, 2, profile(), asked, costs())
    assert made.ranking
    for one in made.ranking:
        layout = one.layout
        assert (layout.pp, layout.tp, layout.zero, layout.schedule, layout.virtual) == (2, 2, 2, Schedule.ZBV, 2)
