"""Profiles measured by a run: with costs if the model runs on meta, and readable across versions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos.bench.planned import Model, profile_of
from chaos.bench.plans import correlation
from elastic3d.planner import plan
from elastic3d.planner.memory import memory
from elastic3d.values import Layout, ModelProfile, from_json, to_json
from tests.planner.machines import costs


def test_a_run_measures_the_costs_of_its_model() -> None:
    """Products of a GPT are counted, and what it keeps; blocks and ends together are the whole model."""
    model = Model(width=32, blocks=3, context=16)
    profile = profile_of(model)
    tokens = model.context * model.micro_batch
    products = 12 * model.width**2
    assert profile.block.flops >= 2 * tokens * products
    assert profile.block.flops <= 2.2 * tokens * products
    assert profile.first.parameters + 3 * profile.block.parameters + profile.last.parameters == profile.parameters
    assert profile.boundary == tokens * model.width * 4
    assert profile.logits == tokens * 256 * 4
    assert 0 < profile.block.kept["full"].whole < profile.block.kept["none"].whole
    assert plan(4, 1, profile, Layout(), costs=costs(flops=1e8)).nodes == 4
    assert from_json(ModelProfile, to_json(profile)) == profile


def test_profiles_of_earlier_versions_are_read() -> None:
    """Records without costs stay readable, and such runs are planned by shape."""
    old = {"blocks": 8, "parameters": 1, "micro_batches": 8, "micro_batch": 1, "digest": "d"}
    profile = from_json(ModelProfile, old)
    assert plan(4, 1, profile, Layout(), costs=costs()).layout == Layout(pp=2, dp=2)


def test_rank_correlation_is_one_for_equal_orders() -> None:
    """And -1 for opposite ones."""
    assert correlation([1.0, 2.0, 3.0], [10.0, 11.0, 30.0]) == pytest.approx(1.0)
    assert correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert correlation([1.0, 1.0, 3.0], [5.0, 5.0, 6.0]) == pytest.approx(1.0)


def test_what_is_computed_again_in_part_lies_between_nothing_and_all() -> None:
    """Kept are a block's input and what its products with weights make; the scores are computed again."""
    model = Model(width=32, blocks=3, context=16)
    profile = profile_of(model)
    tokens = model.context * model.micro_batch
    none, some, full = (profile.block.kept[kind] for kind in ("none", "selective", "full"))
    # Queries, keys and values, what attention leads to, and the two products of the feed-forward part.
    assert some.whole == full.whole + tokens * (3 + 1 + 4 + 1) * model.width * 4
    assert full.whole < some.whole < none.whole
    assert 0 < some.again == profile.block.flops - 2 * tokens * 12 * model.width**2
    by_kind = [
        sum(memory(Layout(pp=1, dp=1), replace(profile, recompute=kind)).values())
        for kind in ("full", "selective", "none")
    ]
    assert by_kind == sorted(by_kind)


def test_an_unmeasured_kind_counts_as_no_recomputation() -> None:
    """In profiles of earlier versions, in part is not measured: keeping everything is the safe assumption."""
    profile = profile_of(Model(width=32, blocks=3, context=16))
    kept = {kind: one for kind, one in profile.block.kept.items() if kind != "selective"}
    profile = replace(profile, block=replace(profile.block, kept=kept))
    plain = memory(Layout(pp=1, dp=1), profile)["activations"]
    assert memory(Layout(pp=1, dp=1), replace(profile, recompute="selective"))["activations"] == plain
    assert memory(Layout(pp=1, dp=1), replace(profile, recompute="full"))["activations"] < plain
