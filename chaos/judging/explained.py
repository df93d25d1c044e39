"""Whether only that ended which faults may end: nodes, generations, and steps that are made again.

The catalogue says of each kind of fault what may end by it. What no fault explains that was made until then is a broken
promise; where any may have had a part in it, none is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from chaos.faults.fault import Ends, Fault, Place, Replay
from chaos.history.claims import Loss
from chaos.history.follow import GenerationView
from chaos.judging.promise import Promise
from chaos.playing.outcome import Outcome

BEFORE = 5.0
"""Seconds by which what the script does to itself may be noted after somebody has noticed it."""
UNKNOWN = "the script may have failed by itself, which nobody knows of here"
"""Why nothing can be said."""
DEATHS = ("death", "failure", "stuck")
"""Causes of the generations that go on from the newest snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A fault that was made, when, and to which node, "" for none in particular."""

    fault: Fault
    at: float
    node: str

    def ends_node(self, node: str) -> bool:
        """Return whether that node may be lost by it."""
        about = self.fault.ABOUT
        return about.spreads or about.ends is Ends.JOB or (about.ends is Ends.NODE and self.node in ("", node))


def made(outcome: Outcome, until: float) -> list[Made]:
    """Return what was made by then; see `by_then`."""
    pairs = zip_longest(outcome.made, outcome.hit, fillvalue="")
    all_made = [Made(fault=one[0], at=one[1], node=str(node)) for one, node in pairs if not isinstance(one, str)]
    return by_then(all_made, until)


def by_then(all_made: Sequence[Made], until: float) -> list[Made]:
    """Return those that were made by then, or noted a little later."""
    return [one for one in all_made if one.at <= until + (BEFORE if one.fault.ABOUT.replay is Replay.EXACT else 0.0)]


def promises(outcome: Outcome, quiet: Outcome | None, *, all_known: bool) -> Iterator[Promise]:
    """Yield what is promised of nodes, generations and steps.

    all_known: nothing else was done to the job; else nothing of it is judged.
    """
    yield _nodes(outcome, all_known)
    yield _generations(outcome, quiet, all_known)
    yield _steps(outcome, all_known)


def _nodes(outcome: Outcome, all_known: bool) -> Promise:
    lost = outcome.picture.lost
    # A soak has thousands of both.
    all_made = made(outcome, math.inf) if all_known else []
    unexplained = [one for one in lost if all_known and not _explained(one, by_then(all_made, one.at))]
    wrong = {(one.event, one.node): _of_loss(one) for one in unexplained}
    return Promise(
        says="a node is taken for dead only where something was done that may end it",
        page="reference/failures.md",
        seen=(f"lost: {', '.join(sorted({one.node for one in lost})) or 'nobody'}") if all_known else UNKNOWN,
        broken=tuple(wrong.values()),
        judged=all_known,
    )


def _of_loss(loss: Loss) -> str:
    who = f"{loss.by} wrote {loss.event} of {loss.node}" if loss.event == "peer.lost" else f"{loss.node} was left out"
    text = f"{who}, to which nothing was done that may end it"
    return f"{text}: {loss.detail}" if loss.detail else text


def _explained(loss: Loss, before: Sequence[Made]) -> bool:
    """Return whether a fault that was made before may be why a node was taken for dead.

    Its own, or one of whoever says so, who may have been stopped or cut off. A node without a lease is lost once its
    trainers end, by whatever.
    """
    if any(one.ends_node(loss.node) or one.ends_node(loss.by) for one in before):
        return True
    of_etcd = any(one.fault.ABOUT.place is Place.ETCD for one in before)
    ending = any(one.fault.ABOUT.ends is not Ends.NOTHING for one in before)
    return loss.event != "peer.lost" and of_etcd and ending


def _generations(outcome: Outcome, quiet: Outcome | None, all_known: bool) -> Promise:
    steady = quiet is not None and all(step.generation <= 1 for step in quiet.picture.steps)
    why = UNKNOWN if not all_known else "" if steady else "no undisturbed run had one generation"
    views = outcome.picture.generations
    first = views[0].number if views else 0
    wrong = []
    for view in views if not why else ():
        before = made(outcome, view.sealed_at)
        if view.number > first and all(one.fault.ABOUT.ends is Ends.NOTHING for one in before):
            done = ", ".join(str(one.fault) for one in before) or "nothing"
            detail = f": {view.detail}" if view.detail else ""
            wrong.append(f"generation {view.number} ({view.cause}) was sealed after {done}{detail}")
    return Promise(
        says="a generation ends only where something was done that may end it",
        page="reference/failures.md",
        seen=why or f"{len(views)} generations",
        broken=tuple(wrong),
        judged=not why,
    )


def _steps(outcome: Outcome, all_known: bool) -> Promise:
    views = [view for view in outcome.picture.generations if _goes_on(view, outcome)] if all_known else []
    wrong = []
    for view in views:
        safe = _safe(view, outcome)
        assert view.first_step is not None
        if view.first_step <= safe:
            text = f"generation {view.number} ({view.cause}) began with step {view.first_step}"
            wrong.append(f"{text}, though that of step {safe} was safe")
    return Promise(
        says="only steps since the newest snapshot are made again",
        page="reference/failures.md",
        seen=f"{len(views)} generations went on from it" if views else "no generation had to go on from it alone",
        broken=tuple(wrong),
        judged=bool(views),
    )


def _goes_on(view: GenerationView, outcome: Outcome) -> bool:
    """Return whether a generation follows one fault alone, of which that is promised.

    What is done while it reads its state may take that, too.
    """
    if view.first_step is None or view.cause not in DEATHS:
        return False
    of_it = [event for event in outcome.events if event.generation == view.number and event.name == "state.restored"]
    read_at = max((event.at for event in of_it), default=view.sealed_at)
    before = [one.fault.ABOUT for one in made(outcome, read_at) if one.fault.ABOUT.ends is not Ends.NOTHING]
    return len(before) == 1 and before[0].again


def _safe(view: GenerationView, outcome: Outcome) -> int:
    steps = (event for event in outcome.events if event.name == "step.committed" and event.generation < view.number)
    return max((int(event.fields.get("safe_step", -1)) for event in steps), default=-1)
