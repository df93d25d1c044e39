"""Whether what has to end by a fault ends, by the error that the catalogue names: the job, or one of its nodes.

A job that ends as it has to is held to less: it need not make all its steps, and its nodes end by an error. What it has
made until then has to be right, and what it has saved whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chaos.faults.fault import Ends, Replay
from chaos.history.follow import Event
from chaos.judging.explained import BEFORE, Made, made
from chaos.judging.promise import Promise
from chaos.playing.outcome import Outcome

ENDED = "job.ended"
"""The event in which a node says how it ends."""
LEAVES = ("drain", "sigterm", "notice")
"""What is done to a node that leaves, and may be through with it before all others have to end."""
FAILED = 1
"""Exit code of a node that ends by an error: torchrun's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """An end that a fault has to lead to.

    node: who has to end by it, "" for all that are left. says: patterns of what the error has to say.
    """

    made: Made
    node: str
    says: tuple[str, ...]

    def explains(self, error: str) -> bool:
        """Return whether an error is the one that is promised."""
        return all(re.search(pattern, error) for pattern in self.says)

    def ends(self, node: str) -> bool:
        """Return whether it is one that has to end."""
        return self.node in ("", node)


def endings(outcome: Outcome) -> tuple[Ending, ...]:
    """Return the ends that the faults that were made have to lead to, in the order in which these were made."""
    known = sorted(made(outcome, float("inf")), key=lambda one: one.at)
    return tuple(
        Ending(
            made=one,
            node="" if one.fault.ABOUT.ends is Ends.JOB else one.node,
            says=one.fault.says(outcome.events, one.at),
        )
        for one in known
        if one.fault.ABOUT.says and not one.fault.spared(outcome.events, one.at)
    )


def of_job(outcome: Outcome) -> Ending | None:
    """Return the first of those by which the job has to end, None for a job that has to go on."""
    return next((one for one in endings(outcome) if not one.node), None)


def of_node(outcome: Outcome, node: str) -> Ending | None:
    """Return the end that a node has to come to, None where there is none, or it has left, or had ended, before."""
    said = last_words(outcome.events, node)
    asked = any(done.node == node and done.kind in LEAVES for done in outcome.injections)
    if said is not None and asked and said.fields.get("kind") != "error":
        return None
    for one in endings(outcome):
        late = BEFORE if one.made.fault.ABOUT.replay is Replay.EXACT else 0.0
        if one.ends(node) and not (said is not None and said.at < one.made.at - late):
            return one
    return None


def last_words(events: Sequence[Event], node: str) -> Event | None:
    """Return what a node has said of its end, in its newest life; None where it said nothing."""
    return next((one for one in reversed(events) if one.name == ENDED and one.node == node and one.slot == 0), None)


def promise(outcome: Outcome) -> Promise:
    """Return whether all that has to end did so, by an error that says why."""
    all_ends = endings(outcome)
    seen = []
    for one in all_ends:
        after = [e.at - one.made.at for e in outcome.events if e.name == ENDED and one.ends(e.node)]
        who = one.node or "the job"
        seen.append(f"{who} ended {max(after):.1f} s after {one.made.fault}" if after else f"{who} did not end")
    return Promise(
        says="what has to end by a fault ends, by an error that says why",
        page="reference/failures.md",
        seen="; ".join(seen) or "nothing that was done has to end the job, or a node by an error",
        broken=tuple(_broken(outcome)),
        judged=bool(all_ends),
    )


def _broken(outcome: Outcome) -> Iterator[str]:
    for node in outcome.exit_codes:
        one, said = of_node(outcome, node), last_words(outcome.events, node)
        if one is None or node in outcome.killed:
            continue
        wanted = f"by {one.made.fault} it has to end by an error that says why"
        error = "" if said is None else str(said.fields.get("error") or "")
        if said is None:
            yield f"{node} said nothing of its end; {wanted}"
        elif said.fields.get("kind") != "error":
            yield f"{node} ended as if all were well; {wanted}"
        elif not one.explains(error):
            lacks = next(part for part in one.says if not re.search(part, error))
            yield f"{node} ended by another error: {error.strip().partition(chr(10))[0]}; {wanted}, as in {lacks!r}"
