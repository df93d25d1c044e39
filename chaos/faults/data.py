"""Faults of a data set: it does not return, takes long, or has samples that bring wrong numbers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Self

from chaos.faults.code import NAMED, STUCK
from chaos.faults.fault import Ends, Place
from chaos.faults.moment import When
from chaos.faults.script import InScript, Lasting, about
from elastic3d.errors import UsageError

SLOW = (
    "a node takes 1.15 times as long as others for the same work (`Health(slow=)`), or its data loader, updates, "
    "snapshots or connections lengthen every step as much"
)


LEAST, BACK = 40, 10
"""Steps before a spike that have to be known, and those that are left out for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader(InScript):
    """The data set of a rank does not return."""

    WORD = "loader"
    ABOUT = about(Place.DATA, "the data set's `__getitem__`", NAMED, STUCK, "rank.stuck", 35.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall(InScript):
    """The data set of a rank returns after 20 s."""

    WORD = "stall"
    ABOUT = about(Place.DATA, "the data set's `__getitem__`", "nobody is named, and nothing is done", STUCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoData(InScript):
    """The data set returns on no rank for 45 s."""

    WORD = "nodata"
    OF_ALL = True
    LEAST_NODES = 2
    ABOUT = about(
        Place.DATA,
        "the data set's `__getitem__`, of every rank in the same step",
        "it is said, nobody is named, and nothing is done",
        "all ranks stand at the same, as in a store that does not answer or a long evaluation",
        "training.stalled",
        40.0,
        ends=Ends.NOTHING,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sluggish(Lasting):
    """The data set of a rank takes `factor` seconds for a sample, from then on."""

    WORD = "sluggish"
    factor: float = 0.2
    ABOUT = about(
        Place.DATA,
        "the data set's `__getitem__`",
        "its node is named with what it costs",
        SLOW,
        "node.slow",
        60.0,
        sure=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nan(InScript):
    """The samples of a micro-batch bring a loss that is not a number, whoever computes them."""

    WORD = "nan"
    OPTIONS = ("--numerics=skip",)
    LEAVES_OUT = True
    ABOUT = about(
        Place.DATA,
        "the loss of marked samples",
        "they are left out for good, with the bits of a run that knew of it",
        'a sample makes the loss or the gradient not finite, in a job with `health=elastic3d.Health(numerics="skip")`',
        "batch.excluded",
        5.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike(InScript):
    """The samples of three steps bring ten times the loss."""

    WORD = "spike"
    OPTIONS = (f"--rollback-steps={BACK}",)
    LEAVES_OUT = True
    ABOUT = about(
        Place.DATA,
        "the loss of marked samples",
        "the run goes back, and leaves out the last steps for good, with the bits of a run that knew of it",
        'the loss jumps up and stays there, in a job with `health=elastic3d.Health(spike="rollback")`',
        "run.rolled_back",
        10.0,
    )

    def check(self) -> None:
        """Refuse a step before which too few losses are known to find a spike."""
        InScript.check(self)
        if self.when.step < LEAST:
            raise UsageError(f"{self}: a spike is looked for after some steps; give a step from {LEAST}")

    @classmethod
    def drawn(cls, chance: Random, *, nodes: int, steps: int) -> Self:
        """Return one of a step that is late enough, where the job has such steps."""
        least = min(LEAST, steps - 1)
        return cls(rank=chance.randrange(nodes), when=When(step=chance.randrange(least, steps)))


KINDS = (Loader, Stall, NoData, Sluggish, Nan, Spike)
