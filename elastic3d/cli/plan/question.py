"""A question to the planner from the command line, checked and put together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from elastic3d.errors import UsageError
from elastic3d.planner.costs import Costs
from elastic3d.planner.described import Optimizer, Training, describe
from elastic3d.planner.devices import DataSheet, Number
from elastic3d.planner.shapes import RecomputedShare, shape_named
from elastic3d.values import Layout, ModelProfile

Choice = TypeVar("Choice", bound=StrEnum)
BATCH = 512
"""Samples of a step of a described model, unless given."""

MOST_DEVICES = 1 << 17

MOST_SLOW = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which layout for this model on these nodes? model, device: as a person calls them.

    slow: by number in rank order, nodes whose work takes so many times as long.
    """

    model: str
    profile: ModelProfile
    nodes: int
    slots: int
    device: str
    costs: Costs
    request: Layout
    slow: dict[int, float] = field(default_factory=dict)

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speed of each node in rank order, as planners take it; () while all are alike."""
        return tuple(1.0 / self.slow.get(node, 1.0) for node in range(self.nodes)) if self.slow else ()

    @property
    def again(self) -> float:
        """Forwards of a block that its backward computes once more."""
        kept = self.profile.block.kept.get(self.profile.recompute)
        return kept.again / self.profile.block.flops if kept is not None and self.profile.block.flops else 0.0


def choose(kind: type[Choice], option: str, name: str) -> Choice:
    """Return one of the choices of an option; UsageError listing them for any other name."""
    try:
        return kind(name.lower())
    except ValueError:
        raise UsageError(f"{option} {name!r}: choose one of {', '.join(kind)}") from None


def check_size(nodes: int, slots: int) -> None:
    """Refuse clusters that have no device, or more than any real one."""
    if nodes < 1 or slots < 1:
        raise UsageError(f"--nodes {nodes} --slots {slots}: a cluster has at least one node of one slot")
    if nodes * slots > MOST_DEVICES:
        raise UsageError(f"--nodes {nodes} --slots {slots}: at most {MOST_DEVICES} devices can be planned")


def slow_nodes(given: Sequence[str], nodes: int) -> dict[int, float]:
    """Return what `--slow NODE=TIMES` says; UsageError for a node that is not there, or one that is not slow."""
    slow: dict[int, float] = {}
    for text in given:
        match = re.fullmatch(r"(?:node)?([0-9]{1,6})=([0-9]+(?:\.[0-9]*)?)", text.strip())
        if match is None or not 1.0 < float(match[2]) <= MOST_SLOW:
            raise UsageError(
                f"--slow {text!r}: give a node's number and how many times as long its work takes, above 1 and at most "
                f"{MOST_SLOW:g}, as in --slow 2=1.3"
            )
        if int(match[1]) >= nodes or int(match[1]) in slow:
            raise UsageError(f"--slow {text!r}: nodes are numbered from 0 to {nodes - 1}, and each is given once")
        slow[int(match[1])] = float(match[2])
    return slow


def requested(text: str) -> Layout:
    """Return the request of `--layout`: what it names is fixed, the planner chooses all else."""
    free = Layout(tp=0, cp=0, zero=0, replicas=0)
    if not text:
        return free
    asked = Layout.parse(text)
    named = {part.partition("=")[0].strip() for part in text.split(",")}
    return dataclasses.replace(free, **{name: getattr(asked, name) for name in named})


def number_for(sheet: DataSheet, precision: str) -> Number:
    """Return the format of products: as asked, else the first of bf16, fp16 and fp32 that the device has."""
    if precision:
        return choose(Number, "--precision", precision)
    return next(number for number in (Number.BF16, Number.FP16, Number.FP32) if number in sheet.peak)


def described(
    name: str,
    *,
    number: Number,
    global_batch: int | None,
    micro_batch: int | None,
    context: int | None,
    recompute: str,
    optimizer: str,
    chunks: int = 1,
) -> ModelProfile:
    """Return the profile of a named model; None stands for the default."""
    shape = shape_named(name)
    if context is not None:
        if context < 1:
            raise UsageError(f"--context {context}: a sample has at least one token")
        shape = dataclasses.replace(shape, context=context)
    if chunks < 1 or shape.context % chunks:
        raise UsageError(f"--chunks {chunks}: samples of {shape.context} tokens cannot be cut into so many equal parts")
    training = Training(
        global_batch=BATCH if global_batch is None else global_batch,
        micro_batch=1 if micro_batch is None else micro_batch,
        number=number,
        optimizer=choose(Optimizer, "--optimizer", optimizer),
        recompute=choose(RecomputedShare, "--recompute", recompute),
    )
    return dataclasses.replace(describe(shape, training), chunks=chunks)
