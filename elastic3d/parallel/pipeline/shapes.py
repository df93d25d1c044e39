"""The shape of the activation that stages pass on, which every stage has to know before it receives one.

It follows from the shape of the input. The first dims of both, such as (samples, length) of tokens (samples, length)
and activations (samples, length, features), are the same for one micro-batch and may be others for the next; all
further dims are those of the first micro-batch. Whatever a stage has made is compared with that before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic3d.errors import ModelError, UsageError

Shape = tuple[int, ...]

AT_LEAST = 2
"""First dims that input and activation share in any chain whose micro-batches vary: the samples and their length."""


def whole(shape: Shape) -> Shape:
    """Return the shape of what a stage passes on of an activation: all of it."""
    return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedShapes:
    """The shapes that a run's stages pass on.

    entering: of the chain's tensor of the first micro-batch's input. leaving: of the activation that blocks make of it.
    varying: how many of the first dims of both may be others in other micro-batches. part: the shape of what one rank
    passes on of an activation.
    """

    entering: Shape
    leaving: Shape
    varying: int = 0
    part: Callable[[Shape], Shape] = whole

    def of(self, entering: Shape, what: str) -> Shape:
        """Return the shape that is passed on for a micro-batch; UsageError, naming it, for one that does not follow."""
        fixed = self.entering[self.varying :]
        if len(entering) != len(self.entering) or entering[self.varying :] != fixed:
            if not self.varying:
                raise UsageError(
                    f"{what} is of shape {list(entering)}, and the first one of the run of {list(self.entering)}: "
                    "pipeline stages pass on activations of one shape where run.batches has no collate=, or "
                    "one_shape=True beside it. Pad all to one length, leave one_shape=True out, or train without "
                    "stages: elastic3d.run(..., layout=Layout(pp=1))"
                )
            raise UsageError(
                f"{what} is of shape {list(entering)}, and the first one of the run of {list(self.entering)}: pipeline "
                f"stages pass on activations that differ in their first {self.varying} dims alone. Pad the others to "
                "one size, or train without stages: elastic3d.run(..., layout=Layout(pp=1))"
            )
        return self.part((*entering[: self.varying], *self.leaving[self.varying :]))

    def check(self, made: Shape, expected: Shape, maker: str) -> None:
        """Raise ModelError, naming its maker, for an activation of another shape than the next stage expects."""
        if made != expected:
            raise ModelError(
                f"{maker} made an activation of shape {list(made)}, and the next stage expects "
                f"{list(expected)}: for the run's first micro-batch blocks make {list(self.leaving)} of an input of "
                f"{list(self.entering)}, whose first {self.varying} dims stages take to be the same. Have the blocks "
                "keep them, pad all micro-batches to one shape and say run.batches(..., one_shape=True), or train "
                "without stages: elastic3d.run(..., layout=Layout(pp=1))"
            )


def varying(entering: Shape, leaving: Shape) -> int:
    """Return how many of the first dims input and activation have in common.

    ModelError where they are too few for micro-batches of several shapes.
    """
    shared = 0
    for one, other in zip(entering, leaving, strict=False):
        if one != other:
            break
        shared += 1
    if shared < min(AT_LEAST, len(entering)):
        raise ModelError(
            f"blocks make activations of shape {list(leaving)} of an input of {list(entering)}, and pipeline stages "
            "can pass on those of micro-batches of several shapes only where the first dims of both, (samples, "
            "length), are the same. Pad all to one shape and say run.batches(..., one_shape=True), with a number as "
            "micro_batch=, or train without stages: elastic3d.run(..., layout=Layout(pp=1))"
        )
    return shared
