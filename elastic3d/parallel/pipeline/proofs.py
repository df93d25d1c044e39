"""The chain of a run's model, proven with the inputs that its stages are going to have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from elastic3d.data import Batches
from elastic3d.errors import ModelError
from elastic3d.parallel import initial
from elastic3d.parallel.numerics.precision import as_computed, cast
from elastic3d.parallel.pipeline import stages
from elastic3d.parallel.pipeline.chain import Chain, prove
from elastic3d.parallel.pipeline.shapes import PassedShapes, Shape, varying
from elastic3d.parallel.shard_request import ShardRequest


def prove_for(plan: ShardRequest, batches: Batches) -> Chain:
    """Return the chain of a plan's model for the inputs of a run's batches.

    Where those vary it is proven a second time, with a micro-batch of the first step that differs from the first one in
    as many dims as any. ModelError for a model that is no chain, or whose activations stages could not pass on.
    """
    first = batches.example()[0]
    if not batches.varies:
        return prove_plan(plan, first)
    small = initial.nbytes(initial.outline(plan.build)) <= plan.whole_below
    chain = prove_plan(plan, first, whole=small)
    shapes = passed_shapes(chain, first, True)

    def entering(given: Any) -> Shape:
        return tuple(chain.frame.tensor(given).shape)

    def differs(given: Any) -> int:
        return sum(one != other for one, other in zip(entering(given), shapes.entering, strict=False))

    other = max((given for given, _ in batches.examples()), key=differs, default=first)
    if differs(other):
        again = prove_plan(plan, other, whole=small)
        expected = shapes.of(entering(other), "a micro-batch of the first step")
        shapes.check(tuple(again.activation.shape), expected, "blocks")
        if not _stands_for(chain, again):
            raise ModelError(
                f"forward runs other modules, or returns something else, for an input of {list(entering(other))} than "
                f"for one of {list(shapes.entering)}, and pipeline stages are cut for one of them; pad all to one "
                "shape and say run.batches(..., one_shape=True), or leave blocks= out to train without pipeline stages"
            )
    return chain


def _stands_for(proven: Chain, again: Chain) -> bool:
    """Return whether stages that are cut as one chain says compute what another one of the same model does."""
    shapes = tuple(proven.activation.shape), tuple(again.activation.shape)
    return (
        proven.late == again.late
        and (proven.frame.entry, proven.frame.everywhere) == (again.frame.entry, again.frame.everywhere)
        and all(
            one.keys() == two.keys() and all(two[name].has(one[name].beside(*shapes)) for name in one)
            for one, two in ((proven.early, again.early), (proven.templates, again.templates))
        )
    )


def passed_shapes(
    chain: Chain, example: Any, varies: bool, part: Callable[[Shape], Shape] | None = None
) -> PassedShapes:
    """Return the shapes that stages pass on; ModelError where micro-batches vary and activations do not follow."""
    entering, leaving = tuple(chain.frame.tensor(example).shape), tuple(chain.activation.shape)
    shared = varying(entering, leaving) if varies else 0
    made = PassedShapes(entering=entering, leaving=leaving, varying=shared)
    return made if part is None else replace(made, part=part)


def prove_plan(plan: ShardRequest, example: Any, *, whole: bool = True) -> Chain:
    """Return the chain of a plan's model: from a pass on meta, or a real one where forward depends on values.

    whole: the model may be built for that; ModelError where it may not and has to be.
    """
    assert plan.blocks is not None
    try:
        return _prove(plan, initial.outline(plan.build), example)
    except (RuntimeError, NotImplementedError) as error:
        if not whole:
            raise ModelError(
                f"forward depends on the values of its input, so that only a pass of the real model could show whether "
                f"stages can compute it ({error}), and the model is too large to be built for that; pad all "
                "micro-batches to one shape and say run.batches(..., one_shape=True), or leave blocks= out to train "
                "without pipeline stages"
            ) from error
        with torch.random.fork_rng(devices=[]):
            return _prove(plan, plan.build(), example)


def _prove(plan: ShardRequest, model: nn.Module, example: Any) -> Chain:
    return prove(*computed(plan, model, example))


def computed(plan: ShardRequest, model: nn.Module, example: Any) -> tuple[nn.Module, str, Any]:
    """Return a model, the path of its blocks and an example of its input beside it, as they are computed with."""
    assert plan.blocks is not None
    device, precision = next(model.parameters()).device, plan.numerics.precision
    model = as_computed(model, stages.find_blocks(model, plan.blocks).children(), precision)
    beside = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, example)
    return model, plan.blocks, cast(beside, precision)
