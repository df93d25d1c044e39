"""Faults of a device: it computes wrongly, or slowly."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.faults.data import SLOW
from chaos.faults.fault import About, Place
from chaos.faults.script import InScript, Lasting, about

_LYING = "a device computes wrongly"
_SENT = (
    "what one rank sends another in an audited step, a piece of a gradient or a weight, arrives as something else, "
    "or a sum of gradients is added up wrongly"
)
_OUTCOME = "a rank leaves a vote with another outcome than all others, or its optimizer computes an update wrongly"
_NOT_GONE_ON = "who is wrong is named before the next update, and the state it made is not gone on from"
_AUDITED = ("--audit=100%",)


def _once(enters: str) -> About:
    promised = "where two others repeat it, the step is computed again before its update"
    return about(Place.DEVICE, enters, promised, _LYING, "step.redone", 5.0)


def _always(enters: str, *, spreads: bool = False) -> About:
    promised = "its node is set aside by the word of two others, and no state since the last clean audit is used"
    return about(Place.DEVICE, enters, promised, _LYING, "node.lying", 5.0, spreads=spreads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip(InScript):
    """One bit of a gradient is wrong, once."""

    WORD = "flip"
    OPTIONS = _AUDITED
    ABOUT = _once("a hook on a weight's gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(InScript):
    """One bit of what a block makes of its input is wrong, once."""

    WORD = "forward"
    OPTIONS = _AUDITED
    ABOUT = _once("a block's output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(InScript):
    """One bit of the gradient of a block's input is wrong, once."""

    WORD = "backward"
    OPTIONS = _AUDITED
    ABOUT = _once("a hook on a block's input")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sticky(InScript):
    """A bit of every gradient of a block is wrong, from then on."""

    WORD = "sticky"
    OPTIONS = _AUDITED
    ABOUT = _always("a hook on a weight's gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Liars(InScript):
    """The same on a rank and on the next one, another bit each."""

    WORD = "liars"
    OPTIONS = _AUDITED
    # The next rank's node lies as well, and the schedule does not say which that is.
    ABOUT = _always("a hook on a weight's gradient", spreads=True)


def _between(enters: str, detector: str, row: str = _SENT, promised: str = "the step is computed again") -> About:
    return about(Place.DEVICE, enters, promised, row, detector, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire(InScript):
    """A bit of a piece of a gradient that another rank sends is another one when it arrives, once."""

    WORD = "wire"
    OPTIONS = _AUDITED
    ABOUT = _between("what an exchange of gradients brings", "audit.failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather(InScript):
    """A bit of a weight that a rank has gathered from another one is wrong, once."""

    WORD = "gather"
    OPTIONS = _AUDITED
    ABOUT = _between("a block's weight in its forward pass", "audit.failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold(InScript):
    """A bit of every sum of gradients that a rank adds up is wrong, once."""

    WORD = "fold"
    OPTIONS = _AUDITED
    ABOUT = _between("the sums of a step's gradients", "audit.failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote(InScript):
    """A bit of what a rank hears in the step's vote is wrong, once."""

    WORD = "vote"
    ABOUT = _between("the vector of the step's vote", "vote.split", _OUTCOME, _NOT_GONE_ON)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(InScript):
    """A bit of every number of a rank's update is wrong, once, where another node computes it again."""

    WORD = "update"
    ABOUT = _between("the optimizer's step", "update.wrong", _OUTCOME, _NOT_GONE_ON)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates(InScript):
    """A bit of every number of every update of a rank is wrong, from then on."""

    WORD = "updates"
    ABOUT = about(
        Place.DEVICE,
        "the optimizer's step",
        "it errs again when the piece is computed again, and its node is set aside; the state it made is not gone on "
        "from",
        _OUTCOME,
        "node.lying",
        10.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NanDevice(InScript):
    """Every gradient of a block's weight is not a number, from then on."""

    WORD = "nandevice"
    OPTIONS = ("--numerics=skip",)
    ABOUT = _always("a hook on a weight's gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowBlocks(Lasting):
    """The blocks of a node take `factor` times as long, both ways, from then on."""

    WORD = "slow"
    OPTIONS = ("--work=16",)
    ABOUT = about(
        Place.DEVICE,
        "work of its own in each block",
        "the node is named with what it costs",
        SLOW,
        "node.slow",
        60.0,
        sure=False,
    )


KINDS = (Flip, Forward, Backward, Sticky, Liars, NanDevice, Wire, Gather, Fold, Vote, Update, Updates, SlowBlocks)
