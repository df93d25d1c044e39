"""Faults of a data set: it does not return, or takes long."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.faults.code import NAMED, STUCK
from chaos.faults.fault import Place
from chaos.faults.script import InScript, Lasting, about

SLOW = (
    "a node takes 1.15 times as long as others for the same work (`Health(slow=)`), or its data loader, updates, "
    "snapshots or connections lengthen every step as much"
)


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


KINDS = (Loader, Stall, Sluggish)
