from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic3d.errors import ModelError
from elastic3d.parallel import initial
from elastic3d.parallel.costs import measure_costs
from tests.parallel.models import LENGTH, VOCABULARY, Model, Plain

TOKENS = torch.zeros(2, LENGTH, dtype=torch.long)
ROWS = 2 * LENGTH


def test_costs_match_the_formula() -> None:
    """A matrix product costs two operations per multiply-add forward and twice that backward.

    Parameters are separate.
    """
    width = 6
    costs = measure_costs(initial.outline(lambda: Plain(depth=3, width=width)), "blocks", TOKENS)
    assert [block.name for block in costs.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    for block in costs.blocks:
        assert block.forward_flops == 2 * ROWS * width * width
        assert block.backward_flops == 2 * block.forward_flops
        assert block.parameters == width * width + 3 * width
        assert block.output_bytes == 4 * ROWS * width
        assert block.saved_bytes >= 3 * block.output_bytes
    assert (costs.before.forward_flops, costs.before.parameters) == (0, VOCABULARY * width)
    assert costs.after.forward_flops == 2 * ROWS * width * VOCABULARY
    assert costs.after.parameters == (width + 1) * VOCABULARY
    assert costs.after.output_bytes == 4 * ROWS * VOCABULARY


def test_a_model_without_blocks_is_one_part() -> None:
    """Everything counts as before the blocks."""
    model = initial.outline(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    costs = measure_costs(model, None, torch.zeros(4, 3))
    whole = costs.before
    assert (whole.forward_flops, whole.parameters, costs.blocks) == (2 * 4 * (15 + 10), 32, ())
    # The input needs no gradient: of the first layer's two backward products only one is computed.
    assert (whole.backward_flops, whole.output_bytes) == (2 * 4 * (15 + 2 * 10), 4 * 4 * 2)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_branches_on_values_is_refused() -> None:
    """It does not run on meta."""
    with pytest.raises(ModelError, match="does not run on meta"):
        measure_costs(initial.outline(Model), "blocks", TOKENS)


class LooksAtPositions(nn.Module):
    """Branches on the values of a tensor that is made from shapes alone."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.linear, self.limit = nn.Linear(3, 3), limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[0], device=x.device)
        places += 1
        for _ in range(2 if bool((places.cumsum(0) > self.limit).all()) else 1):
            x = self.linear(x)
        return x


@pytest.mark.parametrize(("limit", "times"), [(0, 2), (1, 1)])
def test_values_made_from_shapes_are_known_on_meta(limit: int, times: int) -> None:
    """An outline takes the same path through forward as the real model."""
    costs = measure_costs(initial.outline(lambda: LooksAtPositions(limit)), None, torch.zeros(4, 3))
    assert costs.before.forward_flops == times * 2 * 4 * 9


def test_values_from_the_input_stay_unknown_on_meta() -> None:
    """Writing something unknown into a known tensor makes it and its views unknown."""

    class Writes(LooksAtPositions):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.zeros(4, device=x.device)
            view = places[:2]
            places += x[:, 0]
            return self.linear(x) if bool(view.any()) else x

    with pytest.raises(ModelError, match="does not run on meta"):
        measure_costs(initial.outline(lambda: Writes(0)), None, torch.zeros(4, 3))
