"""Who noticed what was done to a job, and how soon."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chaos.faults.fault import Ends, Fault, Place, Replay
from chaos.history.follow import ORDERLY_EXITS, Event
from chaos.judging.explained import UNKNOWN, Made, by_then, made
from chaos.judging.promise import Promise
from chaos.playing.outcome import Outcome

_NOTED_LATE = 1.0
"""Seconds by which a fault within the script may be noted after it has happened, and after somebody has noticed it."""
LONG, TIMES = 15.0, 2.0
"""Seconds, and times the bar, after which a step is made only where whoever has to notice a fault has done so."""
LASTS = 5.0
"""Seconds that a fault has to last, if it has an end, so that somebody must notice it."""
_PASSED = 15.0
"""Seconds after the end of a fault in which a job recovers from it."""
SHARED = (
    *("etcd.lost", "etcd.impaired", "etcd.rolled_back", "checkpoint.failed"),
    *("batch.excluded", "run.rolled_back"),
)
"""Events of what all nodes have in common: etcd, the store, samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Who noticed a fault. after: seconds from what was done to the detector's first event, None if there was none."""

    fault: Fault
    detector: str
    after: float | None


def notices(outcome: Outcome, events: Sequence[Event]) -> Iterator[Notice]:
    """Yield who noticed what was done, for each fault that was made and that somebody has to notice."""
    by_name: dict[str, list[Event]] = {}
    for event in events:
        by_name.setdefault(event.name, []).append(event)
    for one in made(outcome, math.inf):
        detector = one.fault.ABOUT.detector
        if detector:
            begin = one.at - _NOTED_LATE if one.fault.ABOUT.replay is Replay.EXACT else one.at
            said = (event for event in by_name.get(detector, ()) if event.at >= begin)
            after = [max(0.0, event.at - one.at) for event in said if _tells(event, one)]
            yield Notice(fault=one.fault, detector=detector, after=min(after, default=None))


def _tells(event: Event, one: Made) -> bool:
    """Return whether an event of its detector is of the node that it happened to, or of nobody in particular."""
    node = one.node
    if event.name == "trainer.exited" and event.fields.get("kind") in ORDERLY_EXITS:
        return False
    if not node or one.fault.ABOUT.spreads or event.name in SHARED:
        return True
    if event.name == "generation.sealed":
        return _is_without(event, node)
    # Of `peer.refused` it is the address of who was refused.
    if "peer" in event.fields and event.name != "peer.refused":
        return bool(event.fields["peer"] == node)
    # Where nobody could be singled out it is noticed all the same.
    return node in (event.fields.get("nodes", (event.node,)) or (node,))


def promise(outcome: Outcome, *, all_known: bool) -> Promise:
    """Return whether all was noticed at last for which there was time, and which nothing else may have covered up.

    On a machine that stands still for seconds the job does so too: time is over only once a step is made after it.
    """
    judged, wrong = 0, []
    ended = max((event.at for event in outcome.events if event.name == "step.committed"), default=-math.inf)
    all_made = made(outcome, math.inf)
    detected = [one for one in all_made if one.fault.ABOUT.detector]
    for one, notice in zip(detected, notices(outcome, outcome.events), strict=True):
        due = one.at + max(LONG, TIMES * one.fault.ABOUT.bar)
        if not all_known or due > ended or not _must_be_noticed(one, by_then(all_made, due)):
            continue
        judged += 1
        if notice.after is None and not _left_out(one, outcome):
            wrong.append(f"{one.fault}: no {notice.detector} of it in {ended - one.at:.0f} s")
    return Promise(
        says="every fault is noticed by what the catalogue names",
        page="reference/faults.md",
        seen=(f"{judged} faults" if judged else "none had the time, and nothing beside it") if all_known else UNKNOWN,
        broken=tuple(wrong),
        judged=bool(judged),
    )


def _must_be_noticed(one: Made, in_time: Sequence[Made]) -> bool:
    """Return whether nothing that was made before time was over for it may have covered it up."""
    return (
        one.fault.ABOUT.sure
        and one.fault.lasts >= max(LASTS, one.fault.ABOUT.bar)
        and not any(_covers(other, one) for other in in_time if other.fault is not one.fault)
    )


def _covers(other: Made, one: Made) -> bool:
    """Return whether one fault may be why another is not noticed: it ends what would be, or who tells cannot."""
    about, same = other.fault.ABOUT, other.node == one.node != ""
    lasts = other.fault.lasts if math.isfinite(other.fault.lasts) else 0.0
    if other.at + lasts + _PASSED < one.at:
        return same and about.ends not in (Ends.NOTHING, Ends.GENERATION)
    return same or about.ends is not Ends.NOTHING or about.place is Place.ETCD


def _left_out(one: Made, outcome: Outcome) -> bool:
    """Return whether the others went on without a node that died, which they may have found by its silence."""
    dies = one.fault.ABOUT.place is Place.PROCESS and -1 in one.fault.CHANGES
    after = [event for event in outcome.events if event.name == "generation.sealed" and event.at > one.at]
    return dies and any(_is_without(event, one.node) for event in after)


def _is_without(sealed: Event, node: str) -> bool:
    return node not in (*sealed.fields["nodes"], *(sealed.fields.get("spares") or ()))
