"""A metric of a data set, by forward passes alone: spread over the replicas, and the same number in every layout.

The data set is cut into micro-batches of one size in its own order, the last one filled up with its last sample.
Micro-batch j is run by replica j % dp; a replica that has none in the last round runs the last one once more, for the
collectives of the others. So each micro-batch is computed as in any other layout, and the values of its samples have
the same bits. They are added exactly: the sum does not depend on who added which.

Under ZeRO-3 a pass of training lets go of each block's parameters at once, since activations need the room. Here
nothing is kept of a pass, and where the whole of a rank's parameters takes `SHARE` of its room or less, on every rank,
they are gathered once for all micro-batches: to gather them for each takes longer than the passes of a small model do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from fractions import Fraction
from typing import Any

import torch

from elastic3d import environment
from elastic3d.data.collating import Collate, Collating
from elastic3d.data.dataset_facts import is_numbered, name_of
from elastic3d.data.making import Drawn, UndrawnBetween, moved, naming
from elastic3d.errors import UsageError
from elastic3d.parallel.assembly import Assembly
from elastic3d.parallel.reduction.units import kept_whole, reshard
from elastic3d.planner.schedules import rank_of_stage

Metric = Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
"""Takes the output for a micro-batch and its target; returns one value for each sample, or a pair (values, weights)."""

TRIES = 3
"""How often micro-batches are made until they count as drawn: another thread, a logger's, may have drawn meanwhile."""

SHARE = 1 / 8
"""Of the memory that a rank may come to hold, what its parameters may take as a whole, in all ranks of its node."""

TOGETHER = 8
"""Micro-batches whose samples are made, and whose values are added, one after the other, with passes in between: what
Python does between two passes is slow where they have just put all else out of the processor's caches."""

_UNIT = 1074
"""Every double is a whole number of 2 ** -1074."""


class ExactSum:
    """A sum of doubles without rounding. Infinities and NaN are added apart, as floats are."""

    def __init__(self) -> None:
        self._units, self._odd, self._finite = 0, 0.0, True

    def add(self, values: Sequence[float]) -> None:
        """Add some numbers."""
        for value in values:
            if math.isfinite(value):
                number, divisor = value.as_integer_ratio()
                self._units += number << (_UNIT + 1 - divisor.bit_length())
            else:
                self._odd, self._finite = self._odd + value, False

    def to_json(self) -> list[Any]:
        """Return it as JSON holds it."""
        return [self._units, self._odd, self._finite]

    def join(self, plain: Sequence[Any]) -> None:
        """Add another sum, as `to_json` gives it."""
        units, odd, finite = plain
        self._units, self._odd, self._finite = self._units + units, self._odd + odd, self._finite and finite

    def over(self, other: ExactSum) -> float:
        """Return this sum divided by another, rounded once; NaN where there is nothing to divide by."""
        if not (self._finite and other._finite) or not other._units:
            return self._odd / (other._odd or 1.0) if not self._finite and other._finite else math.nan
        try:
            return float(Fraction(self._units, other._units))
        except OverflowError:
            return math.inf if (self._units > 0) == (other._units > 0) else -math.inf


def evaluate(
    assembly: Assembly,
    dataset: Any,
    metric: Metric,
    *,
    micro_batch: int,
    step: int,
    collate: Collate | None,
) -> float:
    """Return the mean of a metric over a data set, the same on every rank; a collective.

    step: the number of steps made, which keys what a forward pass may draw.
    """
    if not is_numbered(dataset) or not len(dataset):
        raise UsageError(
            "run.evaluate needs a map-style data set, with len() and [index], of one sample or more: each replica has "
            "samples of its own"
        )
    mesh, size = assembly.mesh, len(dataset)
    place, layout = mesh.place, mesh.layout
    last = place.pp == rank_of_stage(layout, layout.stages - 1)
    number = -(-size // micro_batch)
    turns = range(place.dp, -(-number // layout.dp) * layout.dp, layout.dp)
    counts = last and not place.tp and not place.cp
    collating = Collating(collate)

    def added(*, seeded: bool) -> list[list[Any]]:
        """Return the sums of this rank's values and weights. seeded: what the model may draw is seeded."""
        total, weight, draws = ExactSum(), ExactSum(), UndrawnBetween() if seeded else None
        for begun in range(0, len(turns), TOGETHER):
            some = turns[begun : begun + TOGETHER]
            indices = [min(turn, number - 1) for turn in some]
            begins = [index * micro_batch for index in indices]
            pairs = moved(made_of(dataset, begins, micro_batch, collating, draws), mesh.device)
            counted: list[_Values] = []
            with assembly.randomness.evaluation() if seeded else nullcontext():
                for round_, (turn, index, (given, target)) in enumerate(zip(some, indices, pairs, strict=True), begun):
                    mesh.progress.tick(chunk=round_)
                    if seeded:
                        assembly.randomness.at(step, index)
                    output = assembly.passes.output(given)
                    if counts and turn < number:
                        counted.append(_checked(metric(output, target), micro_batch, size - index * micro_batch))
            _add(counted, total, weight)
        return [total.to_json(), weight.to_json()]

    with _only_forward(assembly, gathered_once=_has_room(assembly)):
        while True:
            wrong = False
            if assembly.randomness.drawn_in_evaluation is False:
                with assembly.randomness.unseeded_evaluation():
                    sums = added(seeded=False)
                wrong = assembly.randomness.drawn_in_evaluation
            else:
                sums = added(seeded=True)
            ranks = [json.loads(said) for said in mesh.gather(json.dumps([*sums, wrong]).encode())]
            if not any(wrong for *_, wrong in ranks):
                break
    total, weight = ExactSum(), ExactSum()
    for values, weights, _ in ranks:
        total.join(values)
        weight.join(weights)
    return total.over(weight)


def made_of(
    dataset: Any, begins: Sequence[int], micro_batch: int, collating: Collating, draws: UndrawnBetween | None
) -> list[Any]:
    """Return the micro-batches that begin at some samples, filled up with the last.

    draws: notices if they are drawn, which is a UsageError; None where that is noticed later.
    """
    if draws is None:
        return [_made(dataset, first, micro_batch, collating) for first in begins]
    for _ in range(TRIES):
        with suppress(Drawn), draws.around():
            return [_made(dataset, first, micro_batch, collating) for first in begins]
    raise UsageError(
        "run.evaluate: the data set, or collate=, draws from the global random numbers of torch, numpy or Python: "
        "the metric would be another one each time; give it a generator of its own, with a seed by sample"
    )


def _made(dataset: Any, first: int, micro_batch: int, collating: Collating) -> Any:
    numbers = [min(number, len(dataset) - 1) for number in range(first, first + micro_batch)]
    samples, number = [], first
    with naming(lambda: name_of(dataset, number)):
        for number in numbers:
            samples.append(dataset[number])
    return collating.pair(samples, lambda place: name_of(dataset, numbers[place]))


def _has_room(assembly: Assembly) -> bool:
    """Return whether parameters are gathered for each pass of training, and all ranks have room for them as a whole."""
    mesh = assembly.mesh
    if mesh.layout.zero != 3 or mesh.shard is None:
        return False
    parameters = (parameter for part in assembly.parts for parameter in part.module.parameters())
    whole = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    device = mesh.computes_on
    beside = int(environment.LOCAL_WORLD_SIZE.read()) if mesh.device.type == "cpu" else 1
    return all(said == b"1" for said in mesh.gather(b"%d" % (whole * beside <= SHARE * device.room())))


@contextmanager
def _only_forward(assembly: Assembly, *, gathered_once: bool) -> Iterator[None]:
    """Have the model evaluate, and as it was afterwards, without the parameters that it has gathered."""
    modules = {module for part in assembly.parts for module in part.module.modules()} | set(assembly.model.modules())
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad(), kept_whole(unit for units in assembly.units for unit in units if gathered_once):
            yield
    finally:
        for module in training:
            module.training = True
        # The next update changes the shards, and not what was gathered of them.
        for part in assembly.parts:
            reshard(part.module)


_Values = tuple[torch.Tensor, torch.Tensor | None]
"""A metric's values of the samples of a micro-batch that count, and their weights, None for 1 each."""


def _checked(made: Any, micro_batch: int, left: int) -> _Values:
    """Return what a metric made of a micro-batch; UsageError for what is none. left: samples from its first one on."""
    values, weights = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    for one in (values, weights) if weights is not None else (values,):
        if not isinstance(one, torch.Tensor) or one.shape != (micro_batch,) or one.is_complex():
            shape = f"a tensor of shape {list(one.shape)}" if isinstance(one, torch.Tensor) else type(one).__name__
            raise UsageError(
                f"run.evaluate: the metric returned {shape}; it takes a micro-batch of {micro_batch} samples, and "
                "returns a tensor with one real number for each of them, or a pair (values, weights) of such tensors"
            )
    if left < micro_batch:
        values, weights = values[:left], None if weights is None else weights[:left]
    # Copies: a metric may give the same tensor each time.
    return (
        values.to(torch.float64, copy=True),
        None if weights is None else weights.to(torch.float64, copy=True),
    )


def _add(counted: Sequence[_Values], total: ExactSum, weight: ExactSum) -> None:
    """Add values and weights to the sums. Only here a device is waited for."""
    if counted:
        total.add(torch.cat([values for values, _ in counted]).tolist())
        weight.add(torch.cat([torch.ones_like(values) if own is None else own for values, own in counted]).tolist())
