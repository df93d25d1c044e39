"""Mains and models for the tests of precision, loss scale, token weights and recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from elastic3d.data import Growing
from elastic3d.parallel.reduction.lanes import Lane, Lanes
from elastic3d.training import Run
from tests.parallel.models import Model, Plain, PlainBlock, Sentences, loss_fn

PADDING = -100


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of a main: digest, losses, names and dtypes of the state, and compute dtypes of the blocks."""

    digest: str
    losses: tuple[float, ...]
    skipped: tuple[bool, ...]
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    seen: tuple[str, ...] = ()


def train(
    run: Run,
    build: Callable[[], nn.Module] = Model,
    data: Dataset[Any] | None = None,
    *,
    steps: int = 3,
    clip: float | None = 0.5,
    loss: Any = loss_fn,
    size: int | Growing = 14,
    **choices: Any,
) -> Trained:
    """Train a small model with AdamW and, unless `size` says otherwise, 7 micro-batches a step."""
    model = run.shard(build, blocks="blocks", seed=3, **choices)
    seen: list[str] = []
    for block in model.get_submodule("blocks").children():
        if any(True for _ in block.parameters()):
            block.register_forward_hook(lambda module, args, output: seen.append(str(output.dtype)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(data or Sentences(), global_batch=size, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    losses, skipped = [], []
    for batch in batches.until(step=steps):
        made = run.backward(model, batch, loss)
        run.step(optimizer, loss=made, clip=clip)
        losses.append(made.value)
        skipped.append(made.skipped)
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    return Trained(
        digest=run.digest(),
        losses=tuple(losses),
        skipped=tuple(skipped),
        names=tuple(name for name, _ in model.named_parameters()),
        dtypes=tuple(sorted({str(t.dtype) for t in tensors})),
        seen=tuple(sorted(set(seen))),
    )


def train_fp32(run: Run) -> Trained:
    """Train as the model is built."""
    return train(run)


def train_bf16(run: Run) -> Trained:
    """Train in bf16 over fp32 parameters, with dropout, clipping and parameters used sometimes or never."""
    return train(run, precision="bf16")


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i is five points made from i, and a class for each."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        return torch.randn(5, 3, generator=made), torch.randint(0, 4, (5,), generator=made)


class PromotingBlock(PlainBlock):
    """A block with a buffer, which is not cast: its output is fp32."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("weights", torch.linspace(0.9, 1.1, width))

    def forward(self, x: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, places) * self.weights


class Head(nn.Linear):
    """A head that takes any dtype."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.to(self.weight.dtype))


class Promoting(Plain):
    """Floating-point inputs, and blocks whose output has another dtype than their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 6)  # type: ignore[assignment]
        self.blocks = nn.ModuleList(PromotingBlock(6) for _ in range(3))
        self.head = Head(6, 4)


def train_promoting(run: Run) -> Trained:
    """Train the model whose boundaries are of another dtype than its parameters."""
    return train(run, Promoting, Points(), precision="bf16")


def train_full(run: Run) -> Trained:
    """Train with whole blocks recomputed."""
    return train(run, recompute="full")


def train_selective(run: Run) -> Trained:
    """Train with all but the products recomputed."""
    return train(run, recompute="selective")


def train_selective_bf16(run: Run) -> Trained:
    """Train with all but the products recomputed, in bf16."""
    return train(run, recompute="selective", precision="bf16")


def steep(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss whose scaled gradients overflow fp16 until the scale has come down."""
    return loss_fn(output, target) * 1000.0


def train_fp16(run: Run) -> Trained:
    """Train in fp16 over steps that overflow at first, without clipping: the vote has no norm to go by."""
    return train(run, loss=steep, steps=9, clip=None, precision="fp16")


def train_fp16_clipped(run: Run) -> Trained:
    """The same with clipping."""
    return train(run, loss=steep, steps=9, precision="fp16")


class Lines(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i has 1 to 5 targets; places beyond are padding."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = Sentences()[index]
        targets = targets.clone()
        targets[1 + index % 5 :] = PADDING
        return tokens, targets


def token_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross entropy over the valid targets, and their number."""
    total = nn.functional.cross_entropy(
        output.flatten(0, 1).float(), target.flatten(), ignore_index=PADDING, reduction="sum"
    )
    return total, (target != PADDING).sum()


class Smooth(Plain):
    """A model without dropout, whose loss is a smooth function of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


def train_tokens(run: Run) -> Trained:
    """Train on lines of different lengths, each token with the same weight."""
    return train(run, Smooth, Lines(), loss=token_loss)


def train_tokens_fp16(run: Run) -> Trained:
    """The same in fp16, with recomputation."""
    return train(run, data=Lines(), loss=token_loss, precision="fp16", recompute="full")


class Tied(Model):
    """Input and output share one table."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class TiedPlain(Plain):
    """The same, of modules that run on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def train_tied(run: Run) -> Trained:
    """Train a model whose ends share a parameter."""
    return train(run, Tied)


def train_tied_bf16(run: Run) -> Trained:
    """The same in bf16, with recomputation."""
    return train(run, Tied, precision="bf16", recompute="selective")


def train_tied_large(run: Run) -> Trained:
    """The same for a model said to be too large to be built whole."""
    return train(run, TiedPlain, whole_below=0)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The result of a main, the bytes of each exchange of pieces, and the size of the buffers they went through."""

    trained: Trained
    exchanges: tuple[int, ...]
    buffers: int


def train_sent(run: Run, *, bound: int | None = None, **choices: Any) -> Sent:
    """Train with a bound of the buffers of pieces, and count what is sent through them."""
    exchanges: list[int] = []
    lanes: list[Lane] = []
    made, exchange = Lane.__init__, Lane.exchange

    def noted(lane: Lane, *given: Any) -> None:
        made(lane, *given)
        lanes.append(lane)

    def counted(lane: Lane, out: torch.Tensor, *rest: Any) -> None:
        exchanges.append(out.nbytes)
        exchange(lane, out, *rest)

    Lane.__init__, Lane.exchange = noted, counted  # type: ignore[method-assign]
    Lanes.bound = bound or Lanes.bound
    trained = train(run, **choices)
    return Sent(trained=trained, exchanges=tuple(exchanges), buffers=max((lane.held for lane in lanes), default=0))
