"""Mains of runs that are audited, on some of whose ranks the device computes wrongly."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic3d.admission import devices
from elastic3d.training import Run
from tests.data.streams import Stateful
from tests.parallel import tensors
from tests.parallel.models import Block, Model, Sentences, loss_fn

STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Flip a bit of what a rank computes in one of its blocks.

    what: "output" of the block on the way forward, "input" for its input's gradient, "weight" for a weight's, "part"
    for what the rank computes of a layer that is cut. step: the first in which it happens. passes: how many of the
    block's passes from then on are wrong. skip: those before.
    fresh: flip another bit each time.
    """

    rank: int
    what: str = "output"
    step: int = 1
    passes: int = 1
    skip: int = 0
    block: int = 0
    fresh: bool = False


def train(
    run: Run,
    *,
    flips: Sequence[Flip] = (),
    leaf: int = 1,
    micro_batches: int = 8,
    stream: bool = False,
    multiplies_wrongly: int = -1,
    dies: int = -1,
    steps: int = STEPS,
) -> str:
    """Train the small model, with some blocks that are wrong; return the digest.

    multiplies_wrongly: a rank whose device errs in every product of matrices that is not the model's. dies: a rank that
    dies when a hearing begins.
    """
    if run.rank == multiplies_wrongly:
        devices._multiply = lambda one, other: (one @ other).add_(1)
    model = run.shard(lambda: Model(), blocks="blocks", seed=3, leaf=leaf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data: Any = Stateful() if stream else Sentences()
    batches = run.batches(data, global_batch=2 * micro_batches, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    if run.rank == dies:
        run._health._auditor._hear = lambda *given: os._exit(1)  # type: ignore[union-attr, method-assign]
    made = [_Wrong(flip, model) for flip in flips if flip.rank == run.rank]
    for batch in batches.until(step=steps):
        for wrong in made:
            wrong.at(batch.step)
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    # With this budget each step is audited.
    assert run._health.clean in (None, steps - 1)
    return run.digest()


def train_cut(run: Run, *, flips: Sequence[Flip] = (), micro_batches: int = 4) -> str:
    """Train a model whose layers are cut over ranks, with some blocks that are wrong; return the digest."""
    model = run.shard(tensors.Decoder, blocks="blocks", tensor=tensors.SEQUENCE, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Sentences(tensors.VOCABULARY, tensors.LENGTH)
    batches = run.batches(data, global_batch=2 * micro_batches, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    made = [_Wrong(flip, model) for flip in flips if flip.rank == run.rank]
    for batch in batches.until(step=STEPS):
        for wrong in made:
            wrong.at(batch.step)
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    assert run._health.clean in (None, STEPS - 1)
    return run.digest()


def train_without_bits(run: Run) -> str:
    """Train with a loss that no two passes come to alike, as atomic additions on a device may make it."""
    model = run.shard(lambda: Model(), blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    number = itertools.count(run.rank * 1000)

    def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_fn(output, target) * (1 + 1e-3 * next(number))

    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, noisy))
    return run.digest()


class Counted:
    """A clock that goes on with each micro-batch alone: by a second, and by more for those beyond a step's own."""

    def __init__(self, own: int, more: float) -> None:
        self._own, self._more, self._made, self._now = own, more, 0, 0.0

    def begin(self) -> None:
        """Begin another step."""
        self._made = 0

    def pass_on(self) -> None:
        """Let the time of a micro-batch pass."""
        self._made += 1
        self._now += 1.0 if self._made <= self._own else self._more

    def monotonic(self) -> float:
        """Return the seconds that have passed."""
        return self._now

    def wall(self) -> float:
        """Return the same."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let them pass."""
        self._now += seconds


def train_dearly(run: Run, *, steps: int) -> str:
    """Train where a micro-batch that audits repeat takes as long as three and a fifth of a step; return the digest."""
    model = run.shard(lambda: Model(), blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=16, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    clock = Counted(own=4, more=3.2)
    if run._health._auditor is not None:
        run._health._auditor._clock = clock

    def timed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        clock.pass_on()
        return loss_fn(output, target)

    for batch in batches.until(step=steps):
        clock.begin()
        run.step(optimizer, loss=run.backward(model, batch, timed), clip=0.5)
    return run.digest()


def train_fast(run: Run) -> None:
    """Train with the backend's own sums, which nobody can audit."""
    model = run.shard(lambda: Model(), blocks="blocks", seed=3, reduction="fast")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=2):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))


class _Wrong:
    """One block of this rank that computes wrongly, counting its passes."""

    def __init__(self, flip: Flip, model: nn.Module) -> None:
        self._flip, self._due, self._passes = flip, False, 0
        block = model.get_submodule(f"blocks.{flip.block}")
        assert isinstance(block, Block | tensors.Block)
        match flip.what:
            case "part":
                block.up.register_forward_hook(lambda module, given, output: self._wrong(output))
            case "output":
                block.register_forward_hook(lambda module, given, output: self._wrong(output))
            case "input":
                assert isinstance(block, Block)
                block.norm.register_full_backward_hook(lambda module, into, out: (self._wrong(into[0]),))
            case _:
                block.down.register_forward_pre_hook(self._hook_weight)

    def at(self, step: int) -> None:
        """Be due from its step on."""
        self._due |= step >= self._flip.step

    def _hook_weight(self, module: Any, given: Any) -> None:
        module.weight.register_hook(self._wrong)

    def _wrong(self, tensor: torch.Tensor) -> torch.Tensor:
        number = self._passes
        self._passes += self._due
        if not self._due or not self._flip.skip <= number < self._flip.skip + self._flip.passes:
            return tensor
        bit = 12 + (number % 8 if self._flip.fresh else 0)
        changed = tensor.detach().clone()
        changed.view(-1)[:1].view(torch.int32)[0] ^= 1 << bit
        return tensor + (changed - tensor.detach())
