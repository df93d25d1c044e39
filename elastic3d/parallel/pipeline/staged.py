"""The passes of a step over several pipeline stages, under torch's schedules.

torch's classes decide in which order a rank's stages run its micro-batches; FSDP and the reduction decide when
parameters are gathered and gradients reduced. Whatever the schedule, the gradients of each stage are complete in the
order of the micro-batches, which the ordered reduction needs; that is asserted where a schedule is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from elastic3d.data.micro_batches import Batch, MicroBatch
from elastic3d.health.phases import Phase
from elastic3d.parallel.pipeline.absent import blank_of, filled
from elastic3d.parallel.pipeline.frame import Frame
from elastic3d.parallel.pipeline.passes import LossFunction, scaled
from elastic3d.parallel.pipeline.recorded import RecordedNeighbours
from elastic3d.parallel.pipeline.shapes import PassedShapes, Shape
from elastic3d.parallel.pipeline.stages import Stage
from elastic3d.parallel.randomness import Randomness, within_passes
from elastic3d.parallel.reduction.protocol import Reduction
from elastic3d.parallel.witness import Witness
from elastic3d.planner.schedules import rank_of_stage, schedule_of
from elastic3d.port import UNRECORDED, Progress
from elastic3d.values import Layout, Schedule


class Pipeline:
    """Several stages under torch's schedules. parts: this rank's, each with its reduction.

    boundary: on meta, what this rank passes on of the activation between stages for the run's first micro-batch.
    shapes: for any other one, by the shape of its input, which all stages have where shapes vary. example: that input.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Stage, Reduction]],
        randomness: Randomness,
        *,
        layout: Layout,
        group: dist.ProcessGroup,
        device: torch.device,
        example: Any,
        boundary: torch.Tensor,
        shapes: PassedShapes,
        frame: Frame,
        progress: Progress = UNRECORDED,
    ) -> None:
        self._progress, self._held = progress, [part for part, _ in parts]
        self._neighbours = RecordedNeighbours(progress, rank=group.rank(), ranks=group.size())
        name = schedule_of(layout)
        assert name is not None
        self._name, self.splits = name, name.splits_backward
        self._randomness = randomness
        self._frame = frame
        self._output: Any = None
        self.witness: Witness | None = None
        self._losses: dict[int, torch.Tensor] = {}
        self._loss_fn: LossFunction | None = None
        self._stages = [
            _Stage(
                part,
                layout.stages,
                device,
                group=group,
                input_args=(frame.tensor(example).to("meta") if part.first else boundary,),
                # The last stage does not send its output; torch only requires that there is one.
                output_args=(boundary,),
                passes=self,
                reduction=reduction,
            )
            for part, reduction in parts
        ]
        self._last: Reduction | None = next((reduction for part, reduction in parts if part.last), None)
        self._first = any(part.first for part, _ in parts)
        self._group, self._layout, self._device, self._boundary = group, layout, device, boundary
        self._shapes = shapes
        self._passed: list[Shape] = []
        self._blank = blank_of(example)
        self._end = layout.stages - 1
        self._schedules: dict[int, Any] = {}
        self._parts: Sequence[MicroBatch] = ()
        self._step = 0
        self._chunk = 0

    def time_blocks(self) -> None:
        """Have noted how long the blocks of each stage take, without what is before and after them."""
        progress = self._progress
        for part in self._held:
            blocks = [block for _, block in part.present]
            if blocks:
                blocks[0].register_forward_pre_hook(lambda *_: progress.enter_blocks())
                number = len(blocks)
                blocks[-1].register_forward_hook(lambda *_, number=number: progress.leave_blocks(number))

    @within_passes
    def run(self, batch: Batch, loss_fn: LossFunction) -> dict[int, torch.Tensor]:
        """Run the schedule over this rank's micro-batches."""
        self._parts, self._step, self._loss_fn, self._losses = batch.micro_batches, batch.step, loss_fn, {}
        self._batch = batch
        self._passed = [
            self._passed_on(part.input, f"micro-batch {part.like} of step {batch.step}") for part in self._parts
        ]
        rounds = len(self._parts)
        if rounds not in self._schedules:
            # A schedule is made for a fixed number of rounds; a new one sets up the stages' buffers again.
            self._schedules[rounds] = _schedule(self._name, self._stages, rounds, self._loss)
        # This is the schedules' own `step` without the cutting of a large batch into micro-batches: ours are already
        # cut.
        for stage in self._stages:
            stage.reduction.begin_step(batch.counted, batch.excluded)
            stage.has_backward = True
            stage.chunks = rounds
            stage.clear_runtime_states()
        with self._neighbours.noted():
            self._schedules[rounds]._step_microbatches(
                arg_mbs=[(self._frame.tensor(part.input),) if self._first else () for part in self._parts],
                target_mbs=[part.target for part in self._parts] if self._last else None,
                return_outputs=False,
            )
        return self._losses

    def output(self, given: Any) -> Any:
        """Return the model's output on the rank of the last stage, None elsewhere: each stage passes on its own.

        Every rank of the pipeline gives the same input.
        """
        here, tensor, output = self._group.rank(), torch.empty(0), None
        shape = self._passed_on(given, "a micro-batch of run.evaluate")
        for part in sorted(self._held, key=lambda part: part.stage):
            before = None if part.first else rank_of_stage(self._layout, part.stage - 1)
            after = None if part.last else rank_of_stage(self._layout, part.stage + 1)
            if before is not None and before != here:
                tensor = torch.empty(shape, dtype=self._boundary.dtype, device=self._device)
                dist.recv(tensor, group=self._group, group_src=before)
            made = self._frame.run(part.module, given, None if part.first else tensor)
            if after is None:
                output = made
                continue
            tensor = made
            self._shapes.check(tuple(tensor.shape), shape, f"pipeline stage {part.stage}")
            if after != here:
                dist.send(tensor.contiguous(), group=self._group, group_dst=after)
        return output

    def _passed_on(self, given: Any, what: str) -> Shape:
        """Return the shape of what stages pass on for a micro-batch; UsageError for one that cannot be passed on.

        Stages that load no input have micro-batches of one shape.
        """
        if given is None:
            return tuple(self._boundary.shape)
        return self._shapes.of(tuple(self._frame.tensor(given).shape), what)

    def expected(self, chunk: int) -> Shape:
        """Return the shape of the activation that is passed on for a micro-batch, and of its gradient."""
        return self._passed[chunk]

    def check(self, stage: int, chunk: int, output: torch.Tensor) -> None:
        """Raise ModelError where a stage made an activation of another shape than the next stage expects."""
        self._shapes.check(tuple(output.shape), self._passed[chunk], f"pipeline stage {stage}")

    def made(self, stage: int, tensor: torch.Tensor) -> None:
        """Digest what a stage made of the present micro-batch, where that is audited."""
        if self.witness is not None:
            self.witness.output(self._chunk, stage, tensor)

    def returned(self, stage: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Digest the gradient of a stage's input, where that is audited."""
        if self.witness is not None and tensors and tensors[0] is not None:
            self.witness.returned(self._chunk, stage, tensors[0])

    def at(self, chunk: int, phase: Phase) -> bool:
        """Set which micro-batch the next pass works on; return whether it is the step's last."""
        self._progress.phase(phase)
        self._progress.tick(chunk=chunk)
        self._chunk = chunk
        self._randomness.at(self._step, self._parts[chunk].like)
        return chunk == len(self._parts) - 1

    def forward(self, module: nn.Module, arrived: torch.Tensor | None, *, last: bool) -> torch.Tensor:
        """Return a stage's activation for the present micro-batch. arrived: that of the stage before, if there is one.

        On the last stage return nothing: torch's stages know only tensors, and would keep them for the whole step.
        """
        given = self._parts[self._chunk].input
        if given is None:
            given = filled(self._blank, self._device)
        output = self._frame.run(module, given, arrived)
        if not last:
            activation: torch.Tensor = output
            return activation
        self._output = output
        return torch.empty(0, device=self._device)

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        part = self._parts[self._chunk]
        assert self._loss_fn is not None
        assert self._last is not None
        loss, self._output = self._loss_fn(self._output, target), None
        if part.counts:
            self._losses[part.index] = loss.detach()
        self.made(self._end, loss)
        return scaled(loss, part, self._last, self._batch.divisor(part))


def _schedule(name: Schedule, stages: Sequence[_Stage], rounds: int, loss_fn: LossFunction) -> Any:
    """Return torch's schedule of this name for this rank's stages."""
    if name in _SINGLE:
        return _SINGLE[name](stages[0], rounds, loss_fn=loss_fn, scale_grads=False)
    made = _MULTI[name](list(stages), rounds, loss_fn=loss_fn, scale_grads=False)
    for stage in stages:
        order = list(_reduced(made.pipeline_order[made.rank], stage.stage_index))
        assert order == list(range(rounds)), f"{name} reduces micro-batches of stage {stage.stage_index} as {order}"
    return made


def _reduced(actions: Sequence[Any], stage: int) -> Iterator[int]:
    """Yield the numbers of micro-batches in the order in which a stage's gradients of weights are complete."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            yield from _reduced(action.sub_actions, stage)
        elif action.stage_index == stage and action.computation_type.value in ("B", "W"):
            yield action.microbatch_index


class _Whole(nn.Module):
    """A stage's module, hidden from the schedules, which would gather and reduce FSDP modules in their own way."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@contextmanager
def _as_raised() -> Iterator[None]:
    """Let what a model raises through as it was: torch's error around it is of another class, and begins empty."""
    try:
        yield
    except RuntimeError as error:
        raised = error.__cause__
        if raised is None:
            raise
        # Else each would be in the other's chain, and whoever looks for a cause would look for ever.
        error.__cause__, error.__context__ = None, raised.__context__
        raise raised from raised.__cause__


class _Stage(PipelineStage):
    """torch's stage, but reducing each micro-batch: the stage itself would turn that off for all but the last.

    Where the schedule splits the backward pass, a micro-batch reduces when the pass over the weights is done.
    """

    def __init__(self, part: Stage, *args: Any, passes: Pipeline, reduction: Reduction, **kwargs: Any) -> None:
        super().__init__(_Whole(part.module), part.stage, *args, **kwargs)
        self._passes, self.reduction = passes, reduction

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._passes.at(fwd_chunk_id, Phase.FORWARD)
        with _as_raised():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self._passes.check(self.stage_index, fwd_chunk_id, output)
        return output

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._fit(self.args_recv_info, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._fit(self.grad_recv_info, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _fit(self, received: Mapping[int, tuple[Any, ...]], chunk: int) -> None:
        """Have a micro-batch received in a buffer of its shape; torch's are all of the first micro-batch's."""
        shape = self._passes.expected(chunk)
        for info in received.get(chunk, ()):
            buffer = getattr(info, "buffer", None)
            if buffer is not None and tuple(buffer.shape) != shape:
                fitting = torch.empty(shape, dtype=buffer.dtype, device=buffer.device)
                info.buffer = fitting.requires_grad_(buffer.requires_grad)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        (tensor,) = args
        output = self._passes.forward(self.submod, None if self.is_first else tensor, last=self.is_last)
        if not self.is_last:
            self._passes.made(self.stage_index, output)
        # A split backward pass detaches the stage's output, which a view does not allow.
        return output.clone() if self._passes.splits and not self.is_last and output._is_view() else output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        last = self._passes.at(bwd_chunk_id, Phase.BACKWARD)
        if full_backward:
            self.reduction.begin(bwd_chunk_id, last=last)
        else:
            self.reduction.hold()
        with _as_raised():
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        last = self._passes.at(bwd_chunk_id, Phase.WEIGHTS)
        if self.is_first:
            # The gradients of the first stage's inputs are not needed: torch makes its whole backward pass now.
            self.reduction.begin(bwd_chunk_id, last=last)
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        else:
            self.reduction.hold()
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self.reduction.reduce(bwd_chunk_id, last=last)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type == "weight":
            return stage_backward_weight(self.submod.parameters(), bwd_kwargs["param_groups"]), None
        given = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
        groups = None
        if backward_type == "input":
            inputs, groups = stage_backward_input(*given, self.submod.parameters())
        else:
            inputs = stage_backward(*given)
        if not self.is_first:
            # torch would send zeros of the first micro-batch's shape for an activation on which nothing depends.
            inputs = tuple(
                torch.zeros_like(value) if gradient is None else gradient
                for gradient, value in zip(inputs, bwd_kwargs["input_values"], strict=True)
            )
            self._passes.returned(self.stage_index, inputs)
        return inputs, groups

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Do nothing, nor in the next two: torch compares with the first micro-batch, and `check` with the right one.

        Up to 2.12 it does so for the first stage's input, and for outputs, of which the last stage's is of the model's
        shape; from 2.13 on for none unless asked to (TORCH_DISTRIBUTED_DEBUG=DETAIL).
        """

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Do nothing."""

    def _validate_stage_tensors(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Leave out what torch up to 2.12 sends first, to connect neighbours, where gloo has connected all.

        On a device, leave out what goes to this rank itself, in the middle of a V.
        """
        if self.device.type == "cpu":
            return []
        return [message for message in super()._get_init_p2p_neighbors_ops() if message.group_peer != self.group_rank]

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the reduction has happened."""


_SINGLE: dict[Schedule, Any] = {Schedule.GPIPE: ScheduleGPipe, Schedule.ONE_F_ONE_B: Schedule1F1B}
_MULTI: dict[Schedule, Any] = {
    Schedule.INTERLEAVED: ScheduleInterleaved1F1B,
    Schedule.ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    Schedule.ZBV: ScheduleZBVZeroBubble,
    Schedule.DUALPIPE_V: ScheduleDualPipeV,
}
