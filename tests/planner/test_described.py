"""Profiles computed from shapes: their parts add up to the model, and batches are checked at once."""

from __future__ import annotations

import json

import pytest

from elastic3d.errors import UsageError
from elastic3d.planner.described import Optimizer, Training, describe
from elastic3d.planner.devices import Number
from elastic3d.planner.shapes import SHAPES, RecomputedShare, activation_bytes, flops_per_token, parameters
from elastic3d.values import ModelProfile, from_json, to_json


@pytest.mark.parametrize("name", SHAPES)
def test_the_parts_add_up_to_the_model(name: str) -> None:
    """Parameters and FLOPs of the ends and the blocks."""
    shape = SHAPES[name]
    profile = describe(shape, Training(global_batch=6, micro_batch=2))
    parts = (profile.first, *[profile.block] * profile.blocks, profile.last)
    assert sum(part.parameters for part in parts) == parameters(shape) == profile.parameters
    forward = sum(part.flops for part in parts)
    assert 3 * forward == pytest.approx(flops_per_token(shape) * 2 * shape.context)
    assert all(part.cut <= part.parameters for part in parts)
    assert profile.micro_batches == 3


@pytest.mark.parametrize("recompute", RecomputedShare)
@pytest.mark.parametrize("fused", [False, True])
def test_activations_are_split_by_what_tensor_parallelism_cuts(recompute: RecomputedShare, fused: bool) -> None:
    """The whole part plus a t-th of the cut one equals the count of Korthikanti et al. for t ranks."""
    shape = SHAPES["gpt-6.7b"]
    kept = describe(shape, Training(global_batch=2, micro_batch=2, fused=fused)).block.kept[recompute]
    for tp in (1, 4, 8):
        counted = activation_bytes(shape, recompute=recompute, tp=tp, sequence=False, fused=fused, samples=2)
        assert kept.whole + kept.cut / tp == pytest.approx(counted)
    assert (kept.again > 0) == (recompute is not RecomputedShare.NONE)


def test_bytes_follow_dtype_and_optimizer() -> None:
    """AdamW keeps two fp32 numbers beside each parameter, plain SGD none."""
    shape = SHAPES["gpt-125m"]
    adam = describe(shape, Training(global_batch=8, number=Number.FP32))
    assert (adam.held_bytes, adam.compute_bytes, adam.optimizer_bytes) == (4, 4, 8)
    plain = describe(shape, Training(global_batch=8, optimizer=Optimizer.SGD))
    assert (plain.compute_bytes, plain.optimizer_bytes) == (2, 0)
    assert from_json(ModelProfile, json.loads(json.dumps(to_json(adam)))) == adam


@pytest.mark.parametrize(("whole", "part"), [(0, 1), (8, 0), (8, 3)])
def test_batches_that_do_not_divide_are_refused(whole: int, part: int) -> None:
    """By the names of the options."""
    with pytest.raises(UsageError, match=r"--global-batch"):
        Training(global_batch=whole, micro_batch=part)
