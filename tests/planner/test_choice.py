"""Layouts for given numbers of nodes: legal, deterministic, and an error that says what would work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.errors import LayoutError
from elastic3d.planner import Plan, legal_layouts, plan
from elastic3d.values import Layout, ModelProfile

SIZES = st.integers(1, 48)
AXES = st.integers(0, 8)


def profile(blocks: int, micro_batches: int) -> ModelProfile:
    return ModelProfile(blocks=blocks, parameters=1, micro_batches=micro_batches, micro_batch=1, digest="d")


def assert_legal(layout: Layout, world: int, blocks: int, micro_batches: int, request: Layout) -> None:
    assert layout.world == world
    assert layout.pp <= blocks, "each stage has a block"
    assert layout.dp <= micro_batches, "each replica has a micro-batch of its own"
    assert -(-micro_batches // layout.dp) >= layout.pp, "1F1B has a round for each stage"
    assert request.pp in (0, layout.pp)
    assert request.dp in (0, layout.dp)
    assert layout.zero == request.zero


@given(SIZES, SIZES, SIZES, AXES, AXES, st.sampled_from([2, 3]))
def test_layouts_are_legal_and_complete(
    world: int, blocks: int, micro_batches: int, pp: int, dp: int, zero: int
) -> None:
    """Every layout returned is legal, and no legal one is missing."""
    request = Layout(pp=pp, dp=dp, zero=zero)
    given = legal_layouts(world, profile(blocks, micro_batches), request)
    for layout in given:
        assert_legal(layout, world, blocks, micro_batches, request)
    sizes = {(layout.pp, layout.dp) for layout in given}
    assert len(sizes) == len(given)
    for stages in range(1, world + 1):
        replicas = world // stages
        legal = (
            stages * replicas == world
            and stages <= blocks
            and replicas <= micro_batches
            and -(-micro_batches // replicas) >= stages
            and pp in (0, stages)
            and dp in (0, replicas)
        )
        assert ((stages, replicas) in sizes) == legal


def test_the_obstacle_is_named_if_more_nodes_would_not_help() -> None:
    """A tie that no pipeline may cut, for example: `elastic3d plan` names it, and so does the run."""
    tied = replace(profile(4, 8), tied=True)
    with pytest.raises(LayoutError, match="pp=2 would part a parameter") as caught:
        plan(2, 1, tied, Layout(pp=2))
    assert "add nodes" not in str(caught.value)
    for heads, why in (
        (0, "tp=2 needs a model with a tensor-parallel plan"),
        (3, "tp=2 does not divide the model's 3"),
    ):
        with pytest.raises(LayoutError, match=why) as caught:
            plan(2, 2, replace(profile(4, 8), heads=heads), Layout(tp=2))
        assert "add nodes" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "micro_batches", "why"),
    [
        ("pp=2,schedule=zero-bubble,virtual=2", 4, "use zero=2, or schedule=interleaved or 1f1b"),
        ("pp=2,dp=2,zero=2,schedule=dualpipev,virtual=2", 4, "schedule dualpipev needs as many as stages (4)"),
        ("pp=2,schedule=interleaved,virtual=3", 4, "has more pipeline stages (6) than the model has blocks (4)"),
        ("pp=2,cuts=1/3", 4, "2 stages have 1 cuts between them, not 2"),
    ],
)
def test_what_a_schedule_does_not_allow_is_said_with_what_it_needs(asked: str, micro_batches: int, why: str) -> None:
    """All that was asked for is repeated, and no sizes are named which would do: more nodes do not help."""
    with pytest.raises(LayoutError, match="no layout fits") as caught:
        plan(4, 1, profile(4, micro_batches), Layout.parse(asked))
    said = str(caught.value)
    assert why in said
    assert all(part in said for part in asked.split(","))
    assert "add nodes" not in said


@given(st.integers(1, 16), st.integers(1, 8), SIZES, SIZES, AXES, AXES)
def test_every_request_gives_a_plan_or_a_helpful_error(
    nodes: int, slots: int, blocks: int, micro_batches: int, pp: int, dp: int
) -> None:
    """Any nodes, model and request: a legal plan for the most nodes that have one, or an error naming all three."""
    request = Layout(pp=pp, dp=dp)
    model = profile(blocks, micro_batches)
    try:
        made = plan(nodes, slots, model, request)
    except LayoutError as error:
        assert not any(legal_layouts(used * slots, model, request) for used in range(1, nodes + 1))
        said = str(error)
        for part in (f"{nodes} node(s)", f"{slots} slot(s)", f"{blocks} blocks", f"{micro_batches} micro-batches"):
            assert part in said
        assert "free an axis, add nodes, or raise global_batch" in said
        for axis, size in (("pp", pp), ("dp", dp)):
            assert (f"{axis}={size}" in said) == bool(size)
    else:
        assert 1 <= made.nodes <= nodes
        assert_legal(made.layout, made.nodes * slots, blocks, micro_batches, request)
        assert not any(legal_layouts(more * slots, model, request) for more in range(made.nodes + 1, nodes + 1))
        assert made == plan(nodes, slots, model, request), "the same inputs give the same plan"


@pytest.mark.parametrize("nodes", range(1, 17))
def test_one_slot_nodes_always_have_a_plan(nodes: int) -> None:
    """With one slot per node and no request, every model with a block and a micro-batch can start."""
    for blocks in range(1, 17):
        for micro_batches in range(1, 17):
            made = plan(nodes, 1, profile(blocks, micro_batches), Layout())
            assert made.nodes >= 1
            if nodes <= micro_batches:
                assert made.nodes == nodes


@pytest.mark.parametrize(
    ("nodes", "slots", "pp", "dp", "used"),
    [
        (1, 1, 1, 1, 1),
        (2, 1, 1, 2, 2),
        (3, 1, 1, 3, 3),
        (4, 1, 2, 2, 4),
        (6, 1, 2, 3, 6),
        (8, 1, 2, 4, 8),
        (7, 1, 1, 7, 7),
    ],
)
def test_the_squarest_mesh_wins(nodes: int, slots: int, pp: int, dp: int, used: int) -> None:
    """Small worlds of a model of 8 blocks and 8 micro-batches, as a readable table."""
    assert plan(nodes, slots, profile(8, 8), Layout()) == Plan(layout=Layout(pp=pp, dp=dp), nodes=used)


def test_nodes_that_no_layout_can_use_are_spares() -> None:
    """A fixed pp of 2 leaves the odd node out."""
    assert plan(5, 1, profile(8, 8), Layout(pp=2)).nodes == 4


@pytest.mark.parametrize("wrong", [{"pp": -1}, {"dp": -2}, {"tp": -1}, {"zero": 4}, {"pp": 1.5}])
def test_impossible_requests_are_refused(wrong: dict[str, int]) -> None:
    """By the name of the axis, where the request is made."""
    with pytest.raises(LayoutError, match=next(iter(wrong))):
        Layout(**wrong)
