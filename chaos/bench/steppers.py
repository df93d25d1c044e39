"""What makes the timed steps: a run of ours, and what a person would write with torch alone.

By hand means as torchtitan does it: `fully_shard` on each block and the model, parameters whole within a step,
gradients added up locally and reduced with the last micro-batch, torch's own pipeline stages, schedules and clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from chaos.bench.gpt import GPT, Sentences, loss_fn
from elastic3d.training import Run
from elastic3d.training.standalone import StandalonePort
from elastic3d.values import Layout

MICRO_BATCH = 2
RATE = 1e-3
CLIP = 1.0

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, and how. reduction: "" for torch by hand. rounds: micro-batches of each dp rank per step."""

    layout: Layout
    reduction: str
    rounds: int
    width: int
    depth: int
    clip: bool = False


def stepper(task: Task, rank: int, port: int) -> Step:
    """Return what makes one step on this rank of the world that meets at a TCPStore's port."""
    return _ours(task, rank, port) if task.reduction else _by_hand(task, rank, port)


def _ours(task: Task, rank: int, port: int) -> Step:
    host = StandalonePort()
    host.assignment = replace(
        host.assignment,
        rank=rank,
        world=task.layout.world,
        layout=task.layout,
        store_host="127.0.0.1",
        store_port=port,
        store_prefix="bench",
    )
    run = Run(host)
    model = run.shard(lambda: GPT(width=task.width, depth=task.depth), blocks="blocks", reduction=task.reduction)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, foreach=True)
    count = task.rounds * task.layout.dp
    batches = run.batches(Sentences(), global_batch=count * MICRO_BATCH, micro_batch=MICRO_BATCH)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    taken = iter(batches.until(step=1 << 30))

    def step() -> None:
        run.step(optimizer, loss=run.backward(model, next(taken), loss_fn), clip=CLIP if task.clip else None)

    return step


def _by_hand(task: Task, rank: int, port: int) -> Step:
    torch.set_num_threads(1)
    layout = task.layout
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore("bench", store), rank=rank, world_size=layout.world)
    mesh = init_device_mesh("cpu", (layout.pp, layout.dp), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    torch.manual_seed(0)
    model = GPT(width=task.width, depth=task.depth)
    if layout.pp > 1:
        _cut(model, stage, layout.pp)
    if layout.dp > 1:
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, foreach=True)
    data = _batches(task, mesh.get_local_rank("dp"))

    def update() -> None:
        if task.clip:
            _clip(model, mesh["pp"].get_group() if layout.pp > 1 else None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if layout.pp == 1:

        def step() -> None:
            inputs, targets = next(data)
            for number, (x, y) in enumerate(zip(inputs, targets, strict=True)):
                last = number == task.rounds - 1
                if isinstance(model, FSDPModule):
                    model.set_is_last_backward(last)
                    model.set_requires_gradient_sync(last)
                    model.set_reshard_after_backward(last)
                torch.autograd.backward(loss_fn(model(x), y) / task.rounds)
            update()

        return step
    piped = PipelineStage(model, stage, layout.pp, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(piped, task.rounds, loss_fn=loss_fn)

    def piped_step() -> None:
        inputs, targets = next(data)
        whole = (torch.cat(inputs),) if stage == 0 else ()
        schedule.step(*whole, target=torch.cat(targets) if stage == layout.pp - 1 else None)
        update()

    return piped_step


def _cut(model: GPT, stage: int, stages: int) -> None:
    per = len(model.blocks) // stages
    model.blocks = model.blocks[stage * per : (stage + 1) * per if stage < stages - 1 else None]
    if stage:
        model.embedding = None
    if stage < stages - 1:
        model.head = None


def _batches(task: Task, replica: int) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield the inputs and the targets of a step, by micro-batch, taken sample by sample as ours are."""
    data = Sentences()
    at = replica * (len(data) // task.layout.dp)
    while True:
        inputs, targets = [], []
        for _ in range(task.rounds):
            pairs = [data[(at + number) % len(data)] for number in range(MICRO_BATCH)]
            at += MICRO_BATCH
            inputs.append(torch.stack([x for x, _ in pairs]))
            targets.append(torch.stack([y for _, y in pairs]))
        yield inputs, targets


def _clip(model: nn.Module, pipeline: dist.ProcessGroup | None) -> None:
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if pipeline is not None:
        norm = norm**2
        dist.all_reduce(norm, group=pipeline)
        norm = norm**0.5
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
