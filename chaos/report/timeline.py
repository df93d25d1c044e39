"""The run as a picture: nodes as rows, time from left to right, and what was done and said in between.

From the top: the steps as they were made, the generations, what concerns the whole job, a row for each node, and the
checkpoints. It is drawn for a width, since text that shrinks with a picture cannot be read on a small screen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from chaos.report.facts import FaultFact, GenerationFact, Role, RunFacts, Span
from chaos.report.moments import Moment, MomentKind
from elastic3d.pages.markup import Html, join, tag

COLOURS = 8
"""Colours of generations; those after the last begin again with the first."""

_STEPS, _BAND, _ROW, _SAVED, _AXIS, _GAP = 72.0, 24.0, 40.0, 20.0, 30.0, 8.0
_RADIUS = 9.0
_JOB = "job"
_DOTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Where times are. left, right: of the picture's plane. origin, end: by the wall clock."""

    left: float
    right: float
    origin: float
    end: float

    def x(self, at: float) -> float:
        share = (at - self.origin) / ((self.end - self.origin) or 1.0)
        return self.left + (self.right - self.left) * min(1.0, max(0.0, share))

    def since(self, at: float) -> str:
        return f"{at - self.origin:.2f} s"


def timeline(facts: RunFacts, width: int) -> Html:
    """Return the picture for a place of so many CSS pixels."""
    names = rows(facts)
    widest = max(map(len, ("generation", *names))) * 7.0 + 14
    scale = _Scale(
        left=min(widest, width * 0.22),
        right=width - 14.0,
        origin=facts.origin,
        end=max(facts.ended, facts.origin + 1e-3),
    )
    top, parts = 4.0, [_steps(facts, scale, 4.0)]
    top += _STEPS + _GAP
    parts.append(_band(facts, scale, top))
    top += _BAND + _GAP
    centres: dict[str, float] = {}
    for name in (_JOB, *names):
        centres[name] = top + _ROW / 2
        parts.append(_row(name, scale, centres[name], [span for span in facts.spans if span.node == name], facts))
        top += _ROW
    parts.append(_saved(facts, scale, top + _SAVED / 2))
    top += _SAVED + _GAP
    parts.append(_axis(scale, top, width))
    # What was done and said lies above all rows.
    parts.append(join(*_marks(facts, scale, centres)))
    height = top + _AXIS
    return tag(
        "svg",
        tag("title", "The run: nodes by time"),
        *parts,
        viewBox=f"0 0 {width} {height:.0f}",
        width=width,
        height=f"{height:.0f}",
        role="img",
        class_="timeline",
    )


def rows(facts: RunFacts) -> tuple[str, ...]:
    """Return the nodes that a run had, in the order of their numbers."""
    named = {span.node for span in facts.spans} | {_place(fault) for fault in facts.faults if fault.node}
    named |= {node for view in facts.generations for node in (*view.nodes, *view.spares)}
    return tuple(sorted(named, key=lambda name: [int(part) if part.isdigit() else part for part in _pieces(name)]))


def _place(fault: FaultFact) -> str:
    """Return the node in whose row a fault is: of a connection, the one that it begins at."""
    return fault.node.partition(" to ")[0]


def _pieces(name: str) -> list[str]:
    # Texts and numbers alternate, so that like is compared with like.
    return re.split(r"(\d+)", name)


def _steps(facts: RunFacts, scale: _Scale, top: float) -> Html:
    most = max([facts.steps, *(step.number for step in facts.made)], default=0) or 1

    def y(number: int) -> float:
        return top + _STEPS - (_STEPS - 12) * number / most

    parts = []
    for view in facts.generations[1:]:
        if view.first_at is not None and view.caused_at is not None:
            # Steps go on while a planned change is prepared: what is shaded is the time in which none was made.
            last = max((step.at for step in facts.made if step.at < view.first_at), default=view.caused_at)
            begin, end = scale.x(max(view.caused_at, last)), scale.x(view.first_at)
            seconds = f"{view.first_at - view.caused_at:.1f} s"
            title = f"generation {view.number}: {seconds} from what led to it ({view.cause}) to step {view.first_step}"
            shade = tag("rect", x=begin, y=top, width=max(1.5, end - begin), height=_STEPS, class_="recovery")
            parts.append(tag("g", tag("title", title), shade))
    line = " ".join(f"{scale.x(step.at):.1f},{y(step.number):.1f}" for step in facts.made)
    parts.append(tag("polyline", points=line, class_="steps"))
    if len(facts.made) <= _DOTS:
        for step in facts.made:
            counted = "" if step.counts else ", which was made again later"
            title = tag("title", f"step {step.number} at {scale.since(step.at)}{counted}")
            kind = f"{_colour(step.generation)}{'' if step.counts else ' again'}"
            parts.append(tag("circle", title, cx=scale.x(step.at), cy=y(step.number), r=2.2, class_=kind))
    base = top + _STEPS
    parts.append(tag("line", x1=scale.left, x2=scale.right, y1=base, y2=base, class_="rule"))
    parts.append(_label(f"step {most}", scale, y(most)))
    parts.append(_label("0", scale, base - 4))
    return join(*parts)


def _band(facts: RunFacts, scale: _Scale, top: float) -> Html:
    parts = [_label("generation", scale, top + _BAND / 2)]
    for view, following in zip_longest(facts.generations, facts.generations[1:]):
        begin = scale.x(view.sealed_at)
        end = scale.x(following.sealed_at if following is not None else facts.ended)
        room = end - begin
        text = f"{view.number} {view.cause}"
        shown = text if room > len(text) * 6.6 + 8 else str(view.number) if room > 12 else ""
        parts.append(
            tag(
                "g",
                tag("title", _told(view, scale)),
                tag("rect", x=begin, y=top, width=max(1.0, room - 1), height=_BAND, class_=_colour(view.number)),
                tag("text", shown, x=begin + 5, y=top + _BAND / 2 + 4, class_="on"),
            )
        )
    return join(*parts)


def _told(view: GenerationFact, scale: _Scale) -> str:
    spares = f"; spare: {', '.join(view.spares)}" if view.spares else ""
    why = f"\n{view.detail}" if view.detail else ""
    return (
        f"generation {view.number}, {view.cause}, sealed at {scale.since(view.sealed_at)}\n"
        f"{', '.join(view.nodes)}{spares}\n{view.layout}{why}"
    )


def _row(name: str, scale: _Scale, centre: float, spans: Sequence[Span], facts: RunFacts) -> Html:
    parts = [
        _label(name, scale, centre),
        tag("line", x1=scale.left, x2=scale.right, y1=centre, y2=centre, class_="absent"),
    ]
    first = {view.number: view.first_at for view in facts.generations}
    for span in spans:
        title = f"{name}: {span.role} in generation {span.generation}"
        times = f"{scale.since(span.begin)} to {scale.since(span.end)}"
        if span.role is Role.COMING:
            title = f"{name}: it has joined, and is to be in generation {span.generation}"
        begin, end = scale.x(span.begin), scale.x(span.end)
        height = 18.0 if span.role is not Role.COMING else 6.0
        box = {"y": centre - height / 2, "height": height}
        kind = f"{_colour(span.generation)} {span.role}"
        bars = [tag("rect", x=begin, width=max(1.0, end - begin), class_=kind, **box)]
        started = first.get(span.generation)
        if span.role is Role.ACTIVE and started is not None and started > span.begin:
            until = min(end, scale.x(started))
            bars.append(tag("rect", x=begin, width=max(0.0, until - begin), class_="forming", **box))
        parts.append(tag("g", tag("title", f"{title}, {times}"), *bars))
    return join(*parts)


def _saved(facts: RunFacts, scale: _Scale, centre: float) -> Html:
    parts = [_label("saved", scale, centre)]
    for moment in facts.moments:
        if moment.kind is MomentKind.CHECKPOINT:
            title = tag("title", f"checkpoint of {moment.detail}, committed by {', '.join(moment.by)}")
            parts.append(tag("g", title, _diamond(scale.x(moment.at), centre, 5.0, "saved")))
    return join(*parts)


def _axis(scale: _Scale, top: float, width: int) -> Html:
    seconds = scale.end - scale.origin
    step = _round(seconds / max(2, width // 110))
    parts = [tag("line", x1=scale.left, x2=scale.right, y1=top, y2=top, class_="rule")]
    for number in range(int(seconds / step) + 1):
        x = scale.x(scale.origin + number * step)
        parts.append(tag("line", x1=x, x2=x, y1=top, y2=top + 5, class_="rule"))
        anchor = "end" if x > scale.right - 16 else "middle"
        parts.append(tag("text", f"{number * step:g} s", x=x, y=top + 18, text_anchor=anchor))
    return join(*parts)


def _round(step: float) -> float:
    """Return the next number of seconds that people like to count in."""
    if step <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    nice = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.999)
    return round(nice, 6)


Draw = Callable[[float, float], Html]


def _marks(facts: RunFacts, scale: _Scale, centres: dict[str, float]) -> Iterator[Html]:
    """Yield what was said, then what was done: faults are drawn above all else."""
    taken: dict[tuple[str, MomentKind | None], float] = {}
    for moment in facts.moments:
        if moment.kind is MomentKind.CHECKPOINT:
            continue
        for name in [node for node in moment.nodes if node in centres] or [_JOB]:
            verdict = moment.kind is MomentKind.VERDICT
            x = _free(taken, (name, moment.kind), scale.x(moment.at), 10.0 if verdict else 8.0)
            y = centres[name] + (-14.0 if verdict else 14.0)
            shape = _triangle(x, y) if verdict else tag("circle", cx=x, cy=y, r=3.4, class_="notice")
            yield tag("g", tag("title", _said(moment, scale)), shape)
    for fault in facts.faults:
        if fault.at is None:
            continue
        name = _place(fault) if _place(fault) in centres else _JOB
        true = scale.x(fault.at)
        x = min(_free(taken, (name, None), true, 2 * _RADIUS), scale.right)
        y = centres[name]
        parts = [tag("title", _done(fault, scale))]
        if x - true > 1:
            parts.append(tag("line", x1=true, x2=x, y1=y, y2=y, class_="leader"))
        parts.append(tag("circle", cx=x, cy=y, r=_RADIUS, class_="fault"))
        parts.append(tag("text", str(fault.number), x=x, y=y + 4, text_anchor="middle", class_="on"))
        yield tag("g", *parts)


def _free(
    taken: dict[tuple[str, MomentKind | None], float], lane: tuple[str, MomentKind | None], x: float, room: float
) -> float:
    """Return the place next to `x` that no earlier mark of the lane covers."""
    x = max(x, taken.get(lane, -math.inf) + room)
    taken[lane] = x
    return x


def _said(moment: Moment, scale: _Scale) -> str:
    about = f" of {', '.join(moment.nodes)}" if moment.nodes else ""
    by = f", said by {', '.join(moment.by)}" if moment.by and moment.by != moment.nodes else ""
    detail = f"\n{moment.detail}" if moment.detail else ""
    return f"{moment.name}{about} at {scale.since(moment.at)}{by}{detail}"


def _done(fault: FaultFact, scale: _Scale) -> str:
    assert fault.at is not None
    noticed = f"\n{fault.detector} after {fault.noticed:.2f} s" if fault.noticed is not None else ""
    return f"{fault.number}: {fault.text} at {scale.since(fault.at)}{noticed}"


def _label(text: str, scale: _Scale, y: float) -> Html:
    room = int((scale.left - 8) / 6.8)
    shown = text if len(text) <= room else f"{text[: room - 1]}…"
    return tag("text", tag("title", text), shown, x=scale.left - 8, y=y + 4, text_anchor="end")


def _triangle(x: float, y: float) -> Html:
    return tag("path", d=f"M{x - 6:.1f} {y + 5:.1f}L{x + 6:.1f} {y + 5:.1f}L{x:.1f} {y - 6:.1f}Z", class_="verdict")


def _diamond(x: float, y: float, size: float, kind: str) -> Html:
    corners = f"M{x - size:.1f} {y:.1f}L{x:.1f} {y - size:.1f}L{x + size:.1f} {y:.1f}L{x:.1f} {y + size:.1f}Z"
    return tag("path", d=corners, class_=kind)


def _colour(generation: int) -> str:
    return f"g{(generation - 1) % COLOURS}"
