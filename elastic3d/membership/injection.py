"""What a person can have a node do to its own processes, to see the job live through it: words, record, refusals.

Pure. An order is a key that the named node's keeper answers and then carries out, if the node was started with
`--rdzv-conf=chaos=allow`; `fault_orders` writes it and waits for the answer. The words are those of the catalogue of
`elastic3d chaos`, as far as signals to a node's own processes are enough for a fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from elastic3d.errors import UsageError
from elastic3d.nearest import nearest

OPTION = "--rdzv-conf=chaos=allow"
"""What a node is started with that carries out such orders."""

LONGEST_PAUSE = 3600.0
"""Most seconds for which processes are stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injectable:
    """A fault that a keeper can bring about. does: what happens.

    slot: the one that is meant if none is given, None where slots mean nothing; least: the smallest that may be meant.
    seconds: for how long if nothing is given, 0.0 where it does not last.
    """

    does: str
    slot: int | None = None
    least: int = 0
    seconds: float = 0.0


INJECTABLE: Mapping[str, Injectable] = MappingProxyType(
    {
        "kill": Injectable(does="SIGKILL to the agent; the whole node goes with it"),
        "kill-trainer": Injectable(does="SIGKILL to the trainer of a slot", slot=0),
        "kill-template": Injectable(does="SIGKILL to the process that forks a slot's trainers", slot=0),
        "kill-keeper": Injectable(does="SIGKILL to the node's first keeper"),
        "kill-companion": Injectable(does="SIGKILL to the keeper of another slot", slot=1, least=1),
        "stop": Injectable(does="SIGSTOP to all processes of the node, SIGCONT after --seconds", seconds=5.0),
        "freeze": Injectable(does="SIGSTOP to the trainer of a slot, for good", slot=0),
        "pause": Injectable(
            does="SIGSTOP to the trainer of a slot, SIGCONT after --seconds",
            slot=0,
            seconds=5.0,
        ),
    }
)
"""Every fault that can be injected into a live job, by its word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultAnswer:
    """What the node's keeper says: it does it now, or why it does not. refused: "" where it does."""

    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOrder:
    """A person wants this fault of a node's own processes, now: the key's lease ends the order.

    slot: -1 where slots mean nothing. seconds: for how long, 0.0 where it does not last. by: who asks, for people.
    answer: None until the node's keeper has taken the order.
    """

    fault: str
    slot: int = -1
    seconds: float = 0.0
    by: str = ""
    answer: FaultAnswer | None = None


def ordered(word: str, *, slot: int | None = None, seconds: float | None = None, by: str = "") -> FaultOrder:
    """Return the order of a fault by its word; the UsageError says what is wrong with word, slot or seconds."""
    if word not in INJECTABLE:
        raise UsageError(
            f"no fault {word!r} can be injected into a live job{nearest(word, INJECTABLE)}; those that can are "
            f"{', '.join(INJECTABLE)}"
        )
    kind = INJECTABLE[word]
    if slot is not None and kind.slot is None:
        raise UsageError(f"{word} is of the whole node: leave out --slot")
    if seconds is not None and not kind.seconds:
        raise UsageError(f"{word} does not last: leave out --seconds")
    order = FaultOrder(
        fault=word,
        slot=-1 if kind.slot is None else kind.slot if slot is None else slot,
        seconds=kind.seconds if seconds is None else seconds,
        by=by,
    )
    problem = _problem(order, kind)
    if problem:
        raise UsageError(problem)
    return order


def refusal(order: FaultOrder, *, slots: int, lease: int) -> str:
    """Return why a keeper that allows injection does not carry out an order, "" if it does.

    slots: of its node. lease: of the order's key, 0 for none.
    """
    kind = INJECTABLE.get(order.fault)
    if kind is None:
        return f"this node's elastic3d knows no fault {order.fault!r}; it knows {', '.join(INJECTABLE)}"
    if not lease:
        return "the order has no lease, and would be carried out however old it is"
    return _problem(order, kind) or no_slot(order, slots)


def no_slot(order: FaultOrder, slots: int) -> str:
    """Return that a node of so many slots has not the one that is meant, "" if it has."""
    if order.slot < slots:
        return ""
    return f"there is no slot {order.slot}: the node has {slots}, counted from 0"


def _problem(order: FaultOrder, kind: Injectable) -> str:
    if kind.slot is not None and order.slot < kind.least:
        return f"{order.fault} of slot {order.slot}: slots are counted from 0, and {kind.least} is the least for it"
    if kind.seconds and not (math.isfinite(order.seconds) and 0 < order.seconds <= LONGEST_PAUSE):
        return f"{order.fault} for {order.seconds:g} s: give more than 0 s and at most {LONGEST_PAUSE:g}"
    return ""
