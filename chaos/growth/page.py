"""The page of a soak: one file of HTML, of a bounded size however long the soak was.

A curve has a bounded number of points, the picture of the faults one line for each kind and column of pixels, the list
of faults the first and the last ones, and a promise its first texts. All of it is in the folder's other files.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from chaos.growth.facts import SoakFacts, SoakFault
from chaos.growth.measures import Measure
from chaos.growth.plot import panels
from chaos.growth.verdict import SoakVerdict
from chaos.report.parts import SPACE, count, duration, mark, pairs, promise_table, table, verdict_box, whole
from chaos.report.random_documents import replay_command
from elastic3d.pages.markup import Html, block, join, tag

FAULTS = 100
"""Faults that are listed from the beginning of a soak, and as many from its end."""
WIDTH, LEFT, ROW = 1080, 130, 24
"""Pixels of the picture of the faults, of the words beside it, and of a row."""

_KINDS = {SoakVerdict.PASSED: "good", SoakVerdict.FAILED: "bad", SoakVerdict.SHORT: "warn"}


def soak_page(facts: SoakFacts, series: Sequence[Measure], folder: str) -> str:
    """Return the page. folder: from which the soak is played again, as a person would type it."""
    return whole(f"soak of {PurePath(facts.script).name}: {facts.verdict}", _parts(facts, series, folder))


def _parts(facts: SoakFacts, series: Sequence[Measure], folder: str) -> Iterator[Html]:
    yield verdict_box(_sentence(facts), facts.wrong or facts.lacking, _KINDS[facts.verdict])
    yield pairs(_about(facts, folder))
    yield tag("h2", "What grows, and what does not")
    yield tag(
        "p",
        "A series grows if its line is steeper than a bar, by the hour or by the generation, if it rises by more than "
        "a floor over the run, and if the later half rises too. Lines leave out the first quarter, two hours at most.",
        class_="small",
    )
    yield _slopes(series)
    yield tag("h2", "Series")
    yield tag("div", *map(Html, panels(series)), class_="growth")
    yield tag("h2", "Faults")
    if facts.faults:
        yield _picture(facts)
        yield _faults(facts.faults)
    else:
        yield tag("p", "None was made.")
    yield tag("h2", "Promises")
    yield promise_table(facts.promises) if facts.promises else tag("p", "None was judged.")
    if facts.logs:
        yield tag("h2", "Logs of nodes that ended badly")
        yield from (tag("details", tag("summary", name), block(log)) for name, log in facts.logs.items())


def _sentence(facts: SoakFacts) -> str:
    long = f"in {duration(facts.seconds)} with {count(len(facts.faults), 'fault')}"
    if facts.verdict is SoakVerdict.PASSED:
        return f"Nothing grows, and every promise held, {long}."
    if facts.verdict is SoakVerdict.SHORT:
        return f"Too short to say that nothing grows: {duration(facts.seconds)}, {count(len(facts.faults), 'fault')}."
    return f"{count(len(facts.wrong), 'thing')} went wrong {long}."


def _about(facts: SoakFacts, folder: str) -> Iterator[tuple[str, Html | str]]:
    causes = ", ".join(f"{number} by {cause}" for cause, number in sorted(facts.generations.items()))
    yield "script", tag("code", shlex.join([facts.script, *facts.arguments]))
    yield "nodes", str(facts.nodes)
    yield "seed", str(facts.seed)
    yield "faults", f"for {duration(facts.trained)} of {duration(facts.asked)}, one about every {facts.every:g} s"
    yield "duration", duration(facts.seconds)
    yield "steps", f"{facts.steps}, {facts.repeated} of them again"
    yield "generations", f"{sum(facts.generations.values())}: {causes}" if causes else "none"
    yield "samples", str(facts.samples)
    if facts.stopped:
        yield "ended", facts.stopped
    if facts.faults:
        yield "play again", tag("code", replay_command(folder, "--no-compare"))


def _slopes(series: Sequence[Measure]) -> Html:
    names = ("series", "at the start", "an hour", "a generation", "over the run", "later half, an hour", "grows")
    return table(names, map(_slope, series))


def _slope(measure: Measure) -> Iterator[Html | str]:
    line, bar, group = measure.line, measure.bar, measure.group
    yield join(tag("strong", measure.name), tag("div", f"{group.name}, {group.unit}".rstrip(", "), class_="small"))
    values: tuple[float | None, ...] = (None,) * 5
    bars: tuple[float | None, ...] = (None,) * 5
    if line is not None:
        values = (line.start, line.per_hour, line.per_generation, line.growth, line.later)
    if bar is not None:
        floor = bar.floor if line is None else max(bar.floor, bar.share * line.start)
        bars = (None, bar.per_hour, bar.per_generation, floor, None)
    words = ("", "bar", "bar", "floor", "")
    for value, most, word in zip(values, bars, words, strict=True):
        shown = "" if value is None else group.shown(value)
        yield shown if most is None else join(shown, tag("div", f"{word}{SPACE}{group.shown(most)}", class_="small"))
    if bar is None:
        yield tag("span", "not judged", class_="small")
    elif line is None:
        yield mark("too short", "warn")
    else:
        yield mark("yes", "bad") if measure.grows else mark("no", "good")


def _picture(facts: SoakFacts) -> Html:
    """Return when which kind of fault was made: a line of each kind, for each column of pixels once."""
    kinds = [word for word, _ in Counter(one.word for one in facts.faults).most_common()]
    span = max(facts.seconds, *(one.after for one in facts.faults), 1.0)
    height = ROW * len(kinds) + 20
    shapes: list[Html] = []
    for row, word in enumerate(kinds):
        own = [one for one in facts.faults if one.word == word]
        columns = sorted({LEFT + round((WIDTH - LEFT - 10) * one.after / span) for one in own})
        y = ROW * row
        shapes += [
            tag("text", f"{word} ({len(own)})", x=0, y=y + 16),
            tag("line", x1=LEFT, x2=WIDTH - 10, y1=y + 20, y2=y + 20, class_="rule"),
            tag("path", d="".join(f"M{x} {y + 5}v13" for x in columns), class_="done"),
        ]
    for tick in range(5):
        x = LEFT + (WIDTH - LEFT - 10) * tick / 4
        anchor = "end" if tick == 4 else "middle"
        shapes.append(tag("text", duration(span * tick / 4), x=x, y=height - 4, text_anchor=anchor))
    return tag("svg", *shapes, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label="faults over time")


def _faults(faults: Sequence[SoakFault]) -> Html:
    numbered = list(enumerate(faults, 1))
    left_out = max(0, len(faults) - 2 * FAULTS)
    shown = numbered[:FAULTS] + numbered[FAULTS:][left_out:]
    rows = ((str(number), one.text, duration(one.after)) for number, one in shown)
    words = f"the first {FAULTS} and the last {FAULTS} of {len(faults)}; all are in schedule.toml and picture.json"
    summary = tag("summary", words if left_out else f"all {len(faults)}")
    return tag("details", summary, table(("", "what", "after"), rows))
