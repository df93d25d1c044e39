"""The passes of a step over several pipeline stages, under torch's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining._backward import stage_backward

from elastic3d.data.batches import Batch, MicroBatch
from elastic3d.parallel.pipeline.frame import Frame
from elastic3d.parallel.pipeline.passes import LossFunction, scaled
from elastic3d.parallel.pipeline.stages import Part
from elastic3d.parallel.randomness import Randomness
from elastic3d.parallel.reduction.protocol import Reduction
from elastic3d.values import Layout


class Pipeline:
    """Several stages under torch's schedules. parts: this rank's, each with its reduction.

    boundary: (shape, dtype) of the activation between stages.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Part, Reduction]],
        randomness: Randomness,
        *,
        layout: Layout,
        group: dist.ProcessGroup,
        device: torch.device,
        example_input: torch.Tensor,
        boundary: torch.Tensor,
        frame: Frame,
    ) -> None:
        self._randomness = randomness
        self._frame = frame
        self._output: Any = None
        self._losses: dict[int, torch.Tensor] = {}
        self._loss_fn: LossFunction | None = None
        self._stages = [
            _Stage(
                part.module,
                part.stage,
                layout.stages,
                device,
                group=group,
                input_args=(example_input if part.first else boundary,),
                # The last stage sends its output to nobody; torch only wants to see that there is one.
                output_args=(boundary,),
                passes=self,
                reduction=reduction,
            )
            for part, reduction in parts
        ]
        self._last: Reduction | None = next((reduction for part, reduction in parts if part.last), None)
        self._first = any(part.first for part, _ in parts)
        self._schedule: Any = None
        self._rounds = 0
        self._count = 0
        self._parts: Sequence[MicroBatch] = ()
        self._step = 0
        self._chunk = 0

    def run(self, batch: Batch, loss_fn: LossFunction) -> dict[int, torch.Tensor]:
        """Run the schedule over this rank's micro-batches."""
        self._parts, self._step, self._loss_fn, self._losses = batch.micro_batches, batch.step, loss_fn, {}
        self._count = batch.count
        if len(self._parts) != self._rounds:
            # A schedule is made for a number of rounds; a new one sets the stages' buffers up anew.
            self._rounds = len(self._parts)
            self._schedule = Schedule1F1B(self._stages[0], self._rounds, loss_fn=self._loss, scale_grads=False)
        # What the schedules' own `step` does, but for cutting one large batch into micro-batches: ours are cut already.
        for stage in self._stages:
            stage.reduction.begin_step(batch.count)
            stage.has_backward = True
            stage.clear_runtime_states()
        self._schedule._step_microbatches(
            arg_mbs=[(self._frame.tensor(part.input),) if self._first else () for part in self._parts],
            target_mbs=[part.target for part in self._parts] if self._last else None,
            return_outputs=False,
        )
        return self._losses

    def at(self, chunk: int) -> bool:
        """Say which micro-batch is worked on; return whether it is the step's last."""
        self._chunk = chunk
        self._randomness.at(self._step, self._parts[chunk].like)
        return chunk == len(self._parts) - 1

    def forward(self, module: nn.Module, tensor: torch.Tensor, *, last: bool) -> Any:
        """Return what a stage makes of what came to it for the micro-batch that is worked on."""
        output = self._frame.run(module, tensor, self._parts[self._chunk].input)
        if last:
            # torch's stages know tensors alone; the loss function gets all that the model returned.
            self._output = output
        return self._frame.pick(output)

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        part = self._parts[self._chunk]
        assert self._loss_fn is not None
        assert self._last is not None
        loss, self._output = self._loss_fn(self._output, target), None
        if part.counts:
            self._losses[part.index] = loss.detach()
        return scaled(loss, part, self._last, self._count)


class _Stage(PipelineStage):
    """torch's stage, but every micro-batch reduces: the stage itself would turn that off for all but the last."""

    def __init__(self, *args: Any, passes: Pipeline, reduction: Reduction, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._passes, self.reduction = passes, reduction

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._passes.at(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        (tensor,) = args
        return self._passes.forward(self.submod, tensor, last=self.is_last)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.reduction.begin(bwd_chunk_id, last=self._passes.at(bwd_chunk_id))
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        gradients = stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
        return gradients, None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the reduction has happened."""
