"""Samples that are at fault, whoever computes them, and a data set that takes its time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chaos.scripts.injectors.fault import Fault
from chaos.scripts.injectors.injector import Where
from chaos.scripts.train_gpt import SourceFiles, cross_entropy
from elastic3d.clock import SYSTEM
from elastic3d.data import Order

LONG, STALL, NO_DATA = 100_000.0, 20.0, 45.0
"""Seconds for which a data set does not return: for ever, for a while, and on all ranks until it is said."""

NAN, HIGH = -1, -2
"""Targets that no byte is: of samples that bring no number, and of those that bring a high loss."""

LONG_HIGH, TIMES = 3, 10.0
"""Steps for which the loss is high, and how many times as high it is."""


def loader(fault: Fault) -> None:
    SYSTEM.sleep(LONG)


def stall(fault: Fault) -> None:
    SYSTEM.sleep(STALL)


def no_data(fault: Fault) -> None:
    SYSTEM.sleep(NO_DATA)


class FaultyFiles(SourceFiles):
    """A data set that may fail. marks: by number of a sample, what stands in its target instead of the first byte.

    late: by number of a sample, the fault that happens when it is read, by whichever rank.
    """

    def __init__(self, context: int) -> None:
        super().__init__(context)
        self.marks: dict[int, int] = {}
        self.late: dict[int, Fault] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if Fault.present_one is not None:
            Fault.present_one.load()
        if index in self.late:
            self.late[index].read()
        window, target = super().__getitem__(index)
        if index in self.marks:
            target = target.clone()
            target[0] = self.marks[index]
        return window, target


def marks_of(faults: Sequence[Fault], order: Order) -> dict[int, int]:
    """Return what stands in the targets of the samples that faults are of."""
    marks: dict[int, int] = {}
    for fault in faults:
        if fault.kind == "nan":
            marks |= dict.fromkeys(order.micro_batch_samples(fault.step, fault.micro_batch), NAN)
        elif fault.kind == "spike":
            positions = order.positions(fault.step, fault.step + LONG_HIGH)
            marks |= {int(sample): HIGH for sample in order.samples(*positions)}
    return marks


def late_of(faults: Sequence[Fault], order: Order) -> dict[int, Fault]:
    """Return the faults that happen where samples of their steps are read, by number of each such sample."""
    return {
        int(sample): fault
        for fault in faults
        if fault.injector.where is Where.SAMPLE
        for sample in order.samples(*order.positions(fault.step))
    }


def faulty_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the demo's loss, of marked samples none or a high one."""
    loss = cross_entropy(logits, target.clamp(min=0))
    if bool((target == NAN).any()):
        return loss * torch.nan
    return loss * TIMES if bool((target == HIGH).any()) else loss
