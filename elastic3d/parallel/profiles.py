"""The costs of a model's parts, as the planner gets them in a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from elastic3d.errors import ModelError
from elastic3d.parallel.costs import PartCosts, measure_costs
from elastic3d.parallel.tensor.styles import Scheme
from elastic3d.values import KeptActivations, ModelPart, ModelProfile


def with_costs(
    profile: ModelProfile, model: nn.Module, blocks: str | None, example: Any, scheme: Scheme | None
) -> ModelProfile:
    """Return the profile with the costs of an outline's parts; unchanged if the model does not run on meta.

    Blocks count with their mean. scheme: how tensor parallelism cuts them. A loss is taken to keep the log
    probabilities of its input and to make a gradient of the same size.
    """
    if scheme is not None:
        profile = replace(profile, heads=scheme.divisor)
    try:
        costs = measure_costs(model, blocks, example)
    except ModelError:
        return profile
    listed = costs.blocks or (costs.before,)
    boundary = costs.before.output_bytes if costs.blocks else 0
    logits = (costs.after if costs.blocks else costs.before).output_bytes
    block = replace(
        _part(listed[0], boundary),
        parameters=sum(part.parameters for part in listed) // len(listed),
        cut=_cut(model, blocks, scheme) // len(listed),
        flops=sum(part.forward_flops for part in listed) / len(listed),
    )
    kept = KeptActivations(whole=costs.after.saved_bytes + 3 * logits)
    return replace(
        profile,
        first=_part(costs.before, 0) if costs.blocks else ModelPart(),
        block=block,
        last=replace(_part(costs.after, 0), kept=dict.fromkeys(("none", "selective", "full"), kept)),
        boundary=boundary,
        logits=logits,
    )


def _cut(model: nn.Module, blocks: str | None, scheme: Scheme | None) -> int:
    """Return how many parameters of the blocks tensor parallelism divides."""
    if scheme is None or blocks is None:
        return 0
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(sizes.get(name, 0) for name in scheme.dims if name.startswith(f"{blocks}."))


def _part(costs: PartCosts, entering: int) -> ModelPart:
    """Return a part whose input has `entering` bytes."""
    whole = KeptActivations(whole=costs.saved_bytes)
    kept = {"none": whole, "full": whole}
    if entering:
        products, others = entering + costs.product_bytes, costs.forward_flops - costs.product_flops
        if products < costs.saved_bytes:
            kept["selective"] = KeptActivations(whole=products, again=float(others))
        kept["full"] = KeptActivations(whole=entering, again=float(costs.forward_flops))
    return ModelPart(parameters=costs.parameters, flops=float(costs.forward_flops), kept=kept)
