"""Layouts that a model rules out, whatever they cost: refused by the planner before any trainer meets them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic3d.planner import legal_layouts
from elastic3d.planner.legality import unfit
from elastic3d.values import Layout, ModelProfile, from_json, to_json

MODEL = ModelProfile(blocks=8, parameters=1, micro_batches=8, micro_batch=1, digest="d")


@pytest.mark.parametrize(
    ("layout", "model", "words"),
    [
        ("pp=1,dp=2,tp=2", {}, "tensor-parallel plan"),
        ("pp=1,dp=2,tp=3", {"heads": 4}, "does not divide the model's 4 heads"),
        ("pp=1,dp=9", {}, "leaves ranks without"),
        ("pp=2,dp=1,zero=2,schedule=zbv,virtual=2", {"recompute": "selective"}, "splits the backward pass"),
        ("pp=2,dp=1", {"tied": True}, "would part a parameter"),
        ("pp=2,dp=1", {"unstaged": "no chain"}, "micro-batches of several shapes: use pp=1. no chain"),
        ("pp=1,dp=2", {"compress": "powersgd"}, "has one replica"),
        ("pp=2,dp=1,schedule=interleaved,virtual=2", {"counts": (8, 9)}, "9 of 9 micro-batches"),
        ("pp=2,dp=1,schedule=interleaved,virtual=2", {"counts": (2, 3, 6), "multiple": 1}, "leaves 5 of 5"),
        ("pp=2,dp=3", {"counts": (2, 4, 8), "multiple": 2}, "or TokenBudget(multiple=6)"),
        ("pp=1,dp=3", {"experts": 4}, "does not divide the 4 experts"),
        ("pp=1,dp=4", {"experts": 4, "counts": (8, 10)}, "does not divide the 10 micro-batches"),
        ("pp=1,dp=2,replicas=2", {"experts": 4}, "replicas=1"),
        ("pp=2,dp=2,schedule=interleaved,virtual=2", {"experts": 4}, "gpipe and 1f1b do"),
    ],
)
def test_a_layout_ruled_out_by_a_model_is_refused_with_the_reason(
    layout: str, model: dict[str, object], words: str
) -> None:
    """The reason names the property of the model, and without that the layout is fine."""
    reason = unfit(Layout.parse(layout), replace(MODEL, **model))  # type: ignore[arg-type]
    assert reason is not None
    assert words in reason
    if model:
        wanted = Layout.parse(layout)
        assert unfit(replace(wanted, tp=1), MODEL) is None


def test_layouts_ruled_out_by_a_model_are_never_planned() -> None:
    """Without costs as well: for six ranks, a model with four experts gets layouts whose dp divides them."""
    assert {layout.dp for layout in legal_layouts(6, replace(MODEL, experts=4), Layout())} == {1, 2}
    assert {layout.pp for layout in legal_layouts(4, replace(MODEL, tied=True), Layout())} == {1}
    assert {layout.pp for layout in legal_layouts(4, replace(MODEL, unstaged="no chain"), Layout())} == {1}


def test_a_profile_records_what_rules_layouts_out() -> None:
    """It is sent in members' records."""
    profile = replace(MODEL, counts=(8, 16), experts=4, compress="bf16")
    assert from_json(ModelProfile, to_json(profile)) == profile


def test_leaves_bound_dp_and_fill_the_rounds_of_a_pipeline() -> None:
    """8 micro-batches in leaves of 4 are two ranks' work, and one rank runs 4 in a row."""
    leaves = replace(MODEL, leaf=4)
    assert unfit(Layout(pp=1, dp=2), leaves) is None
    assert unfit(Layout(pp=1, dp=4), leaves) == "dp=4 leaves ranks without one of the 2 leaves of 4 micro-batches"
    assert unfit(Layout(pp=4, dp=2), MODEL) is None
    assert (leaves.rounds(1), leaves.rounds(2), replace(MODEL, leaf=2).rounds(3)) == (8, 4, 4)
    assert "leaves 4 of 8" in (unfit(Layout(pp=8, dp=2), leaves) or "")
    experts = replace(leaves, experts=8, micro_batches=12)
    assert unfit(Layout(pp=1, dp=2), experts) == (
        "dp=2 does not divide the 3 leaves of 4 micro-batches, which experts= needs"
    )
