"""Fill in what a profile does not say of a model's costs, from one pass over its outline on meta."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from elastic3d.errors import ModelError
from elastic3d.parallel.costs import PartCosts, measure_costs
from elastic3d.values import Kept, ModelProfile, Part


def costed(profile: ModelProfile, model: nn.Module, blocks: str | None, example: Any) -> ModelProfile:
    """Return the profile with the costs of its parts; as it is where it has them, or the model does not run on meta."""
    if profile.block.flops:
        return profile
    try:
        costs = measure_costs(model, blocks, example)
    except ModelError:
        return profile
    if not costs.blocks:
        return dataclasses.replace(profile, block=_part([costs.before]), logits=costs.before.output_bytes)
    return dataclasses.replace(
        profile,
        first=_part([costs.before]),
        block=_part(costs.blocks),
        last=_part([costs.after]),
        boundary=costs.blocks[0].output_bytes,
        logits=costs.after.output_bytes,
    )


def _part(costs: Sequence[PartCosts]) -> Part:
    """Return the mean of parts. With full recomputation a part keeps what it was given, about what it hands on."""

    def mean(name: str) -> float:
        return float(sum(getattr(cost, name) for cost in costs)) / len(costs)

    flops = mean("forward_flops")
    return Part(
        parameters=int(mean("parameters")),
        flops=flops,
        kept={"none": Kept(whole=int(mean("saved_bytes"))), "full": Kept(whole=int(mean("output_bytes")), again=flops)},
    )
