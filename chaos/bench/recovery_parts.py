"""Where the time of a recovery goes: pure functions of a job's events, and of the marks that a peer's script left.

The parts of a recovery add up to it: what no event explains is in the part that it precedes. Wall clocks are compared,
which is right on one machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from chaos.bench.spread import spread
from chaos.history.follow import Event

NOTICING, SEALING, FORKING, FIRST_STEP, LEAVING = "noticing", "sealing", "forking", "first step", "leaving"

OURS = (NOTICING, SEALING, FORKING, "script", "turn", "groups", "building", "preparing", "awaiting", "loading")
"""The parts of ours in order, before the first step: the keepers' and then those of `state.restored`."""

ENOUGH = 3
"""Steps of a generation that make a median."""

_FAILED = ("crash", "peer_lost", "template", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """A part. seconds: by the clock. processor: of the process of rank 0, None where that is not known."""

    name: str
    seconds: float
    processor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """One recovery, or one join. parts: in order; the last is the first step.

    step: seconds of a median step of the same layout. step_processor: of processor time of rank 0 for one.
    """

    parts: tuple[Took, ...]
    step: float
    step_processor: float | None = None
    steps_repeated: int | None = None

    @property
    def seconds(self) -> float:
        """From the event to the end of the first step."""
        return sum(part.seconds for part in self.parts)

    @property
    def beyond(self) -> float:
        """The same without the time of a median step."""
        return self.seconds - self.step

    def part(self, name: str) -> Took | None:
        """Return a part by its name, None if this recovery has none."""
        return next((part for part in self.parts if part.name == name), None)


def of_death(events: Sequence[Event], killed_at: float) -> Recovered | None:
    """Return the recovery from a kill, None where the job did not go on."""
    sealed = _sealed(events, "death")
    if sealed is None:
        return None
    number = int(sealed.fields["number"])
    restored, first = _rank_0("state.restored", events, number), _rank_0("step.committed", events, number)
    if restored is None or first is None:
        return None
    noticed = min((e.at for e in events if killed_at < e.at <= sealed.at and _notices(e)), default=sealed.at)
    trainer = _trainer_parts(restored)
    began = restored.at - sum(part.seconds for part in trainer)
    return Recovered(
        parts=(
            Took(name=NOTICING, seconds=noticed - killed_at),
            Took(name=SEALING, seconds=sealed.at - noticed),
            Took(name=FORKING, seconds=began - sealed.at),
            *trainer,
            _first_step(restored, first),
        ),
        **_median_step(events, number),
    )


def of_join(events: Sequence[Event]) -> Recovered | None:
    """Return the pause of a join: from the last step without the newcomer to the first one with it."""
    sealed = _sealed(events, "join")
    if sealed is None:
        return None
    number = int(sealed.fields["number"])
    restored, first = _rank_0("state.restored", events, number), _rank_0("step.committed", events, number)
    before = [e.at for e in events if e.name == "step.committed" and e.generation < number]
    if restored is None or first is None or not before:
        return None
    # What comes before is done beside the trainers that are about to leave.
    alone = tuple(part for part in _trainer_parts(restored) if part.name == "loading")
    return Recovered(
        parts=(
            Took(name=LEAVING, seconds=restored.at - sum(part.seconds for part in alone) - max(before)),
            *alone,
            _first_step(restored, first),
        ),
        **_median_step(events, number),
    )


def of_peer(marks: Sequence[Mapping[str, Any]], killed_at: float, step: float) -> Recovered | None:
    """Return the recovery of a peer from its marks: [{"name", "at"}] of rank 0's new process, in order.

    The first mark is its beginning: until then its launcher noticed the death, ended the others and met anew.
    """
    if not marks:
        return None
    ends = [killed_at, *(float(mark["at"]) for mark in marks)]
    parts = [Took(name=str(m["name"]), seconds=b - a) for m, a, b in zip(marks, ends, ends[1:], strict=False)]
    return Recovered(parts=tuple(parts), step=step)


def table(title: str, columns: Mapping[str, Sequence[Recovered | None]]) -> Table:
    """Return the parts of all columns' repeats: medians with their extremes, then the sums."""
    made = Table("seconds", *columns, title=title)
    names: dict[str, None] = {}
    for repeats in columns.values():
        names.update({part.name: None for one in repeats if one is not None for part in one.parts})
    names.pop(FIRST_STEP, None)
    for name in [*sorted(names, key=_place), FIRST_STEP]:
        made.add_row(name, *(_cells(repeats, name) for repeats in columns.values()))
    made.add_section()
    made.add_row("first step beyond a median one", *(_column(r, _first_beyond) for r in columns.values()))
    made.add_row("a median step", *(_column(r, lambda one: one.step) for r in columns.values()))
    made.add_row("in all", *(_column(r, lambda one: one.seconds) for r in columns.values()))
    made.add_row("in all, beyond a median step", *(_column(r, lambda one: one.beyond) for r in columns.values()))
    return made


def _place(name: str) -> int:
    """Return where a part belongs; a peer's own come after ours of the keepers."""
    return OURS.index(name) if name in OURS else OURS.index(FORKING)


def _cells(repeats: Sequence[Recovered | None], name: str) -> str:
    parts = [one.part(name) for one in repeats if one is not None]
    if not any(parts):
        return ""
    text = spread([None if part is None else part.seconds for part in parts])
    processor = [part.processor for part in parts if part is not None and part.processor is not None]
    return f"{text}, of processor {statistics.median(processor):.2f} s" if processor else text


def _column(repeats: Sequence[Recovered | None], figure: Any) -> str:
    return spread([None if one is None else figure(one) for one in repeats]) if repeats else ""


def _first_beyond(one: Recovered) -> float | None:
    first = one.part(FIRST_STEP)
    return None if first is None else first.seconds - one.step


def _sealed(events: Iterable[Event], cause: str) -> Event | None:
    return min(
        (e for e in events if e.name == "generation.sealed" and e.fields["cause"] == cause),
        key=lambda e: e.at,
        default=None,
    )


def _rank_0(name: str, events: Iterable[Event], generation: int) -> Event | None:
    mine = (e for e in events if e.name == name and e.generation == generation and e.rank == 0)
    return min(mine, key=lambda e: e.at, default=None)


def _notices(event: Event) -> bool:
    return event.name == "peer.lost" or (event.name == "trainer.exited" and event.fields.get("kind") in _FAILED)


def _trainer_parts(restored: Event) -> tuple[Took, ...]:
    given = restored.fields.get("parts") or ()
    return tuple(Took(name=name, seconds=seconds, processor=processor) for name, seconds, processor in given)


def _first_step(restored: Event, first: Event) -> Took:
    return Took(name=FIRST_STEP, seconds=first.at - restored.at, processor=first.fields.get("processor"))


def _median_step(events: Iterable[Event], generation: int) -> dict[str, Any]:
    """Return what a later step of the generation takes; of any, where it made too few: its layout may be another."""
    steps = [event for event in events if event.name == "step.committed" and event.rank == 0]
    later = [event for event in steps if event.generation == generation][1:]
    steps = later if len(later) >= ENOUGH else steps
    processor = [float(event.fields["processor"]) for event in steps if event.fields.get("processor") is not None]
    return {
        "step": statistics.median(float(event.fields["seconds"]) for event in steps),
        "step_processor": statistics.median(processor) if processor else None,
    }
