"""What islands must have in common, as this island has it; compared with what is in the store, before any step."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from blake3 import blake3
from torch.distributed.tensor import DTensor

from checkpointing.format.tiles import TensorSpec
from elastic3d.errors import UsageError
from elastic3d.islands.options import Islands
from elastic3d.islands.parts import IslandParts
from elastic3d.islands.record import Setup
from elastic3d.islands.state import trained
from elastic3d.parallel.digest import state_digest

_OF = "elastic3d.Islands"


def check_script(parts: IslandParts, islands: Islands) -> None:
    """Raise UsageError for what islands cannot train, with what would do instead."""
    order, plan = parts.batches.order, parts.plan
    refused = {
        "a stream, whose samples cannot be handed out": order.length is None,
        "a mixture, whose proportions follow the steps of one run": order.proportions is not None,
        "micro_batch=TokenBudget (give a number of samples)": order.budget is not None,
        "a global batch that changes (give one number)": bool(order.changes) or order.adaptive is not None,
        "exclude=, whose positions are those of one run": bool(order.holes),
    }
    for what, there in refused.items():
        if there:
            raise UsageError(f"{_OF}: run.batches has {what}. Islands need a map-style data set and one global batch")
    if plan.experts is not None:
        raise UsageError(f"{_OF}: run.shard(experts=) spreads parameters that islands cannot merge; leave it out")
    if parts.assignment.spike == "rollback":
        raise UsageError(
            f'{_OF}: health=Health(spike="rollback") would go back behind outer steps that other islands have taken; '
            'take spike="log"'
        )
    whole = [name for name, one in trained(parts.model).items() if not isinstance(one, DTensor)]
    if parts.mesh.layout.dp > 1 and whole:
        raise UsageError(
            f"{_OF}: parameter {whole[0]} is not sharded over the data-parallel ranks, and cannot be merged; build it "
            "in the model that run.shard is given"
        )


def trained_specs(parts: IslandParts) -> list[TensorSpec]:
    """Return the trained parameters of the whole model, in its order, by their own names; a collective."""
    names = json.dumps(sorted(trained(parts.model))).encode()
    everywhere = {name for data in parts.mesh.gather(names) for name in json.loads(data)}
    own = [(spec, spec.key.removeprefix("model/")) for spec in parts.specs]
    return [replace(spec, key=name) for spec, name in own if name in everywhere]


def setup_of(parts: IslandParts, islands: Islands, specs: list[TensorSpec], *, initial: bool) -> Setup:
    """Return what this island has in common with the others; a collective.

    initial: whether the model has its initial values, whose digest is part of it then.
    """
    order, (lr, momentum) = parts.batches.order, islands.rates
    lines = "".join(f"{spec.key} {spec.shape} {spec.dtype}\n" for spec in specs)
    assert order.length is not None
    return Setup(
        model=blake3(lines.encode()).hexdigest()[:32],
        parameters=sum(math.prod(spec.shape) for spec in specs),
        initial=state_digest(parts.mesh, parts.model, None)[:32] if initial else "",
        seed=parts.plan.seed,
        data_seed=order.seed,
        data=parts.batches.fingerprint,
        samples=order.length,
        global_batch=order.global_batch,
        micro_batch=order.micro_batch,
        leaf=parts.plan.leaf,
        precision=str(parts.plan.numerics.precision),
        optimizer=type(parts.optimizer).__name__,
        every=islands.every,
        fragments=islands.fragments,
        outer=islands.outer,
        lr=lr,
        momentum=momentum,
        overlap=islands.overlap,
        mixing=islands.own_share,
    )


def check_same(mine: Setup, there: Setup, where: str) -> None:
    """Raise UsageError where this island is not one of those that are there."""
    if not mine.initial:
        mine = replace(mine, initial=there.initial)
    differences = mine.differences(there)
    if differences:
        raise UsageError(
            f"{_OF}: the islands of {where} train something else: {'; '.join(differences)}. Trying again does not "
            "help: run the same script with the same arguments on every island, or give these islands a store of "
            "their own"
        )
