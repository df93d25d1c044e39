"""A model that comes in 16 bits is trained over fp32 masters with its very values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from elastic3d.errors import ModelError
from elastic3d.parallel import initial
from elastic3d.parallel.numerics.precision import Precision, over_masters
from elastic3d.training import Run, run_alone
from elastic3d.values import Layout
from tests.parallel.models import Model, Sentences, loss_fn
from tests.parallel.worlds import Orders, run_world


class Tied(nn.Module):
    """A pretrained model in bf16, with a tie, a frozen layer and a buffer that nobody casts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(2))
        self.bfloat16()


def pretrained() -> nn.Module:
    """Return a model with weights of its own, in bf16."""
    torch.manual_seed(99)
    return Model(dtype=torch.bfloat16)


def pretrained_in_fp32() -> nn.Module:
    """Return the same model, widened by hand."""
    model = pretrained()
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def digest(run: Run, *, build: Callable[[], nn.Module], precision: str) -> str:
    model = run.shard(build, blocks="blocks", precision=precision)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=4, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=2):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    return run.digest()


@pytest.mark.gloo
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_in_16_bits_trains_as_one_that_was_widened_by_hand(precision: str) -> None:
    """To the last bit, on one rank and on two."""
    digests = set()
    for build, layout in (
        (pretrained, Layout(pp=1, dp=1)),
        (pretrained_in_fp32, Layout(pp=1, dp=1)),
        (pretrained, Layout(pp=1, dp=2)),
    ):
        for report in run_world(partial(digest, build=build, precision=precision), Orders(layout=layout)):
            assert report.ended == "done", report.error
            digests.add(report.result)
    assert len(digests) == 1


@pytest.mark.parametrize("made", ["whole", "outline", "skeleton", "blank"])
def test_parameters_are_widened_however_the_model_is_built(made: str) -> None:
    """With values or on meta: ties, frozen parameters and buffers are as they were."""
    build = over_masters(Tied, Precision.BF16)
    outline = initial.outline(build)
    model: Any = {
        "whole": lambda: initial.whole(build, 3),
        "outline": lambda: outline,
        "skeleton": lambda: initial.skeleton(build, 3),
        "blank": lambda: initial.blank(build, 3, outline),
    }[made]()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.head.weight is model.embed.weight
    assert not model.frozen.weight.requires_grad
    assert model.table.dtype == torch.bfloat16
    if made == "whole":
        torch.manual_seed(3)
        assert torch.equal(model.embed.weight, Tied().embed.weight.float())


def test_a_model_is_left_as_it_is_without_a_compute_dtype() -> None:
    """precision="fp32" trains it as it is built."""
    assert over_masters(Tied, Precision.FP32) is Tied


def test_what_fp32_would_round_is_refused() -> None:
    """By name, with what would do."""
    with pytest.raises(ModelError, match=r"parameter 'embed.weight' is torch.float64; .* only 16 bits are widened"):
        run_alone(lambda run: run.shard(lambda: Model(dtype=torch.float64), precision="bf16"))  # type: ignore[arg-type, return-value]
    with pytest.raises(ModelError, match="it returned int"):
        run_alone(lambda run: run.shard(lambda: 3, precision="bf16"))  # type: ignore[arg-type, return-value]
