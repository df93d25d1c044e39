"""Profiles of models that are only described: computed from a shape instead of measured from a script."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic3d.errors import UsageError
from elastic3d.planner.devices import Number
from elastic3d.planner.shapes import (
    RecomputedShare,
    Shape,
    activation_bytes,
    block_flops,
    block_parameters,
    input_parameters,
    output_bytes,
    output_flops,
    output_parameters,
    parameters,
    score_flops,
)
from elastic3d.values import KeptActivations, ModelPart, ModelProfile


class Optimizer(StrEnum):
    """Optimizers, by the state that they keep besides the parameters."""

    ADAMW = "adamw"
    ADAM = "adam"
    MOMENTUM = "sgd-momentum"
    SGD = "sgd"

    @property
    def bytes(self) -> int:
        """Bytes of state in fp32 for each parameter."""
        return {Optimizer.SGD: 0, Optimizer.MOMENTUM: 4}.get(self, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a described model is trained. global_batch, micro_batch: in samples. number: the format of products.

    Parameters, sums of gradients and the optimizer's state are held in fp32. fused: attention does not store scores.
    """

    global_batch: int
    micro_batch: int = 1
    number: Number = Number.BF16
    optimizer: Optimizer = Optimizer.ADAMW
    recompute: RecomputedShare = RecomputedShare.NONE
    fused: bool = True

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.micro_batch < 1:
            raise UsageError(
                f"batches have at least one sample; --global-batch is {self.global_batch}, --micro-batch "
                f"{self.micro_batch}"
            )
        if self.global_batch % self.micro_batch:
            raise UsageError(
                f"--global-batch {self.global_batch} is not a whole number of micro-batches of {self.micro_batch} "
                "samples"
            )


def describe(shape: Shape, training: Training) -> ModelProfile:
    """Return the profile of a model of this shape, trained in this way."""
    itemsize = training.number.itemsize
    tokens = shape.context * training.micro_batch
    held = parameters(shape)
    stream = tokens * shape.width * itemsize
    logits = tokens * shape.vocabulary * itemsize
    return ModelProfile(
        blocks=shape.layers,
        parameters=held,
        micro_batches=training.global_batch // training.micro_batch,
        micro_batch=training.micro_batch,
        digest="",
        first=ModelPart(
            parameters=input_parameters(shape), cut=shape.vocabulary * shape.width, kept=_always(KeptActivations())
        ),
        block=ModelPart(
            parameters=block_parameters(shape),
            cut=_products(shape),
            flops=tokens * block_flops(shape),
            kept={kind: _kept(shape, training, kind) for kind in RecomputedShare},
            workspace=0 if training.fused else _scores(shape, training),
        ),
        last=ModelPart(
            parameters=output_parameters(shape),
            cut=0 if shape.tied else shape.vocabulary * shape.width,
            flops=tokens * output_flops(shape),
            kept=_always(KeptActivations(whole=2 * stream, cut=int(output_bytes(shape, samples=training.micro_batch)))),
        ),
        boundary=stream,
        logits=logits,
        heads=shape.kv_heads,
        tied=shape.tied,
        held_bytes=4,
        compute_bytes=itemsize,
        gradient_bytes=4,
        optimizer_bytes=training.optimizer.bytes,
        recompute=training.recompute,
    )


def _products(shape: Shape) -> int:
    """Return the parameters of a block that tensor parallelism cuts: all but the two norms'."""
    return block_parameters(shape) - 2 * (2 if shape.centred else 1) * shape.width


def _always(kept: KeptActivations) -> dict[str, KeptActivations]:
    return dict.fromkeys(RecomputedShare, kept)


def _kept(shape: Shape, training: Training, kind: RecomputedShare) -> KeptActivations:
    """Return what a block keeps: the difference between one rank and two shows what ranks share.

    The sequence is not cut: without sequence parallelism each rank has the whole stream.
    """

    def count(ranks: int) -> float:
        return activation_bytes(
            shape,
            recompute=kind,
            tp=ranks,
            sequence=False,
            itemsize=training.number.itemsize,
            fused=training.fused,
            samples=training.micro_batch,
        )

    cut = 2 * (count(1) - count(2))
    tokens = shape.context * training.micro_batch
    again = {RecomputedShare.FULL: block_flops(shape), RecomputedShare.SELECTIVE: score_flops(shape)}.get(kind, 0.0)
    return KeptActivations(whole=int(count(1) - cut), cut=int(cut), again=tokens * again)


def _scores(shape: Shape, training: Training) -> int:
    return shape.context**2 * shape.heads * training.micro_batch * training.number.itemsize
