"""The ladder climbed where memory runs out: each rung needs less, keeps the bits, and is the cheapest that does."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.health.memory import MemoryLadder, rung_of
from elastic3d.membership.records import Report, decode, encode
from elastic3d.membership.stalls import VerdictKind
from elastic3d.planner import Plan, plan, plan_below
from elastic3d.planner.bounded import kinds, needed
from elastic3d.planner.costs import Costs
from elastic3d.shortfall import MemoryBound, Shortfall, stronger
from elastic3d.values import Cause, Generation, Layout, ModelProfile, Node, Schedule, Slot
from tests.planner.machines import MIB, costs, profile

FREE = Layout(zero=0, tp=1, replicas=1)


def generation(layout: Layout, *, memory: MemoryBound | None = None) -> Generation:
    nodes = tuple(
        Node(name=f"n{at}", incarnation="1", address="h", slots=(Slot(tile_port=1),)) for at in range(layout.world)
    )
    return Generation(number=3, cause=Cause.START, nodes=nodes, layout=layout, memory=memory)


def short(rank: int = 0, missing: int = 0) -> dict[str, Shortfall]:
    one = Shortfall(rank=rank, host=False, device="cuda", asked=missing, total=missing and 2**30)
    return {f"n{rank}@1": one}


def climb(
    nodes: int,
    model: ModelProfile,
    request: Layout = FREE,
    *,
    machines: Costs | None = None,
    missing: int = 0,
) -> list[Plan]:
    """Return the first plan and those of a ladder on every rung of which memory runs out again."""
    made = plan(nodes, 1, model, request, costs=machines)
    plans = [replace(made, recompute=model.recompute, needed=needed(made.layout, model, model.recompute))]
    sealed = generation(made.layout)
    for _ in range(64):
        for bound in MemoryLadder().bounds(sealed, model, short(missing=missing)):
            below = plan_below(bound, nodes, 1, model, request, previous=sealed.layout, costs=machines)
            if below.fits:
                break
        else:
            return plans
        plans.append(below)
        sealed = generation(below.layout, memory=replace(bound, recompute=below.recompute))
    raise AssertionError("this ladder has no end")


@pytest.mark.parametrize("machines", [None, costs()])
def test_each_rung_needs_less_and_the_ladder_ends(machines: Costs | None) -> None:
    """By a tenth at least, where nobody knows how much was missing; what is computed again is among its rungs."""
    plans = climb(4, profile(), machines=machines)
    assert len(plans) > 2
    for before, after in itertools.pairwise(plans):
        assert after.needed <= 0.9 * before.needed
    assert "full" in {one.recompute for one in plans}


def test_without_costs_more_is_computed_again_before_the_mesh_changes() -> None:
    """It moves no state, and costs at most a third of the computing."""
    first, second = climb(2, profile())[:2]
    assert second.layout == first.layout
    assert (first.recompute, second.recompute) == ("none", "full")


def test_with_costs_the_fastest_of_what_fits_is_taken() -> None:
    """Whatever rung that is: no other plan below the bound is predicted to be faster."""
    model, machines = profile(), costs()
    first, second = climb(4, model, machines=machines)[:2]
    bound = MemoryBound(most=int(0.9 * first.needed))
    for kind in kinds(model):
        changed = replace(model, recompute=kind)
        tight = replace(machines, device=replace(machines.device, reserve=machines.device.memory - bound.most))
        other = plan(4, 1, changed, FREE, costs=tight)
        assert needed(other.layout, model, kind) <= bound.most
    assert second.needed <= bound.most


def test_what_was_missing_is_what_the_next_rung_needs_less() -> None:
    """A layout that is leaner, but not by as much, is passed over."""
    model = profile()
    first = climb(4, model)[0]
    missing = 3 * first.needed // 10
    below = climb(4, model, missing=missing)[1]
    assert below.needed <= first.needed - missing


def test_what_a_host_was_asked_for_is_not_what_was_missing() -> None:
    """What a process may have of it is not known: a small model that asks for much at once still has its ladder."""
    model, sealed = profile(), generation(Layout(pp=1, dp=4))
    said = {"n0@1": Shortfall(rank=0, host=True, asked=2**50)}
    assert MemoryLadder().bounds(sealed, model, said) == MemoryLadder().bounds(
        sealed, model, {"n0@1": Shortfall(rank=0, host=True)}
    )


def test_more_than_any_layout_could_save_leads_nowhere() -> None:
    """As where the script asks for too much by itself: the tries are as many as without a ladder."""
    model = profile()
    sealed = generation(plan(4, 1, model, FREE).layout)
    assert MemoryLadder().bounds(sealed, model, short(missing=2**50)) == ()


def test_a_rank_that_was_predicted_to_need_less_than_others_binds_all_of_them_first() -> None:
    """The prediction was too low for it by some bytes, and may be so for any; then less is asked."""
    model = profile()
    sealed = generation(Layout(pp=4, dp=1))
    strict, lenient = MemoryLadder().bounds(sealed, model, short(rank=2))
    assert strict.most < lenient.most < needed(Layout(pp=4, dp=1), model, "none")


def test_what_was_learned_is_never_forgotten() -> None:
    """A rung that is no better than the one before leads further down, whatever else was predicted for it."""
    model, layout = profile(), Layout(pp=2, dp=2)
    known = MemoryBound(most=needed(layout, model, "none") // 3, recompute="full")
    for bound in MemoryLadder().bounds(generation(layout, memory=known), model, short()):
        assert bound.most <= known.most


def test_a_script_that_leaves_nothing_open_is_told_so() -> None:
    """A layout and a recomputation that are fixed by hand cannot be climbed."""
    request = Layout(pp=2, dp=2, schedule=Schedule.ONE_F_ONE_B)
    model = profile(recompute="full")
    plans = climb(4, model, request)
    assert len(plans) == 1
    verdict = MemoryLadder().verdict(generation(plans[0].layout), model, short(), None, 7)
    assert (verdict.kind, verdict.fault, verdict.act, verdict.step) == (VerdictKind.MEMORY, "none", False, 7)
    assert "nothing that this script leaves open needs less" in verdict.detail
    assert "rank 0 on n0 ran out of its device's memory" in verdict.detail


def test_how_much_is_lacking_is_said_where_nothing_is_left() -> None:
    """What was asked for and not free; or, where the kernel ended a trainer, what is there and what it would take."""
    model, sealed = profile(), generation(Layout(pp=2, dp=2))
    asked = {"n0@1": Shortfall(rank=0, host=False, device="cuda", asked=3 << 30, free=1 << 30, total=80 << 30)}
    detail = MemoryLadder().verdict(sealed, model, asked, None, 7).detail
    assert "needs less, and at least 2.00 GiB more is needed on a rank: free layout=" in detail
    killed = {"n0@1": Shortfall(rank=0, host=True, device="cpu", total=1 << 20, killed=True)}
    detail = MemoryLadder().verdict(sealed, model, killed, None, 7).detail
    assert "needs less, and of 1.0 MiB in all the fullest rank's tensors alone are predicted to take " in detail
    unknown = {"n0@1": Shortfall(rank=0, host=True, device="cpu", killed=True)}
    assert "needs less: free layout=" in MemoryLadder().verdict(sealed, model, unknown, None, 7).detail


def test_a_fixed_layout_still_has_what_is_computed_again() -> None:
    """The rung adds to what the script asks for; it never takes away from it."""
    plans = climb(4, profile(), Layout(pp=2, dp=2))
    assert [one.recompute for one in plans] == ["none", "full"]
    assert stronger("full", "selective") == "full"
    assert kinds(profile(recompute="full")) == ("full",)


def test_the_hosts_memory_beside_devices_is_not_the_layouts() -> None:
    """Loaders and snapshots hold it: nothing is changed for it, and the report says where to look."""
    model, sealed = profile(), generation(Layout(pp=2, dp=2))
    said = {"n0@1": Shortfall(rank=0, host=True, device="cuda", killed=True)}
    assert MemoryLadder().bounds(sealed, model, said) == ()
    verdict = MemoryLadder().verdict(sealed, model, said, None, 7)
    assert "look at data loaders" in verdict.detail
    assert "the kernel killed it" in verdict.detail
    on_host = {"n0@1": replace(said["n0@1"], device="cpu")}
    assert MemoryLadder().bounds(sealed, model, on_host)


def test_a_model_of_which_nothing_was_measured_has_no_ladder() -> None:
    """Which layout needs less is not known; the report says what to do."""
    model = ModelProfile(blocks=8, parameters=1000, micro_batches=8, micro_batch=1, digest="d")
    sealed = generation(Layout(pp=1, dp=4))
    assert MemoryLadder().bounds(sealed, model, short()) == ()
    assert "does not run on meta" in MemoryLadder().verdict(sealed, model, short(), None, 0).detail


def test_where_nothing_is_lean_enough_the_leanest_is_taken() -> None:
    """Nodes may have been lost since the bound was learned: a job had better try than wait for ever."""
    model, bound = profile(), MemoryBound(most=MIB)
    for machines in (None, costs()):
        made = plan_below(bound, 2, 1, model, FREE, costs=machines)
        assert not made.fits
        assert made.recompute == "full"
        assert made.needed <= needed(plan(2, 1, model, FREE, costs=machines).layout, model, "full")


def test_a_layout_for_slow_nodes_stays_below_the_bound_too() -> None:
    """Stages are cut for speeds only where the larger ones still fit."""
    model, request = profile(), Layout(pp=2)
    even = plan(2, 1, model, request).layout
    bound = MemoryBound(most=needed(even, model, "full"))
    made = plan_below(bound, 2, 1, model, request, previous=even, speeds=(1.0, 0.4))
    assert made.fits
    assert made.needed <= bound.most


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(1, 6),
    blocks=st.integers(1, 8),
    asked=st.sampled_from(["none", "full"]),
    pp=st.sampled_from([0, 0, 1, 2]),
    share=st.floats(0.05, 1.0),
)
def test_a_plan_below_a_bound_is_legal_and_keeps_what_the_script_asks_for(
    nodes: int, blocks: int, asked: str, pp: int, share: float
) -> None:
    """Whatever the bound; and it fits, or nothing leaner is there."""
    model, request = profile(blocks=blocks, recompute=asked), Layout(pp=min(pp, blocks, nodes))
    first = plan(nodes, 1, model, request)
    bound = MemoryBound(most=int(share * needed(first.layout, model, asked)))
    made = plan_below(bound, nodes, 1, model, request)
    assert made.needed == needed(made.layout, model, made.recompute)
    assert made.fits == (made.needed <= bound.most)
    assert stronger(asked, made.recompute) == made.recompute
    assert made.layout.world == made.nodes <= nodes
    if not made.fits:
        assert made.needed <= needed(first.layout, model, asked)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ((Layout(pp=2, dp=2), "none"), (Layout(pp=2, dp=2), "full"), "recompute full"),
        ((Layout(pp=2, dp=2), "none"), (Layout(pp=4, dp=1), "none"), "more stages"),
        ((Layout(pp=1, dp=4, zero=1), "none"), (Layout(pp=1, dp=4, zero=3), "none"), "ZeRO-3"),
        (
            (Layout(pp=2, dp=2, schedule=Schedule.GPIPE), "none"),
            (Layout(pp=2, dp=2, schedule=Schedule.ONE_F_ONE_B), "full"),
            "leaner schedule, recompute full",
        ),
        ((Layout(pp=4, dp=1), "none"), (Layout(pp=2, dp=2), "full"), "recompute full, another mesh"),
    ],
)
def test_rungs_have_names(before: tuple[Layout, str], after: tuple[Layout, str], words: str) -> None:
    """A person reads which of them were taken."""
    assert rung_of(*before, *after) == words


def test_what_was_learned_is_in_the_record_and_only_then() -> None:
    """As bytes that are those of older versions where memory never ran out."""
    plain = generation(Layout(pp=1, dp=2))
    assert b"memory" not in encode(plain)
    taught = replace(plain, memory=MemoryBound(most=123, recompute="full"))
    assert decode(Generation, encode(taught), "the/key") == taught
    said = Report(incarnation="a1", out_of_memory=True, short=Shortfall(rank=1, host=True, asked=5))
    assert decode(Report, encode(said), "the/key") == said
