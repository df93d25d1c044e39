"""Predicted memory and time compared with played schedules and published sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic3d.planner.described import Training, describe
from elastic3d.planner.devices import Number, device_named
from elastic3d.planner.memory import BUCKET, in_flight, memory
from elastic3d.planner.schedules import problem
from elastic3d.planner.shapes import shape_named
from elastic3d.planner.step_time import fill, hops, seconds
from elastic3d.planner.timeline import StageCost, kept, play
from elastic3d.values import Layout, Schedule
from tests.planner.machines import costs, profile

SCHEDULED = [
    Layout(pp=pp, dp=1, zero=2, schedule=schedule, virtual=virtual)
    for pp in (2, 3, 4, 8)
    for schedule, virtual in (
        (Schedule.GPIPE, 1),
        (Schedule.ONE_F_ONE_B, 1),
        (Schedule.INTERLEAVED, 2),
        (Schedule.INTERLEAVED, 4),
        (Schedule.ZERO_BUBBLE, 2),
        (Schedule.ZBV, 2),
        (Schedule.DUALPIPE_V, 2),
    )
]
LEGAL = [
    (layout, turns * layout.pp)
    for layout in SCHEDULED
    for turns in (1, 2, 4)
    if problem(layout, blocks=64, micro_batches=turns * layout.pp) is None
]


@settings(deadline=None, max_examples=80)
@example((Layout(pp=8, dp=1, zero=2, schedule=Schedule.ZBV, virtual=2), 8), 1.6, 0.6, 0.0)
@given(st.sampled_from(LEGAL), st.floats(0.6, 1.6), st.floats(0.6, 1.6), st.floats(0.0, 0.05))
def test_closed_forms_match_the_played_schedule(
    case: tuple[Layout, int], input: float, weight: float, hop: float
) -> None:
    """The time of a step with equal stages is within 16 % of the schedule's own."""
    layout, rounds = case
    stage = StageCost(forward=1.0, input=input, weight=weight)
    clock = max(own[-1].end for own in play(layout, rounds, [stage] * layout.stages, hop))
    v = layout.virtual
    rank = StageCost(forward=v * 1.0, input=v * input, weight=v * weight)
    predicted = rounds * rank.whole + fill(layout, rank) + hop * hops(layout, rounds)
    assert predicted == pytest.approx(clock, rel=0.16)


@pytest.mark.parametrize(("layout", "rounds"), LEGAL, ids=str)
def test_predicted_kept_micro_batches_match_the_played_schedule(layout: Layout, rounds: int) -> None:
    """Never fewer than a rank keeps, and at most pp more."""
    made = play(layout, rounds, [StageCost(forward=1.0, input=1.0, weight=1.0)] * layout.stages)
    for rank, own in enumerate(made):
        assert kept(own) <= in_flight(layout, rank, rounds) <= kept(own) + layout.pp


def test_memory_of_model_states_matches_the_zero_paper() -> None:
    """With fp32 Adam: 16 bytes a parameter; with ZeRO-3 on 8 ranks an eighth; less from stage to stage."""
    model = profile()
    alone = memory(Layout(pp=1, dp=1), model)
    assert alone["parameters"] + alone["optimizer"] + alone["gradients"] == 16 * model.parameters
    sharded = memory(Layout(pp=1, dp=8), model)
    assert sharded["parameters"] + sharded["optimizer"] + sharded["gradients"] == 2 * model.parameters
    totals = [sum(memory(Layout(pp=1, dp=8, zero=zero), model).values()) for zero in (1, 2, 3)]
    assert totals == sorted(totals, reverse=True)
    copies = memory(Layout(pp=1, dp=8, replicas=2), model)
    assert copies["optimizer"] == 2 * sharded["optimizer"]


def test_buffers_of_the_reduction_are_bounded() -> None:
    """Four of the largest unit in the dtype that is sent, beside its gradient; of a larger one, four of the bound."""
    layout, small = Layout(pp=1, dp=4), profile()
    assert memory(layout, replace(small, compute_bytes=2))["reduction"] == memory(layout, small)["reduction"] / 2
    large = replace(small, block=replace(small.block, parameters=10**9), parameters=10**10)
    assert memory(layout, large)["reduction"] == 4 * 10**9 + 4 * BUCKET
    assert memory(layout, replace(large, compute_bytes=2))["reduction"] == 2 * 10**9 + 4 * BUCKET
    split = Layout(pp=2, dp=4, zero=2, schedule=Schedule.ZBV, virtual=2)
    assert memory(split, replace(large, compute_bytes=2))["reduction"] == 4 * 10**9 + 4 * BUCKET


def test_memory_shrinks_with_stages_tp_and_recomputation() -> None:
    """Each reduces activations and parameters by its share."""
    plain = memory(Layout(pp=1, dp=4), profile())
    assert memory(Layout(pp=1, dp=4, tp=2), profile())["activations"] == (2 + 6 / 2) / 8 * plain["activations"]
    assert memory(Layout(pp=1, dp=4), profile(recompute="full"))["activations"] == plain["activations"] / 8
    assert memory(Layout(pp=4, dp=1), profile())["parameters"] == 4 * 4 * 10**6
    flat = memory(Layout(pp=2, dp=1, schedule=Schedule.GPIPE), profile())["activations"]
    assert flat == 8 * memory(Layout(pp=2, dp=1), profile())["activations"]


def test_time_adds_up_where_cores_are_shared() -> None:
    """Four processes on one core take four times as long as four on four; with as many cores nothing is added."""
    layout, model = Layout(pp=1, dp=4), profile()
    apart = sum(seconds(layout, model, costs(), 1).values())
    shared = sum(seconds(layout, model, costs(cores=1), 1).values())
    assert shared == pytest.approx(4 * apart)
    assert sum(seconds(layout, model, costs(cores=4), 1).values()) == pytest.approx(apart)
    with_stages = Layout(pp=4, dp=1)
    assert sum(seconds(with_stages, model, costs(cores=1), 1).values()) <= 4 * apart * 1.5


def test_zero_3_gathers_in_every_round() -> None:
    """That costs more than ZeRO-2, which gathers once; recomputation costs one more forward pass."""
    slow = costs(between=1e7)
    three = seconds(Layout(pp=1, dp=4), profile(), slow, 1)
    two = seconds(Layout(pp=1, dp=4, zero=2), profile(), slow, 1)
    assert three["gathers"] > 2 * two["gathers"] > 0
    again = seconds(Layout(pp=1, dp=1), profile(recompute="full"), costs(), 1)["compute"]
    assert again > 1.25 * seconds(Layout(pp=1, dp=1), profile(), costs(), 1)["compute"]


def test_a_sum_that_goes_from_node_to_node_takes_less() -> None:
    """Of the same 7 nodes each device sends an eighth of a sum in fp32 on, 3.4 GB a round and once more at the end, in
    less than a third of the time that pieces take to their owners; the last node runs six parts behind the first."""
    model = describe(shape_named("llama-7b"), Training(global_batch=504))
    sheet = replace(device_named("h200").costs(Number.BF16), overlap=0.0)
    spread = seconds(Layout(pp=1, dp=56, zero=1), model, sheet, 8)["reduction"]
    passed = seconds(Layout(pp=1, dp=56, zero=1, replicas=7), model, sheet, 8)["reduction"]
    on = 4 * model.parameters / 8 / 50e9
    assert (10 + 6 / 33) * on < passed < 1.2 * (10 + 6 / 33) * on
    assert passed < spread / 2.5


def test_the_backends_sums_are_made_once_a_step_with_zero_1_only() -> None:
    """Which adds whole gradients up in each round, in memory; ZeRO-2 and 3 send in each round."""
    model = replace(describe(shape_named("llama-7b"), Training(global_batch=504)), reduction="fast")
    sheet = replace(device_named("h200").costs(Number.BF16), overlap=0.0)
    one, two, three = (seconds(Layout(pp=1, dp=56, zero=zero), model, sheet, 8)["reduction"] for zero in (1, 2, 3))
    added = 8 * (4 + 4 + 2) * model.parameters / 4.8e12
    assert one - added == pytest.approx(two / 9, rel=0.01)
    assert two == three > 9 * 4 * model.parameters * 55 / 56 / 450e9


def test_an_ordered_round_between_nodes_uses_each_ranks_own_link() -> None:
    """7 nodes of 8 H200 train 7 billion parameters: of 27 GB of fp32 gradients a device sends 23 GB to other nodes in
    each round, over 50 GB/s; nine rounds take 4.2 s, and more than a reduce-scatter, which crosses once for a node.
    Gradients that were computed in bf16 take half of that."""
    half = describe(shape_named("llama-7b"), Training(global_batch=504))
    model = replace(half, compute_bytes=4)
    sheet = replace(device_named("h200").costs(Number.BF16), overlap=0.0)
    wide = Layout(pp=1, dp=56, zero=1)
    ordered = seconds(wide, model, sheet, 8)["reduction"]
    assert ordered == pytest.approx(9 * 48 / 56 * 4 * model.parameters / 50e9, rel=0.05)
    assert ordered == pytest.approx(4.2, abs=0.2)
    assert ordered > 15 * seconds(wide, replace(model, reduction="fast"), sheet, 8)["reduction"]
    assert seconds(wide, half, sheet, 8)["reduction"] == pytest.approx(ordered / 2, rel=0.05)
    inside = seconds(Layout(pp=7, dp=8, zero=1), model, sheet, 8)["reduction"]
    assert inside < ordered / 2
    leaves = seconds(wide, replace(half, leaf=9), sheet, 8)["reduction"]
    assert leaves == pytest.approx(ordered / 9, rel=0.3), "nine micro-batches are one exchange of fp32"


def test_leaves_hold_a_whole_gradient() -> None:
    """For as long as a leaf is not complete, whatever the ZeRO stage; sums and pieces are fp32 then."""
    half = replace(profile(), compute_bytes=2)
    layout, one = Layout(pp=1, dp=4), Layout(pp=1, dp=1)
    alone, leaves = memory(layout, half), memory(layout, replace(half, leaf=2))
    assert leaves["gradients"] == alone["gradients"] + 4 * half.parameters
    assert leaves["reduction"] == 2 * alone["reduction"]
    assert memory(one, replace(half, leaf=2))["gradients"] == 2 * memory(one, half)["gradients"]
    assert memory(one, replace(half, leaf=half.micro_batches))["gradients"] == memory(one, half)["gradients"]


def test_audited_steps_are_counted() -> None:
    """GPipe keeps the extra round's activations too; over all steps the rounds cost what audits may, and no more."""
    layout = Layout(pp=2, dp=2, zero=2, schedule=Schedule.GPIPE)
    quiet = replace(profile(), micro_batches=8)
    watched = replace(quiet, audit=0.01)
    assert (
        memory(layout, watched)["activations"]
        == memory(layout, replace(quiet, micro_batches=10))["activations"]
        > memory(layout, quiet)["activations"]
    )
    before, after = (seconds(layout, one, costs(), 1) for one in (quiet, watched))
    extra = after.pop("audits")
    assert before == after
    rounds = sum(
        before[name] for name in ("compute", "overhead", "tensor parallel", "gathers", "reduction") if name in before
    )
    assert 0.005 * rounds < extra <= 0.0101 * rounds
    assert "audits" not in seconds(replace(layout, dp=1), watched, costs(), 1)
    assert "audits" not in seconds(layout, replace(watched, reduction="fast"), costs(), 1)
