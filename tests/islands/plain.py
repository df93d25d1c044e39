"""Islands once more, from the records alone: plain loops of torch in one process, without any part of elastic3d's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import torch

from checkpointing.format.tiles import digest
from checkpointing.interchange.tensors import buffer_of
from elastic3d.data import Order
from elastic3d.islands.fragments import fragments_of
from elastic3d.islands.record import Sealed
from elastic3d.parallel.digest import combine
from elastic3d.parallel.state import held_by_model, held_by_optimizer, specification
from tests.islands import mains
from tests.parallel.models import Sentences, loss_fn


def replayed(
    records: Iterable[Sealed],
    *,
    lr: float = 0.7,
    mu: float = 0.9,
    every: int = mains.EVERY,
    fragments: int = 1,
    overlap: int = 0,
    mixing: float = 0.0,
) -> dict[str, tuple[str, str]]:
    """Return (digest of weights, of weights and inner optimizer) of each member of the last record but one.

    Those of which the last record merged the work, as after it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _replayed(list(records), lr, mu, every, fragments, overlap, mixing)
    finally:
        torch.set_num_threads(threads)


def _replayed(
    records: list[Sealed], lr: float, mu: float, every: int, fragments: int, overlap: int, mixing: float
) -> dict[str, tuple[str, str]]:
    torch.manual_seed(mains.SEED)
    first = mains.build()
    anchors = {name: one.detach().clone() for name, one in first.named_parameters()}
    momenta = {name: torch.zeros_like(one) for name, one in anchors.items()}
    islands: dict[str, Any] = {}
    specs = [specification(name, one) for name, one in anchors.items()]
    homes, period = fragments_of(specs, fragments), every // fragments
    for before, record in itertools.pairwise(records):
        for island in before.admitted:
            model = copy.deepcopy(first)
            optimizer, schedule = mains.tools(model)
            for _ in range(before.outer * period):
                schedule.step()
            with torch.no_grad():
                for name, one in model.named_parameters():
                    one.copy_(anchors[name])
            islands[island] = model, optimizer, schedule
        deltas = []
        for sent in record.merged:
            model, optimizer, schedule = islands[sent.island]
            start = before.members[sent.island] * period
            stop = start + period
            _steps(model, optimizer, schedule, range(start, stop - overlap))
            deltas.append({name: anchors[name] - one.detach() for name, one in model.named_parameters()})
            _steps(model, optimizer, schedule, range(stop - overlap, stop))
        for name, anchor in anchors.items():
            if not deltas or homes[name] != (record.outer - 1) % fragments:
                continue
            gradient = deltas[0][name].clone()
            for delta in deltas[1:]:
                gradient = gradient + delta[name]
            gradient = gradient / len(deltas)
            if mu:
                momenta[name] = momenta[name] * mu + gradient
                gradient = gradient + momenta[name] * mu
            anchors[name] = anchor - gradient * lr
        with torch.no_grad():
            for sent in record.merged:
                for name, one in islands[sent.island][0].named_parameters():
                    if homes[name] == (record.outer - 1) % fragments:
                        one.copy_(one * mixing + anchors[name] * (1 - mixing) if mixing else anchors[name])
    return {one.island: _digests(*islands[one.island][:2]) for one in records[-1].merged}


def _steps(model: Any, optimizer: Any, schedule: Any, steps: range) -> None:
    order = Order(
        length=len(Sentences()),
        global_batch=mains.GLOBAL_BATCH,
        micro_batch=mains.MICRO_BATCH,
        seed=mains.DATA_SEED,
    )
    data, count = Sentences(), mains.GLOBAL_BATCH // mains.MICRO_BATCH
    for step in steps:
        start = step * mains.GLOBAL_BATCH
        for index in range(count):
            at = start + index * mains.MICRO_BATCH
            pairs = [data[int(sample)] for sample in order.samples(at, at + mains.MICRO_BATCH)]
            inputs, targets = (torch.stack(parts) for parts in zip(*pairs, strict=True))
            (loss_fn(model(inputs), targets) / count).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)


def _digests(model: Any, optimizer: Any) -> tuple[str, str]:
    def of(held: Iterable[Any]) -> str:
        return combine(
            {one.spec.key: digest(one.spec, one.spec.box, buffer_of(one.local.contiguous())) for one in held}
        )

    weights = list(held_by_model(model))
    return of(weights), of([*weights, *held_by_optimizer(model, optimizer)])
