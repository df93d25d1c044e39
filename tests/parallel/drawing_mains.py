"""Mains whose model draws from the global random numbers of Python and numpy, besides torch's."""

from __future__ import annotations

import random
import threading

import numpy as np
import torch
from torch import nn

from elastic3d.training import Run

WIDTH, BLOCKS, STEPS = 8, 4, 3


class Masked(nn.Module):
    """Leaves out random numbers of its input and, now and then, itself, as models of speech do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.linear.weight += torch.from_numpy(np.random.standard_normal((WIDTH, WIDTH)).astype(np.float32)) / 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.from_numpy((np.random.random_sample(WIDTH) < 0.8).astype(np.float32))
        return x + self.linear(x * kept).tanh() * (2.0 if random.random() < 0.5 else 1.0)


class Stack(nn.Module):
    """Blocks that draw, between layers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Masked() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Plain(Stack):
    """The same without what draws."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i is made from i."""

    def __len__(self) -> int:
        return 1 << 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.randn(1, generator=generator)


def error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().squeeze(1)


def train(
    run: Run, *, recompute: str = "none", own: int = 0, evaluates: bool = False
) -> tuple[str, list[float], list[float]]:
    """Train; return the digest, the losses, and the values of evaluations before and after each step.

    own: numbers that the script draws itself between two steps.
    """
    random.seed(run.rank)
    np.random.seed(run.rank)
    model = run.shard(Stack, blocks="blocks", seed=3, recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Numbers(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    losses, values = [], []
    held_out = [Numbers()[number] for number in range(1000, 1011)]
    for batch in batches.until(step=STEPS):
        for _ in range(own):
            random.random(), np.random.random_sample()
        if evaluates:
            values.append(run.evaluate(model, held_out, error))
        loss = run.backward(model, batch, lambda output, target: error(output, target).mean())
        run.step(optimizer, loss=loss, clip=0.5)
        losses.append(loss.item())
        if evaluates:
            values.append(run.evaluate(model, held_out, error))
    return run.digest(), losses, values


class Uncertain(nn.Linear):
    """Draws in evaluations that a script wants to tell how sure the model is."""

    draws = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = super().forward(x)
        if self.training or Uncertain.draws:
            change = nn.functional.dropout(change) * random.random() * np.random.random()
        return x + change


class UncertainStack(Stack):
    """Blocks that draw in training, and in some evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Uncertain(WIDTH, WIDTH) for _ in range(BLOCKS))


def evaluate_at_times(run: Run, *, draws: tuple[bool, ...]) -> tuple[list[float], list[tuple[float, ...]], int]:
    """Evaluate once for each of `draws`, after each step.

    Return the values, what the script drew itself after each, and how often the last evaluation seeded.
    """
    model = run.shard(UncertainStack, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Numbers(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    values: list[float] = []
    own: list[tuple[float, ...]] = []
    seeds = 0
    held_out = [Numbers()[number] for number in range(1000, 1011)]
    assembly = run._assembly
    assert assembly is not None
    device = assembly.mesh.computes_on
    seed = device.seed

    def counted(number: int) -> None:
        nonlocal seeds
        seeds += 1
        seed(number)

    for batch, Uncertain.draws in zip(batches.until(step=len(draws)), draws, strict=True):
        loss = run.backward(model, batch, lambda output, target: error(output, target).mean())
        run.step(optimizer, loss=loss, clip=0.5)
        for begin in (torch.manual_seed, random.seed, np.random.seed):
            begin(7)
        seeds, device.seed = 0, counted
        values.append(run.evaluate(model, held_out, error))
        device.seed = seed
        own.append((torch.rand(()).item(), random.random(), np.random.random()))
    return values, own, seeds


class Told(Numbers):
    """Notes which thread makes the first sample of each step."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.threads.append(threading.current_thread().name)
        return super().__getitem__(index)


def who_makes_samples(run: Run, *, draws: bool = False) -> tuple[list[str], set[str], bool]:
    """Return the threads that make the samples of two steps, and those of the others; and if the state stays."""
    model = run.shard(Stack if draws else Plain, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Told()
    batches = run.batches(data, global_batch=2, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    data.threads.clear()
    state = random.getstate()
    for batch in batches.until(step=6):
        run.step(optimizer, loss=run.backward(model, batch, lambda output, target: error(output, target).mean()))
    return data.threads[:4:2], set(data.threads[4:]), random.getstate() == state
