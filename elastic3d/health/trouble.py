"""A page for a person about each kind of trouble with numbers, devices and state, from events. Pure.

Verdicts about ranks that stand still or are slow lie in etcd (`explanation`); what is in `meanings` is told by the
events of the nodes, and of those that end a generation etcd keeps one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic3d.health.explanation import Explanation, Formed, cut
from elastic3d.health.meanings import ENDING, MEANINGS, Meaning, TroubleKind, meaning_of

SHOWN = 6
"""Ranges of positions that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One event of a job that tells of trouble. fields: of the event, as `elastic3d.log` lists them."""

    event: str
    generation: int
    at: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The step that it is about, -1 for none."""
        return int(self.fields.get("step", -1))

    @property
    def moment(self) -> tuple[int, int, float]:
        """Its place in the job's order; clocks, which may be far apart, tell only what one step has had twice."""
        return self.generation, self.step, self.at

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes at fault."""
        return tuple(str(node) for node in self.fields.get("nodes") or ())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks at fault."""
        return tuple(int(rank) for rank in self.fields.get("ranks") or ())


def is_trouble(name: str, fields: Mapping[str, Any]) -> bool:
    """Return whether an event is one that this explains; not samples of which the run knew before."""
    return name in MEANINGS and not (name == "batch.excluded" and fields.get("detail") == KNOWN)


def orderly(trouble: Trouble) -> bool:
    """Return whether an event's figures are such as elastic3d writes: others would spoil the order of all."""
    try:
        return isinstance(trouble.moment, tuple) and isinstance(trouble.nodes, tuple) and trouble.ranks is not None
    except (TypeError, ValueError, OverflowError):
        return False


def distinct(troubles: Iterable[Trouble]) -> Iterator[Trouble]:
    """Yield what is orderly, each once: several nodes may tell the same."""
    seen: set[tuple[object, ...]] = set()
    for one in filter(orderly, troubles):
        key = (one.event, one.generation, one.step, str(one.fields.get("micro_batch")), one.nodes)
        if key not in seen:
            seen.add(key)
            yield one


KNOWN = "the run knew of it before"
"""What `batch.excluded` says of samples that were not tried."""


def newest(troubles: Sequence[Trouble], generation: int = 0) -> Trouble | None:
    """Return what is to be explained: of the newest generation, or of this one, the heaviest; None for nothing."""
    fitting = [one for one in troubles if generation in (0, one.generation)]
    return max(fitting, key=lambda one: (one.generation, MEANINGS[one.event].weight, one.moment), default=None)


def explain_trouble(
    trouble: Trouble, troubles: Sequence[Trouble] = (), *, formed: Sequence[Formed] = (), ended: str = ""
) -> Explanation:
    """Return what it means. troubles: all of the job. formed: its generations. ended: why it ended, if it did."""
    meaning = meaning_of(trouble.event, str(trouble.fields.get("compared") or ""))
    names = ", ".join(trouble.nodes) or "the nodes"
    todo = tuple(text.format(nodes=names) for text in meaning.todo)
    if not trouble.nodes and meaning.kind in (TroubleKind.STATE, TroubleKind.LYING):
        todo = tuple(text for text, raw in zip(todo, meaning.todo, strict=True) if "{nodes}" not in raw) or todo
    return Explanation(
        generation=trouble.generation,
        attempt=0,
        step=trouble.step,
        fault=meaning.fault,
        detail=str(trouble.fields.get("detail") or _of_loss(trouble)),
        nodes=trouble.nodes,
        ranks=trouble.ranks,
        reasons=(meaning.why, *_more(trouble, troubles)),
        done=_done(trouble, meaning, formed, ended),
        todo=todo,
        kind=str(meaning.kind),
    )


def trouble_page(explanation: Explanation) -> str:
    """Return the explanation as text for a terminal, one page."""
    e = explanation
    at = f", step {e.step}" if e.step >= 0 else ""
    lines = [f"Generation {e.generation}{at}: {e.fault}", "", f"  {e.detail}", ""]
    if e.kind != TroubleKind.NUMBERS:
        who = f"node {', '.join(e.nodes)}" if e.nodes else "nobody can be singled out"
        ranks = f" (rank{'s' * (len(e.ranks) > 1)} {', '.join(map(str, e.ranks))})" if e.ranks else ""
        lines.append(f"Who        {who}{ranks}")
    for title, texts in (("Why", e.reasons), ("Done", (e.done,)), ("Do now", e.todo), ("Evidence", e.evidence)):
        lines += [f"{title if not row else '':10s} {text}" for row, text in enumerate(cut([t for t in texts if t]))]
    return "\n".join(lines)


def _of_loss(trouble: Trouble) -> str:
    """Return what a spike looked like, "" for other events."""
    if trouble.event != "loss.spiked":
        return ""
    loss, usual = float(trouble.fields["loss"]), float(trouble.fields["usual"])
    return f"the loss of the steps up to {trouble.step} is {loss:.4g}, where {usual:.4g} was usual"


def _more(trouble: Trouble, troubles: Sequence[Trouble]) -> list[str]:
    """Return what else is known: what was left out in all and since when, or how often the same was found."""
    if MEANINGS[trouble.event].kind is TroubleKind.NUMBERS:
        return _left_out(troubles)
    more = []
    if where := trouble.fields.get("where"):
        number = trouble.fields.get("micro_batch", -1)
        more.append(f"they differ first at {where}" + (f" of micro-batch {number}" if number >= 0 else ""))
    if trouble.fields.get("clean", -1) >= 0:
        more.append(f"audits vouch for what was computed up to step {trouble.fields['clean']}")
    this = (trouble.generation, trouble.step)
    others = [one for one in troubles if (one.generation, one.step) != this]
    again = [one for one in others if set(one.nodes) & set(trouble.nodes)]
    if again:
        first = min(again, key=lambda one: one.moment)
        events = "1 more event is" if len(again) == 1 else f"{len(again)} more events are"
        more.append(f"{events} about {', '.join(trouble.nodes)}: the first is {first.event} in step {first.step}")
    return more


def _left_out(troubles: Sequence[Trouble]) -> list[str]:
    """Return which positions are left out in all, and since when."""
    ranges = {
        (int(first), int(stop)): one
        for one in sorted(troubles, key=lambda one: one.moment)
        if one.event in ("batch.excluded", "run.rolled_back")
        for first, stop in one.fields.get("samples") or ()
    }
    if not ranges:
        return []
    shown = ", ".join(f"{first} to {stop - 1}" for first, stop in sorted(ranges)[:SHOWN])
    more = f" and {len(ranges) - SHOWN} more ranges" if len(ranges) > SHOWN else ""
    number = sum(stop - first for first, stop in ranges)
    since = min(ranges.values(), key=lambda one: one.moment)
    return [
        f"left out in all: {number} samples, at positions {shown}{more}; since step {since.step} in generation "
        f"{since.generation}"
    ]


def _done(trouble: Trouble, meaning: Meaning, formed: Sequence[Formed], ended: str) -> str:
    done = meaning.done
    if not done:
        done = "the step was not made, and all trainers were started again from the last state that is held twice"
    if trouble.fields.get("acted") is False:
        return "nothing: it was only reported, because health= says so or no state is wrong"
    if trouble.event not in ENDING:
        return done
    after = next((one for one in formed if one.number > trouble.generation), None)
    if after is None:
        return f"{done}; the job ended: {ended}" if ended else done
    gone = [node for node in trouble.nodes if node in after.left]
    without = f", without {', '.join(gone)}" if gone else ""
    return f"{done}; generation {after.number} was formed with {after.active} nodes{without}"
