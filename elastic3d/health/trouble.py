"""What events about numbers, devices and state mean for a person: one page for each kind of trouble. Pure.

Verdicts about ranks that stand still or are slow lie in etcd (`explanation`); what is in this table is told by the
events of the nodes, and of those that end a generation etcd keeps one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elastic3d.health.explanation import Explanation, Formed, cut

SHOWN = 6
"""Ranges of positions that are named."""


class TroubleKind(StrEnum):
    """Of what kind a trouble is: `Explanation.kind`."""

    NUMBERS = "numbers"
    LYING = "lying"
    EXAM = "exam"
    STATE = "state"


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
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes at fault."""
        return tuple(str(node) for node in self.fields.get("nodes") or ())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks at fault."""
        return tuple(int(rank) for rank in self.fields.get("ranks") or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meaning:
    kind: TroubleKind
    fault: str
    why: str
    done: str
    todo: tuple[str, ...]
    weight: int = 0
    """Which of several in one generation is explained: the heaviest, and of these the newest."""


_LOOK = "look at the device of {nodes}: its memory errors, its temperature, its driver's log; try `elastic3d doctor`"
_OUT = "its machine is set aside for a day; `elastic3d release {nodes}` takes it back once the device is replaced"

MEANINGS: Mapping[str, _Meaning] = {
    "batch.excluded": _Meaning(
        kind=TroubleKind.NUMBERS,
        fault="samples whose numbers are not finite",
        why="the passes were made again, each micro-batch by itself, and by other nodes where there are any",
        done="these samples are left out for good, and the step was made of the others; what follows keeps its step",
        todo=(
            "look at these samples: empty or corrupt ones, targets out of range, a loss that divides by zero",
            "run.batches(exclude=) leaves the same positions out of a run from its beginning",
        ),
        weight=2,
    ),
    "run.rolled_back": _Meaning(
        kind=TroubleKind.NUMBERS,
        fault="the loss jumped up",
        why="three of five losses were half as much again as the median of the last 128, and 8 usual spreads above it",
        done="the run went back to a state of before, and these positions are left out for good",
        todo=(
            "look at the samples that are left out, and whether the learning rate had just been raised",
            "if it comes again it is not single samples: a run goes back at most three times in 10,000 steps",
        ),
        weight=4,
    ),
    "loss.spiked": _Meaning(
        kind=TroubleKind.NUMBERS,
        fault="the loss jumped up",
        why="three of five losses were half as much again as the median of the last 128, and 8 usual spreads above it",
        done="nothing: the run goes on",
        todo=(
            "look at the samples of the last steps, and whether the learning rate had just been raised",
            "to go back: restore= names an older checkpoint, and exclude= leaves out what led to it; "
            'Health(spike="rollback") does both',
        ),
        weight=1,
    ),
    "node.lying": _Meaning(
        kind=TroubleKind.LYING,
        fault="a device computes wrongly",
        why="it differs from two ranks on two other nodes, which agree with each other bit for bit, and differed again",
        done="the step was not made with it",
        todo=(_LOOK, _OUT),
        weight=5,
    ),
    "exam.failed": _Meaning(
        kind=TroubleKind.EXAM,
        fault="a node failed its entrance exam",
        why="before its first step it computed the same micro-batch as all others, and came to other bits",
        done="no step was made with it, and no state is doubted",
        todo=(_LOOK, _OUT),
        weight=4,
    ),
    "audit.inconclusive": _Meaning(
        kind=TroubleKind.LYING,
        fault="ranks came to other bits, and nobody can be blamed",
        why="nobody is convicted but by two ranks on two other nodes that agree with each other",
        done="training went on, with what may be wrong",
        todo=(
            "with three data-parallel ranks on three nodes somebody can be blamed",
            "if nobody is named though there are enough: an operation of the model is not deterministic; find it with "
            "torch.use_deterministic_algorithms(True) and audit=100% in a short run",
        ),
        weight=3,
    ),
    "audit.failed": _Meaning(
        kind=TroubleKind.LYING,
        fault="ranks came to other bits",
        why="two ranks ran the same micro-batch, and others repeated it",
        done="the step's passes were made again before its update",
        todo=("one accident may be a cosmic ray: {nodes} is set aside if it happens again within an hour",),
        weight=2,
    ),
    "step.redone": _Meaning(
        kind=TroubleKind.LYING,
        fault="something went wrong once",
        why="the same passes came to other numbers when they were made again",
        done="the step was made of the new passes",
        todo=("one accident may be a cosmic ray; if it happens often on one node, look at its device",),
        weight=1,
    ),
    "state.altered": _Meaning(
        kind=TroubleKind.STATE,
        fault="bits changed in memory",
        why="parameters or the optimizer's state differ from their own copy, though nothing wrote to them",
        done="",
        todo=(_LOOK, "a second time within an hour sets the node aside"),
        weight=4,
    ),
    "update.wrong": _Meaning(
        kind=TroubleKind.STATE,
        fault="an update was computed wrongly",
        why="a piece of the optimizer's update came to other bits when other nodes computed it again",
        done="",
        todo=(_LOOK, "a second time within an hour sets the node aside"),
        weight=4,
    ),
    "vote.split": _Meaning(
        kind=TroubleKind.STATE,
        fault="ranks left a vote with different outcomes",
        why="the next vote carries a digest of the last one's outcome, and they are not all the same",
        done="",
        todo=("look at the network and the memory of {nodes}: what was sent is not what arrived",),
        weight=4,
    ),
}
"""What each event means. "{nodes}" stands for the names of those at fault. Without `done`, the event says it."""


def is_trouble(name: str, fields: Mapping[str, Any]) -> bool:
    """Return whether an event is one that this explains; not samples of which the run knew before."""
    return name in MEANINGS and not (name == "batch.excluded" and fields.get("detail") == KNOWN)


KNOWN = "the run knew of it before"
"""What `batch.excluded` says of samples that were not tried."""


def newest(troubles: Sequence[Trouble], generation: int = 0) -> Trouble | None:
    """Return what is to be explained: of the newest generation, or of this one, the heaviest; None for nothing."""
    fitting = [one for one in troubles if generation in (0, one.generation)]
    return max(fitting, key=lambda one: (one.generation, MEANINGS[one.event].weight, one.at, one.step), default=None)


def explain_trouble(
    trouble: Trouble, troubles: Sequence[Trouble] = (), *, formed: Sequence[Formed] = (), ended: str = ""
) -> Explanation:
    """Return what it means. troubles: all of the job. formed: its generations. ended: why it ended, if it did."""
    meaning = MEANINGS[trouble.event]
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
    again = [one for one in troubles if one.nodes and set(one.nodes) & set(trouble.nodes) and one != trouble]
    if again:
        first = min(again, key=lambda one: one.at)
        events = "1 more event is" if len(again) == 1 else f"{len(again)} more events are"
        more.append(f"{events} about {', '.join(trouble.nodes)}: the first is {first.event} in step {first.step}")
    return more


def _left_out(troubles: Sequence[Trouble]) -> list[str]:
    """Return which positions are left out in all, and since when."""
    ranges = {
        (int(first), int(stop)): one
        for one in sorted(troubles, key=lambda one: one.at)
        if one.event in ("batch.excluded", "run.rolled_back")
        for first, stop in one.fields.get("samples") or ()
    }
    if not ranges:
        return []
    shown = ", ".join(f"{first} to {stop - 1}" for first, stop in sorted(ranges)[:SHOWN])
    more = f" and {len(ranges) - SHOWN} more ranges" if len(ranges) > SHOWN else ""
    number = sum(stop - first for first, stop in ranges)
    since = min(ranges.values(), key=lambda one: one.at)
    return [
        f"left out in all: {number} samples, at positions {shown}{more}; since step {since.step} in generation "
        f"{since.generation}"
    ]


def _done(trouble: Trouble, meaning: _Meaning, formed: Sequence[Formed], ended: str) -> str:
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


ENDING = ("run.rolled_back", "node.lying", "state.altered", "update.wrong", "vote.split")
"""Events upon which a generation ends."""
