"""Numbered data sets and runs over them, for the tests of strata and mixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from elastic3d.data import Batches, Growing, Share
from elastic3d.data.ledger import Ledger, add
from elastic3d.data.positions import fold_sums


class Numbers:
    """`length` samples (number + start, its double), which say their numbers."""

    def __init__(self, length: int, start: int = 0, fingerprint: str = "") -> None:
        self.length, self.start, self.fingerprint = length, start, fingerprint

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= number < self.length:
            raise IndexError(number)
        return torch.tensor(number + self.start), torch.tensor(2 * (number + self.start))


def trained(
    make: Callable[[], Any],
    *,
    dp: int,
    global_batch: int | Growing,
    micro_batch: int,
    steps: Iterable[int],
    seed: int = 5,
) -> tuple[list[list[int]], Ledger]:
    """Return what the micro-batches that count have in each step over all dp ranks, in their order, and the ledger."""
    wanted = list(steps)
    seen: dict[tuple[int, int], list[int]] = {}
    voted = {step: [0, 0] for step in wanted}
    for index in range(dp):
        share = Share(dp=dp, index=index)
        one = Batches(make(), global_batch=global_batch, micro_batch=micro_batch, seed=seed, share=share)
        one.step = wanted[0]
        for batch in one.until(step=wanted[-1] + 1):
            for part in batch.micro_batches:
                assert torch.equal(part.target, 2 * part.input)
                if part.counts:
                    seen[batch.step, part.index] = part.input.tolist()
            voted[batch.step][0] += batch.samples
            voted[batch.step][1] += batch.sample_sum
            one.step += 1
    ledger: Ledger = ()
    for step, (samples, total) in voted.items():
        ledger = add(ledger, generation=1, step=step, layout="", samples=samples, sample_sum=fold_sums([total]))
    return [[sample for key in sorted(seen) if key[0] == step for sample in seen[key]] for step in wanted], ledger
