"""Evaluate the demo's model by the run, and by hand beside it: evaluate_gpt.py SAMPLES PAIRS OUT LAYOUT, for
`chaos.bench.evaluations`.

By hand means: micro-batch j is passed by rank j % world through a copy of its own of the whole model, which is torch's
alone, without a collective.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset

import elastic3d
from chaos.scripts.train_gpt import GPT, SourceFiles, arguments
from elastic3d.clock import SYSTEM

DEMO = arguments([])


def losses(logits: Tensor, target: Tensor) -> Tensor:
    """Return each sample's mean loss."""
    each = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return each.view(target.shape).mean(1)


def built() -> GPT:
    """Return the demo's model, with the same weights each time."""
    torch.manual_seed(17)
    return GPT(width=DEMO.width, blocks=DEMO.blocks, context=DEMO.context)


def by_hand(model: nn.Module, data: Subset[tuple[Tensor, Tensor]], rank: int, world: int) -> float:
    """Return the sum of this rank's losses."""
    total, size = 0.0, DEMO.micro_batch
    model.eval()
    with torch.no_grad():
        for first in range(rank * size, len(data), world * size):
            inputs, targets = zip(*(data[index] for index in range(first, first + size)), strict=True)
            total += losses(model(torch.stack(inputs)), torch.stack(targets)).double().sum().item()
    return total


class Passes:
    """How long the passes of a model take. seconds: of the processor, in all."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = self._began = 0.0
        model.register_forward_pre_hook(self._begin, prepend=True)  # before what gathers parameters
        model.register_forward_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._began = time.process_time()

    def _end(self, *_: object) -> None:
        self.seconds += time.process_time() - self._began


def timed(what: Callable[[], float], passes: Passes) -> tuple[float, float, float, float]:
    """Return what it returns, and the seconds that it took: of the processor, of that in passes, and of the clock."""
    within, processor, began = passes.seconds, time.process_time(), SYSTEM.monotonic()
    value = what()
    ended, spent = SYSTEM.monotonic(), time.process_time() - processor
    return value, spent, passes.seconds - within, ended - began


def main(run: elastic3d.Run) -> None:
    """Evaluate, in turns."""
    number, pairs, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    model = run.shard(built, blocks="blocks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data, plain = Subset(SourceFiles(DEMO.context), range(number)), built()
    batches = run.batches(data, global_batch=DEMO.global_batch, micro_batch=DEMO.micro_batch, seed=17)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    ways: dict[str, Callable[[], float]] = {
        "run": lambda: run.evaluate(model, data, losses),
        "hand": lambda: by_hand(plain, data, run.rank, run.world),
    }
    passes = {"run": Passes(model), "hand": Passes(plain)}
    taken: list[dict[str, tuple[float, float, float, float]]] = []
    for pair in range(pairs + 1):
        order = list(ways) if pair % 2 else list(reversed(ways))
        taken.append({})
        for name in order:
            run.all_reduce(0)  # so that all ranks begin together
            taken[-1][name] = timed(ways[name], passes[name])
    written = out / f"{run.rank}.part"
    written.write_text(json.dumps(taken[1:]))  # the first pair builds what later ones reuse
    os.replace(written, out / f"{run.rank}.json")


if __name__ == "__main__":
    elastic3d.run(main, layout=elastic3d.Layout.parse(sys.argv[4]), snapshot_every=0)
