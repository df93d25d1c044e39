"""Faults of a device: it computes wrongly, or slowly."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.faults.data import SLOW
from chaos.faults.fault import About, Place
from chaos.faults.script import InScript, Lasting, about

_LYING = 'a device computes wrongly, in a job with `health=elastic3d.Health(audit="1%")`'
_AUDITED = ("--audit=100%",)


def _once(enters: str) -> About:
    promised = "where two others repeat it, the step is computed again before its update"
    return about(Place.DEVICE, enters, promised, _LYING, "step.redone", 5.0)


def _always(enters: str) -> About:
    promised = "its node is set aside by the word of two others, and no state since the last clean audit is used"
    return about(Place.DEVICE, enters, promised, _LYING, "node.lying", 5.0)


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
    ABOUT = _always("a hook on a weight's gradient")


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
        Place.DEVICE, "work of its own in each block", "the node is named with what it costs", SLOW, "node.slow", 60.0
    )


KINDS = (Flip, Forward, Backward, Sticky, Liars, NanDevice, SlowBlocks)
