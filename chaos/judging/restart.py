"""Judge a job whose script torchrun restarts at each change of membership: `mode=restart`.

What such a script computes, saves and repeats is its own affair. It is asked for less than one that calls
`elastic3d.run`: that the job ends well, that its membership is what it should be, and, of a script that tells its
result, that the result is that of an undisturbed run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from chaos.history.follow import Ledger
from chaos.judging.explained import BEFORE
from chaos.judging.losses import near_promise
from chaos.judging.oracle import GOES_ON, HARMLESS, Verdict, judge
from chaos.judging.promise import Promise
from chaos.playing.outcome import Outcome

AS_OF_EVERY_JOB = (
    GOES_ON,
    "a node that nobody kills ends well",
    "every fault of the schedule comes to pass",
    "nothing is left behind",
)
"""What is promised of any job, among what `oracle` judges."""
NOTICED = 30.0
"""Seconds by which another generation has to be formed without a node that was lost."""
COMES = 90.0
"""Seconds by which one has to be formed with a node that was started; its agent imports torch first."""
_LOST = ("kill", "sigterm", "stop")
_BACK = ("start", "cont")


def judge_restart(outcome: Outcome, quiet: Outcome | None = None, *, tolerance: float | None = None) -> Verdict:
    """Return what `outcome` proves; with `quiet`, an undisturbed run, whether the script's result is the same.

    The result is `digest` of `{out}/result.json`; same_bits is None where the script writes none. tolerance: within
    which share of each loss that the script prints its losses are asked for, instead of that.
    """
    last = _same_result(outcome, quiet) if tolerance is None else near_promise(outcome, quiet, tolerance)
    promises = (*_promises(outcome), last)
    return Verdict(
        same_bits=last.held if tolerance is None else None,
        tolerance=tolerance,
        same_losses=None if tolerance is None else last.held,
        samples=Ledger(consumed=0, repeated=0, missing=0),
        broken=tuple(text for promise in promises for text in promise.broken),
        promises=promises,
    )


def _promises(outcome: Outcome) -> Iterator[Promise]:
    by_name = {promise.says: promise for promise in judge(outcome).promises}
    yield from (by_name[says] for says in AS_OF_EVERY_JOB)
    yield _put_out(outcome)
    yield _membership(outcome)


def _put_out(outcome: Outcome) -> Promise:
    vague = sorted({fault.WORD for fault, _ in outcome.made if fault.ABOUT.spreads})
    why = f"of {', '.join(vague)} nothing says whose fault it is" if vague else ""
    lost = [event for event in outcome.events if event.name == "peer.lost"]
    wrong = []
    for event in lost if not why else ():
        peer = str(event.fields["peer"])
        # An agent that is done closes its port before its process ends.
        until = event.at + BEFORE
        ended = any(one.name == "job.ended" and one.node == peer and one.at <= until for one in outcome.events)
        hit = {one.node for one in outcome.injections if one.kind not in HARMLESS and one.at <= until}
        if peer not in hit and not ended:
            wrong.append(f"{peer} was put out, and nothing had been done to it: {event.fields['evidence']}")
    return Promise(
        says="nobody is put out to whom nothing was done",
        page="reference/failures.md",
        seen=why or f"put out: {', '.join(sorted({str(event.fields['peer']) for event in lost})) or 'nobody'}",
        broken=tuple(wrong),
        judged=not why,
    )


def _membership(outcome: Outcome) -> Promise:
    views = outcome.picture.generations
    ended = max((event.at for event in outcome.events), default=-math.inf)
    broken = []
    newest: dict[str, tuple[str, float]] = {}
    for one in outcome.injections:
        if one.kind in (*_LOST, *_BACK, "join"):
            newest[one.node] = (one.kind, one.at)
    for node, (kind, at) in newest.items():
        members = {*views[-1].nodes, *views[-1].spares} if views else set()
        if kind in _LOST and node in members and ended - at > NOTICED:
            broken.append(f"{node} is in the newest generation, {views[-1].number}, long after it was lost ({kind})")
        ever = any(node in (*view.nodes, *view.spares) for view in views if view.sealed_at > at)
        if kind not in _LOST and not ever and ended - at > COMES:
            broken.append(f"{node} came ({kind}), and is in no generation after it")
    return Promise(
        says="generations have the nodes that are there",
        page="guides/chaos.md",
        seen="; ".join(f"{view.number}: {' '.join(view.nodes)}" for view in views) or "there was no generation",
        broken=tuple(broken),
        judged=bool(views),
    )


_SAME = "the script's result is that of a run that nothing happens to"


def _same_result(outcome: Outcome, quiet: Outcome | None) -> Promise:
    wanted = None if quiet is None else quiet.digest
    if wanted is None:
        seen = "it was not compared" if quiet is None else "the script writes no `digest` to {out}/result.json"
        return Promise(says=_SAME, page="guides/chaos.md", seen=seen, judged=False)
    broken = () if outcome.digest == wanted else (f"digest {outcome.digest}, undisturbed {wanted}",)
    return Promise(says=_SAME, page="guides/chaos.md", seen=f"digest {outcome.digest}", broken=broken)
