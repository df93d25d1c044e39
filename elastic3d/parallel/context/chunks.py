"""Which chunks of a sequence a rank computes, and how a micro-batch is cut into them.

A sequence is cut into a fixed number of chunks of equal length, whatever the number of ranks that share them. They are
dealt in turns: with cp ranks turn t has the chunks [t * cp, (t + 1) * cp), the last of them for rank 0. So the work of
causal attention, which grows with the number of a chunk, is much the same on all ranks if there are several turns; and
the chunks of a turn, from the last one on, are in the order of ranks, in which gradients are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from elastic3d.errors import LayoutError, ModelError, UsageError

SEQUENCE = 1
"""The dim of inputs, targets and outputs that is the sequence: (batch, sequence, ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceChunks:
    """The chunks of one rank. count: of a sequence. ranks: those that share them; rank: this one's number."""

    count: int
    ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.count % self.ranks:
            raise LayoutError(
                f"cp={self.ranks} does not divide the {self.count} chunks of run.shard(..., chunks={self.count})"
            )

    @property
    def turns(self) -> int:
        """How many chunks each rank has."""
        return self.count // self.ranks

    def of(self, rank: int, turn: int) -> int:
        """Return the chunk that a rank computes in a turn."""
        return (turn + 1) * self.ranks - 1 - rank

    def mine(self, turn: int) -> int:
        """Return the chunk that this rank computes in a turn."""
        return self.of(self.rank, turn)

    def owner(self, chunk: int) -> int:
        """Return the rank that computes a chunk, in turn chunk // ranks."""
        return self.ranks - 1 - chunk % self.ranks


def check_chunks(chunks: int, reduction: str, experts: str | None, tensor: object, recompute: str) -> None:
    """Refuse chunks that no layout can compute; UsageError."""
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise UsageError(f"run.shard: chunks must be a number of chunks of a sequence, 1 or more; it is {chunks!r}")
    if chunks == 1:
        return
    for wrong, what, why in (
        (reduction != "ordered", f'reduction="{reduction}"', "adds gradients of chunks up in an order of its own"),
        (experts is not None, f'experts="{experts}"', "sends tokens to ranks that are at other chunks"),
        (tensor is not None, "tensor=", "cuts the same activations: long sequences with tp are not supported"),
        (recompute == "selective", 'recompute="selective"', 'keeps attention of other chunks; "full" does not'),
    ):
        if wrong:
            raise UsageError(f"run.shard: chunks={chunks} does not go with {what}, which {why}; leave one of them out")


def tensors(given: Any) -> list[torch.Tensor]:
    """Return the tensors of a micro-batch's input or target."""
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def length_of(given: Any) -> int:
    """Return the length of the sequences of a micro-batch's input; ModelError if it has none."""
    for leaf in tensors(given):
        if leaf.dim() > SEQUENCE:
            return leaf.shape[SEQUENCE]
    raise ModelError(
        "run.shard(..., chunks=) cuts sequences, and the input of a micro-batch has no tensor of shape (batch, "
        "sequence, ...); leave chunks= out"
    )


def check_length(length: int, count: int) -> None:
    """Refuse sequences that cannot be cut into so many chunks of two positions at least; ModelError."""
    if length % count or length < 2 * count:
        raise ModelError(
            f"sequences of length {length} cannot be cut into {count} chunks of equal length, two or more each; pad "
            "the samples to a multiple, or give another number as run.shard(..., chunks=), in a new run"
        )


def cut(given: Any, length: int, chunk: int, count: int) -> Any:
    """Return one chunk of a micro-batch's input or target: of every tensor whose dim 1 is the sequence."""
    size = length // count

    def part(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > SEQUENCE and leaf.shape[SEQUENCE] == length:
            return leaf.narrow(SEQUENCE, chunk * size, size)
        return leaf

    return tree_map(part, given)


def check_target(target: Any, length: int) -> None:
    """Refuse a target that belongs to no positions; ModelError."""
    shapes = [tuple(leaf.shape) for leaf in tensors(target)]
    if not any(len(shape) > SEQUENCE and shape[SEQUENCE] == length for shape in shapes):
        raise ModelError(
            f"run.shard(..., chunks=) computes the loss of each chunk by itself, and the target, of shapes {shapes}, "
            f"has none of shape (batch, {length}, ...): give a target for each position, or leave chunks= out"
        )
