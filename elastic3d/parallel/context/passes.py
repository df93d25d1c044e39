"""The passes of a step whose sequences are cut into chunks: each is passed forward, and back, by itself.

Chunks go forward in turns, from the first to the last, since attention looks back; then backward in the other order. A
micro-batch's gradients and losses are sums over its chunks, added in one order whoever has computed them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic3d.data.micro_batches import Batch, MicroBatch
from elastic3d.health.phases import Phase
from elastic3d.parallel.context import chunks as cutting
from elastic3d.parallel.context.attention import Attention
from elastic3d.parallel.context.losses import check_adds_up, folded
from elastic3d.parallel.foreign import Caller
from elastic3d.parallel.numerics.objective import weighed
from elastic3d.parallel.pipeline.passes import LossFunction
from elastic3d.parallel.randomness import Randomness, within_passes
from elastic3d.parallel.reduction.ordered import Ordered
from elastic3d.parallel.reduction.single_replica import SingleReplica
from elastic3d.parallel.witness import Witness
from elastic3d.port import UNRECORDED, Progress

POSITIONS = ("position_ids", "positions")
"""Parameters of forward that get the positions of a chunk, of shape (1, positions)."""


class ChunkCaller:
    """Calls a model for one chunk of its input."""

    def __init__(self, model: nn.Module) -> None:
        self._caller = Caller(model)
        parameters = inspect.signature(model.forward).parameters
        self._positions = next((name for name in POSITIONS if name in parameters), None)

    def __call__(self, model: nn.Module, given: Any, length: int, chunk: int, count: int) -> Any:
        """Return the output for one chunk of sequences of this length."""
        part = cutting.cut(given, length, chunk, count)
        if self._positions is None or (self._caller.spreads(given) and self._positions in given):
            return self._caller(model, part)
        size = length // count
        device = next(leaf.device for leaf in cutting.tensors(given))
        where = torch.arange(chunk * size, (chunk + 1) * size, device=device).unsqueeze(0)
        return self._caller(model, part, {self._positions: where})

    @property
    def positioned(self) -> bool:
        """Whether the model is given positions."""
        return self._positions is not None

    def whole(self, model: nn.Module, given: Any) -> Any:
        """Return the output for whole sequences."""
        return self._caller(model, given)


class ChunkedLoop:
    """The passes of a single stage, micro-batch after micro-batch and chunk after chunk."""

    def __init__(
        self,
        model: nn.Module,
        reduction: Ordered | SingleReplica,
        randomness: Randomness,
        attention: Attention,
        group: dist.ProcessGroup | None,
        progress: Progress = UNRECORDED,
    ) -> None:
        self._model, self._reduction, self._randomness, self._progress = model, reduction, randomness, progress
        self._attention, self._chunks, self._group = attention, attention.chunks, group
        self._caller = ChunkCaller(model)
        self._tried = False
        self.witness: Witness | None = None

    @within_passes
    def run(self, batch: Batch, loss_fn: LossFunction) -> dict[int, torch.Tensor]:
        """Run this rank's chunks of every micro-batch forward and back."""
        losses = []
        self._reduction.begin_step(batch.counted, batch.excluded, batch.turns)
        for round_, part in enumerate(batch.micro_batches):
            made = self._forward(batch, round_, part, loss_fn)
            losses.append([loss.detach() for loss in made])
            self._backward(batch, round_, part, made)
        self._attention.end()
        self._reduction.end_passes()
        if not losses:
            return {}
        whole = folded(losses, self._chunks, self._group, self._progress)
        return {part.index: loss for part, loss in zip(batch.micro_batches, whole, strict=True) if part.counts}

    def _forward(self, batch: Batch, round_: int, part: MicroBatch, loss_fn: LossFunction) -> list[torch.Tensor]:
        """Return the losses of this rank's chunks."""
        chunks, length = self._chunks, cutting.length_of(part.input)
        cutting.check_length(length, chunks.count)
        cutting.check_target(part.target, length)
        self._attention.begin(length // chunks.count)
        self._progress.phase(Phase.FORWARD)
        losses = []
        for turn in range(chunks.turns):
            chunk = chunks.mine(turn)
            self._progress.tick(chunk=round_)
            self._randomness.at(batch.step, part.like, chunk=chunk)
            with self._attention.turn(turn):
                output = self._caller(self._model, part.input, length, chunk, chunks.count)
            target = cutting.cut(part.target, length, chunk, chunks.count)
            if not self._tried:
                self._tried = True
                check_adds_up(loss_fn, output, target, length // chunks.count)
            losses.append(loss_fn(output, target))
        return losses

    def _backward(self, batch: Batch, round_: int, part: MicroBatch, losses: list[torch.Tensor]) -> None:
        chunks, last = self._chunks, round_ == len(batch.micro_batches) - 1
        self._progress.phase(Phase.BACKWARD)
        for turn in reversed(range(chunks.turns)):
            self._progress.tick(chunk=round_)
            self._randomness.at(batch.step, part.like, chunk=chunks.mine(turn))
            if turn:
                self._reduction.begin_chunk(round_)
            else:
                self._reduction.begin(round_, last=last)
            loss = losses.pop()
            with self._attention.turn(turn, backward=True):
                weighed(loss, batch.divisor(part) * chunks.count).backward()  # type: ignore[no-untyped-call]

    def output(self, given: Any) -> Any:
        """Return the model's output for whole sequences: every rank that shares them computes all of it."""
        return self._caller.whole(self._model, given)
