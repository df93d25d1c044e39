"""Faults of the user's code: it waits, computes without end, raises, or leaves the program that all ranks follow."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.faults.fault import About, Place
from chaos.faults.script import InScript, about

STUCK = (
    "one trainer stands still while its node lives: stopped, its interpreter held, blocked in the kernel, waiting for "
    "a lock or its data, computing without end"
)
NAMED = "it is named, and the same nodes go on with fresh trainers"
RAISING = "your code raises on every try, also after a step, as in an evaluation"
_ASTRAY = (
    "the script itself stops the job: one rank skips, reorders or misshapes a collective, or ranks wait for each other"
)


def _stuck(enters: str, bar: float = 5.0) -> About:
    return about(Place.CODE, enters, NAMED, STUCK, "rank.stuck", bar)


def _astray(enters: str, *, spreads: bool = False) -> About:
    promised = "the rank is named; trainers start again once"
    return about(Place.CODE, enters, promised, _ASTRAY, "rank.stuck", 5.0, spreads=spreads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(InScript):
    """Native code holds the interpreter's lock of a rank."""

    WORD = "gil"
    ABOUT = _stuck("a mutex that `ctypes.PyDLL` locks twice in the forward pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked(InScript):
    """A rank waits for a lock that nobody releases."""

    WORD = "lock"
    ABOUT = _stuck("a lock that is taken twice in the forward pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spin(InScript):
    """A rank computes without end."""

    WORD = "spin"
    ABOUT = _stuck("a loop in the forward pass", bar=35.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip(InScript):
    """A rank leaves out the exchanges of the step's gradients."""

    WORD = "skip"
    # Where no others do the same as the rank, nothing says which of two left the program.
    ABOUT = _astray("the mesh's exchange, which returns at once", spreads=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(InScript):
    """A rank calls another collective before the vote."""

    WORD = "order"
    ABOUT = _astray("a collective of its own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(InScript):
    """A rank votes with a vector of another size."""

    WORD = "shape"
    ABOUT = _astray("the vector of the step's vote")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype(InScript):
    """A rank votes with numbers of another type."""

    WORD = "dtype"
    ABOUT = _astray("the vector of the step's vote")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlock(InScript):
    """A rank enters the collectives of two groups in another order than all others."""

    WORD = "deadlock"
    ABOUT = _astray("collectives of two groups of its own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised(InScript):
    """A rank's code raises, once."""

    WORD = "raise"
    RAISES = True
    ABOUT = about(
        Place.CODE,
        "an error of its own in the forward pass",
        "the step that raised is made again, not skipped, with fresh trainers",
        RAISING,
        "script.raised",
        5.0,
    )


KINDS = (Held, Locked, Spin, Raised, Skip, Order, Shape, Dtype, Deadlock)
