"""Named models and devices: figures computed from shapes agree with published ones."""

from __future__ import annotations

import pytest

from elastic3d.errors import UsageError
from elastic3d.planner.devices import DEVICES, Number, device_named
from elastic3d.planner.shapes import (
    SHAPES,
    RecomputedShare,
    activation_bytes,
    block_flops,
    chosen_parameters,
    flops_per_token,
    parameters,
    score_flops,
    shape_named,
)

# Counted in the published weights, as their model cards give them.
EXACT = {
    "gpt-125m": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt-neox-20b": 20_554_567_680,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
}
ROUNDED = {
    "gpt-350m": 355e6,
    "gpt-1.3b": 1.3e9,
    "gpt-6.7b": 6.7e9,
    "gpt-175b": 175e9,
    "llama-3-405b": 405.9e9,
    "mixtral-8x22b": 140.6e9,
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_match_the_published_number(name: str) -> None:
    """Exactly where the weights were counted, else to the precision of the name."""
    if name in EXACT:
        assert parameters(SHAPES[name]) == EXACT[name]
    else:
        assert parameters(SHAPES[name]) == pytest.approx(ROUNDED[name], rel=0.02)


def test_a_token_goes_through_two_of_eight_experts() -> None:
    """Mixtral's paper says 12.9 and 39 billion of 46.7 and 141."""
    assert chosen_parameters(SHAPES["mixtral-8x7b"]) == pytest.approx(12.9e9, rel=0.01)
    assert chosen_parameters(SHAPES["mixtral-8x22b"]) == pytest.approx(39e9, rel=0.02)
    assert chosen_parameters(SHAPES["llama-7b"]) == parameters(SHAPES["llama-7b"])


@pytest.mark.parametrize("name", ["gpt-125m", "gpt-1.3b", "gpt-175b"])
def test_flops_match_narayanan(name: str) -> None:
    """With full recomputation 96 s l h^2 (1 + s/6h + V/16lh) per sample; their logits are not computed again."""
    shape = SHAPES[name]
    s, layers, h, v = shape.context, shape.layers, shape.width, shape.vocabulary
    published = 96.0 * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    assert flops_per_token(shape, RecomputedShare.FULL) * s == pytest.approx(published, rel=1e-9)


def test_recomputation_costs_what_it_repeats() -> None:
    """A whole forward pass of the blocks, or only their scores."""
    shape = SHAPES["llama-7b"]
    plain = flops_per_token(shape)
    assert flops_per_token(shape, RecomputedShare.FULL) - plain == pytest.approx(shape.layers * block_flops(shape))
    assert flops_per_token(shape, RecomputedShare.SELECTIVE) - plain == pytest.approx(shape.layers * score_flops(shape))


@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (8, False), (8, True)])
def test_activations_match_korthikanti(tp: int, sequence: bool) -> None:
    """Equations 1, 2 and 4, and 2 with selective recomputation: s b h (10 + 24/t + 5as/ht), all of it /t along s."""
    shape = SHAPES["gpt-175b"]
    s, h, a, b = shape.context, shape.width, shape.heads, 3
    whole, cut, scores = 10.0, 24.0, 5.0 * a * s / h
    published = s * b * h * (whole / (tp if sequence else 1) + (cut + scores) / tp)
    own = activation_bytes(shape, tp=tp, sequence=sequence, fused=False, samples=b)
    assert own == pytest.approx(published, rel=1e-9)
    selective = activation_bytes(
        shape, tp=tp, sequence=sequence, fused=False, samples=b, recompute=RecomputedShare.SELECTIVE
    )
    assert selective == pytest.approx(published - s * b * h * scores / tp, rel=1e-9)
    full = activation_bytes(shape, tp=tp, sequence=sequence, samples=b, recompute=RecomputedShare.FULL)
    assert full == 2.0 * s * b * h / (tp if sequence else 1)


def test_fused_attention_keeps_a_number_per_head_instead_of_the_scores() -> None:
    """Little is left for selective recomputation to save."""
    shape = SHAPES["llama-3-8b"]
    fused, plain = activation_bytes(shape), activation_bytes(shape, fused=False)
    selective = activation_bytes(shape, fused=False, recompute=RecomputedShare.SELECTIVE)
    assert fused - selective == shape.context * 4 * shape.heads
    assert plain - selective == shape.context * shape.heads * shape.context * 2


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    """For models and devices; case does not matter."""
    with pytest.raises(UsageError, match=r"'llama-8b'.*llama-7b.*mixtral-8x7b"):
        shape_named("llama-8b")
    with pytest.raises(UsageError, match=r"'h300'.*h200.*cpu"):
        device_named("h300")
    assert shape_named("Llama-7B") is SHAPES["llama-7b"]
    assert device_named("H200") is DEVICES["h200"]


def test_a_device_refuses_unsupported_dtypes() -> None:
    """V100 has no bf16, and the message says what it has."""
    with pytest.raises(UsageError, match=r"v100 has no products in bf16.*fp16, fp32"):
        DEVICES["v100"].speed(Number.BF16)
    assert DEVICES["a100-80g"].speed(Number.BF16) == pytest.approx(156e12)
