"""The batches of a run: every rank's micro-batches of each step, as tensors.

The state of the data is the step alone. Micro-batch j of a step belongs to dp rank j % dp, in round j // dp; where dp
does not divide M the last round has places without a micro-batch. Their ranks run some other micro-batch for the sake
of the collectives, marked `counts=False`, and whatever comes of it is dropped by its receiver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from elastic3d.data.positions import Order, fold_sums
from elastic3d.data.sizes import Growing
from elastic3d.errors import UsageError


class Dataset(Protocol):
    """A map-style data set of (input, target) pairs, numbered from 0."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`, the same whenever and wherever it is asked for."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which part of each step's micro-batches one rank computes.

    dp, index: of the data-parallel axis. inputs, targets: whether this rank's pipeline stage needs them at all.
    """

    dp: int = 1
    index: int = 0
    inputs: bool = True
    targets: bool = True

    def rounds(self, micro_batches: int) -> int:
        """Return how many micro-batches each dp rank runs in a step."""
        return -(-micro_batches // self.dp)

    def micro_batches(self, micro_batches: int) -> list[int]:
        """Return the numbers of this rank's micro-batches by round; M and more mark places that do not count."""
        return [round_ * self.dp + self.index for round_ in range(self.rounds(micro_batches))]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch on one rank; input and target are None on stages that need neither.

    index: its number j within the step. counts: False for one that is run for its collectives only.
    """

    index: int
    counts: bool
    input: Any
    target: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's part of one step. samples, sample_sum: what its micro-batches that count really loaded.

    count: number M of the step's micro-batches over all ranks.
    """

    step: int
    count: int
    micro_batches: tuple[MicroBatch, ...]
    samples: int
    sample_sum: int


class Batches:
    """Iterate the steps of a run over a map-style data set; `step` is the number of steps made.

    workers: DataLoader processes that load ahead. They are forked from the trainer when the iteration starts and
    belong to its process group, so whatever ends the trainer ends them.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch: int | Growing,
        micro_batch: int,
        seed: int,
        share: Share | None = None,
        workers: int = 0,
        device: torch.device | None = None,
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UsageError(
                f"run.batches needs a map-style data set, with len() and [index]; {type(dataset).__name__} is not one"
            )
        (_, first), *changes = global_batch.parts if isinstance(global_batch, Growing) else ((0, global_batch),)
        self.order = Order(
            length=len(dataset), global_batch=first, micro_batch=micro_batch, seed=seed, changes=tuple(changes)
        )
        self.dataset = dataset
        self.share = share or Share()
        self.workers = workers
        self.device = device or torch.device("cpu")
        self.step = 0

    def until(self, step: int) -> Iterator[Batch]:
        """Yield this rank's part of each step from the present one to `step`, which is not made any more."""
        loaded = self._loaded(self.step, step)
        while self.step < step:
            before = self.step
            yield self._batch(before, loaded)
            if self.step != before + 1:
                raise UsageError(
                    f"run.step was not called once for the batch of step {before}: each batch is one optimizer step"
                )

    def example(self) -> Any:
        """Return one collated micro-batch (input, target), to learn shapes from; the same on every rank."""
        return self._collate([self.dataset[i] for i in self.order.micro_batch_samples(0, 0)])

    def _loads(self) -> bool:
        return self.share.inputs or self.share.targets

    def _numbers(self, step: int) -> list[int]:
        return self.share.micro_batches(self.order.micro_batches_at(step))

    def _samples(self, step: int, index: int) -> list[int]:
        return self.order.micro_batch_samples(step, index % self.order.micro_batches_at(step))

    def _loaded(self, first: int, stop: int) -> Iterator[Any]:
        wanted = (self._samples(step, index) for step in range(first, stop) for index in self._numbers(step))
        if not self._loads():
            return iter(())
        if not self.workers:
            return (self._collate([self.dataset[i] for i in samples]) for samples in wanted)
        # A generator of its own: the loader draws a seed, and must not draw it from the model's random numbers.
        loader: DataLoader[Any] = DataLoader(
            self.dataset,  # type: ignore[arg-type]
            batch_sampler=_Given(wanted),
            num_workers=self.workers,
            collate_fn=self._collate,
            generator=torch.Generator(),
            multiprocessing_context="fork",
        )
        return iter(loader)

    def _batch(self, step: int, loaded: Iterator[Any]) -> Batch:
        count = self.order.micro_batches_at(step)
        micro_batches, samples = [], 0
        sums: list[int] = []
        for index in self._numbers(step):
            counts = index < count
            inputs = targets = None
            if self._loads():
                inputs, targets = next(loaded)
                inputs = _to(inputs, self.device) if self.share.inputs else None
                targets = _to(targets, self.device) if self.share.targets else None
                if counts:
                    ids = self._samples(step, index)
                    samples += len(ids)
                    sums.append(self.order.keyed_sum(np.array(ids, dtype=np.uint64)))
            micro_batches.append(MicroBatch(index=index, counts=counts, input=inputs, target=targets))
        return Batch(
            step=step,
            count=count,
            micro_batches=tuple(micro_batches),
            samples=samples,
            sample_sum=fold_sums(sums),
        )

    @staticmethod
    def _collate(samples: list[Any]) -> Any:
        pair = default_collate(samples)
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UsageError(
                "each sample of the data set must be a pair (input, target); "
                f"collating gave {type(pair).__name__}" + (f" of {len(pair)}" if isinstance(pair, list | tuple) else "")
            )
        return pair


class _Given(torch.utils.data.Sampler[list[int]]):
    """Hand the sample ids of one micro-batch after the other to a DataLoader."""

    def __init__(self, wanted: Iterator[list[int]]) -> None:
        self._wanted = wanted

    def __iter__(self) -> Iterator[list[int]]:
        return self._wanted


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _to(item, device) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to(item, device) for item in value)
    return value
