"""The operations of a model and of the devices that train it: known as they are, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic3d.planner.described import Training, describe
from elastic3d.planner.operations import operations
from elastic3d.planner.shapes import SHAPES, flops_per_token
from elastic3d.values import DeviceFacts, ModelPart

SHAPE = next(iter(SHAPES.values()))
PROFILE = describe(SHAPE, Training(global_batch=8, micro_batch=2))
H100 = DeviceFacts(kind="cuda", name="NVIDIA H100 80GB HBM3", memory=80 << 30, devices=8, torch="2.13.0")
CPU = DeviceFacts(kind="cpu", name="x86", memory=1 << 30, devices=4, torch="2.13.0")


def test_a_sample_takes_what_the_formula_for_its_tokens_says() -> None:
    """Three forwards' worth, and nothing for what is computed again."""
    known = operations(PROFILE, H100, slots=8)
    assert known.sample == pytest.approx(SHAPE.context * flops_per_token(SHAPE))
    again = operations(replace(PROFILE, recompute="full"), H100, slots=8)
    assert again == known
    assert known.why == ""


@pytest.mark.parametrize(
    ("compute_bytes", "products", "tera"), [(2, "", 989.5), (4, "", 67.0), (4, "tf32", 494.7)], ids=repr
)
def test_a_peak_is_of_the_format_of_the_products(compute_bytes: int, products: str, tera: float) -> None:
    """Of all devices of the node."""
    profile, device = replace(PROFILE, compute_bytes=compute_bytes), replace(H100, products=products)
    assert operations(profile, device, slots=4).peak == pytest.approx(4 * tera * 1e12)


def test_what_is_not_known_is_said_and_not_guessed() -> None:
    """A model that was not counted, experts, a CPU, a slice of a device, no device at all."""
    uncounted = operations(replace(PROFILE, block=ModelPart(parameters=9)), H100, slots=1)
    assert (uncounted.sample, uncounted.why) == (None, "the model does not run on meta, where operations are counted")
    spread = operations(replace(PROFILE, experts=8), H100, slots=1)
    assert spread.sample is None
    assert "experts" in spread.why
    for device in (CPU, replace(H100, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", memory=10 << 30), None):
        known = operations(PROFILE, device, slots=1)
        assert known.peak is None
        assert known.sample is not None
        assert "data sheet" in known.why
