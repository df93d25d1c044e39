"""Faults of the user's code: it waits, computes without end, raises, or leaves the program that all ranks follow."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.faults.fault import About, Ends, Place
from chaos.faults.script import InScript, OfScript, about

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


_ASKED = r"RuntimeError: rank \d+ was asked to raise"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedEverywhere(InScript):
    """Every rank's code raises, on each try; rank `rank` says that it has happened."""

    WORD = "raise-everywhere"
    OF_ALL = True
    RAISES = True
    ABOUT = about(
        Place.CODE,
        "an error of its own in the forward pass",
        "after three tries the job ends everywhere with the traceback; checkpoints stay",
        RAISING,
        "script.raised",
        5.0,
        ends=Ends.JOB,
        says=(_ASKED, "Traceback"),
    )


_ALONE = "your code raises on one node alone: a newcomer before its first step, or one node on every try"
_PUT_OUT = "that node is put out, with its traceback; the others go on"
_MEND = "the job goes on without it. Mend what is wrong on that node"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedOnNode(InScript):
    """The code of the node of a rank raises, on each try, whatever rank it is by then."""

    WORD = "raise-on-node"
    RAISES = True
    CHANGES = (-1,)
    LEAST_NODES = 2
    ABOUT = about(
        Place.CODE,
        "an error of its own in the forward pass",
        _PUT_OUT,
        _ALONE,
        "script.raised",
        5.0,
        ends=Ends.NODE,
        says=(r"raised in each of \d+ tries, and no other's did", _MEND, _ASKED, "Traceback"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedByNewcomer(OfScript):
    """The code of the first node that joins then or later raises in its first step, on each try."""

    WORD = "raise-newcomer"
    RAISES = True
    LEAST_NODES = 2
    ABOUT = about(
        Place.CODE,
        "an error of its own in the forward pass",
        _PUT_OUT,
        _ALONE,
        "script.raised",
        5.0,
        ends=Ends.NODE,
        says=("raised (before its first step|while it prepared)", _MEND, _ASKED, "Traceback"),
    )

    def asked(self) -> str:
        """Return the fault of a newcomer as the script has it."""
        return f"{RaisedOnNode.WORD}:newcomer@{self.when.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedForGood(InScript):
    """A rank's code raises an error that says that trying again cannot mend it."""

    WORD = "raise-final"
    RAISES = True
    ABOUT = about(
        Place.CODE,
        'a call of the runtime that it refuses: `run.pause("eval", "a while")`',
        "the job ends at once and says what to change; checkpoints stay",
        "your code raises an error that trying again cannot mend",
        "script.raised",
        5.0,
        ends=Ends.JOB,
        says=("run.pause: longest", "'a while'", "Traceback"),
    )


KINDS = (
    *(Held, Locked, Spin, Raised, RaisedEverywhere, RaisedOnNode, RaisedByNewcomer, RaisedForGood),
    *(Skip, Order, Shape, Dtype, Deadlock),
)
