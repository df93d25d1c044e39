"""The report of a run: one HTML page that needs nothing else, neither files nor scripts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import PurePath

from chaos.report.facts import Fate, FaultFact, GenerationFact, Points, RunFacts
from chaos.report.parts import SPACE, count, duration, mark, pairs, promise_table, source, table, verdict_box, whole
from chaos.report.plot import loss_curves
from chaos.report.random_documents import replay_command
from chaos.report.timeline import timeline
from elastic3d.pages.markup import Html, block, join, tag

WIDE, NARROW = 1080, 376
"""CSS pixels of the picture on a desk and in a hand."""


def page(facts: RunFacts, folder: str) -> str:
    """Return the page. folder: from which the run is replayed, as a person would type it."""
    title = f"{PurePath(facts.script).name}: {'a promise was broken' if facts.broken else 'every promise held'}"
    return whole(title, _parts(facts, folder))


def _parts(facts: RunFacts, folder: str) -> Iterator[Html]:
    yield _verdict(facts)
    yield _about(facts, folder)
    yield tag("h2", "The run")
    yield tag("div", timeline(facts, WIDE), class_="wide")
    yield tag("div", timeline(facts, NARROW), class_="narrow")
    yield _legend()
    yield tag("h2", "Faults")
    yield _faults(facts)
    yield tag("h2", "Generations")
    yield _generations(facts)
    yield tag("h2", "Promises")
    yield promise_table(facts.promises)
    yield tag("h2", "Loss")
    yield tag("div", _loss(facts), class_="loss")
    if facts.logs:
        yield tag("h2", "Logs of nodes that ended badly")
        yield from (tag("details", tag("summary", name), block(log)) for name, log in facts.logs.items())


def sentence(facts: RunFacts) -> str:
    """Return the verdict in one sentence."""
    made = sum(fault.fate is Fate.MADE for fault in facts.faults)
    if len(facts.broken) > 1:
        return f"{len(facts.broken)} promises were broken."
    if facts.broken:
        return f"A promise was broken: {facts.broken[0].says}."
    bits = _alike(facts)
    what = f"after {count(made, 'fault')} the job ended {bits}"
    if facts.skipped:
        return f"Every promise held, as far as it was tried: {what}; {count(len(facts.skipped), 'fault')} skipped."
    return f"Every promise held: {what}."


def _alike(facts: RunFacts) -> str:
    if facts.tolerance is None:
        return (
            "with the bits of a run that nothing happened to" if facts.same_bits else "but its bits were not compared"
        )
    if facts.same_losses:
        return f"with the losses of a run that nothing happened to, within {facts.tolerance:g} of each"
    return "but its losses were not compared"


def _verdict(facts: RunFacts) -> Html:
    alike = facts.same_bits if facts.tolerance is None else facts.same_losses
    kind = "bad" if facts.broken else "warn" if facts.skipped or alike is None else "good"
    seen = [text for promise in facts.broken for text in promise.broken]
    return verdict_box(sentence(facts), seen, kind)


def _about(facts: RunFacts, folder: str) -> Html:
    last = max((step.number for step in facts.made if step.counts), default=0)
    slots = "" if facts.slots == 1 else f" of {facts.slots} trainers each"
    other = facts.drawn_from not in (None, facts.seed)
    rows = [
        ("script", tag("code", shlex.join([facts.script, *facts.arguments]))),
        ("nodes", f"{facts.nodes} to start with{slots}"),
        ("seed", f"{facts.seed}, of the schedule {facts.drawn_from}" if other else str(facts.seed)),
        ("steps", f"{last} of {facts.steps}"),
        ("judged", "bits" if facts.tolerance is None else f"losses, within {facts.tolerance:g} of each"),
        ("duration", duration(facts.ended - facts.began)),
        ("play again", tag("code", replay_command(folder))),
    ]
    timed = [fault.text for fault in facts.faults if fault.replay == "timed"]
    if timed:
        rows.append(("not exactly again", f"{', '.join(timed)}: it lasts for real seconds"))
    return pairs(rows)


def _legend() -> Html:
    def key(text: str, *shapes: Html) -> Html:
        return tag("li", tag("svg", *shapes, width=22, height=18, viewBox="0 0 22 18", aria_hidden="true"), text)

    bar = {"x": 1, "y": 3, "width": 20, "height": 12}
    number = tag("text", "1", x=11, y=13, text_anchor="middle", class_="on")
    return tag(
        "ul",
        key("active, in the colour of its generation", tag("rect", class_="g0", **bar)),
        key(
            "its trainers start and get their state",
            tag("rect", class_="g0", **bar),
            tag("rect", class_="forming", **bar),
        ),
        key("spare", tag("rect", class_="g0 spare", **bar)),
        key("has joined", tag("rect", x=1, y=6, width=20, height=6, class_="g0 coming")),
        key("what was done: its number below", tag("circle", cx=11, cy=9, r=8, class_="fault"), number),
        key("verdict", tag("path", d="M5 14L17 14L11 3Z", class_="verdict")),
        key("somebody noticed something", tag("circle", cx=11, cy=9, r=4, class_="notice")),
        key("no step is made, until the next generation's first", tag("rect", class_="recovery", **bar)),
        key("checkpoint", tag("path", d="M6 9L11 4L16 9L11 14Z", class_="saved")),
        class_="legend",
    )


def _faults(facts: RunFacts) -> Html:
    names = ("", "what", "where", "when", "what is promised", "noticed by", "next step", "promise")
    return table(names, (_fault(fault, facts) for fault in facts.faults))


def _fault(fault: FaultFact, facts: RunFacts) -> Iterator[Html | str]:
    yield str(fault.number)
    yield tag("strong", fault.text)
    yield (fault.node or "the job") if fault.at is not None else ""
    yield f"{fault.at - facts.origin:.2f}{SPACE}s" if fault.at is not None else ""
    yield join(fault.promised, source(fault.page, fault.row))
    yield _noticed(fault)
    yield f"after{SPACE}{fault.next_step:.2f}{SPACE}s" if fault.next_step is not None else ""
    if fault.fate is Fate.SKIPPED:
        yield join(mark("skipped", "warn"), tag("div", fault.why, class_="small"))
    elif fault.fate is Fate.MISSED:
        yield join(mark("not made", "bad"), tag("div", "its moment never came", class_="small"))
    elif facts.broken:
        yield join(mark("broken", "bad"), tag("div", "in this run; see Promises", class_="small"))
    elif fault.detector and fault.noticed is None:
        yield join(mark("held", "good"), tag("div", "but nobody noticed it", class_="small"))
    else:
        yield mark("held", "good")


def _noticed(fault: FaultFact) -> Html | str:
    if not fault.detector:
        return "nobody has to"
    bar = f" of {fault.bar:g}{SPACE}s" if fault.bar else ""
    if fault.at is None:
        return join(
            tag("code", fault.detector),
            tag("div", f"within {fault.bar:g}{SPACE}s" if fault.bar else "", class_="small"),
        )
    if fault.noticed is None:
        return join(tag("code", fault.detector), tag("div", "never", class_="small"))
    late = bool(fault.bar) and fault.noticed > fault.bar
    taken = f"after{SPACE}{fault.noticed:.2f}{SPACE}s{bar}"
    shown = mark(f"{taken}: late", "warn") if late else tag("div", taken, class_="small")
    return join(tag("code", fault.detector), Html(" "), shown)


def _generations(facts: RunFacts) -> Html:
    names = ("", "cause", "nodes", "layout", "first step", "steps repeated", "to the first step", "state from")
    return table(names, map(_generation, facts.generations))


def _generation(view: GenerationFact) -> Iterator[Html | str]:
    yield str(view.number)
    yield join(view.cause, tag("div", view.detail, class_="small")) if view.detail else view.cause
    yield ", ".join(view.nodes) + (f"; spare: {', '.join(view.spares)}" if view.spares else "")
    yield view.layout
    yield "none" if view.first_step is None else str(view.first_step)
    yield str(view.repeated)
    yield "" if view.first_at is None or view.caused_at is None else f"{view.first_at - view.caused_at:.2f}{SPACE}s"
    yield {"none": "the beginning", "": ""}.get(view.source, view.source)


def _loss(facts: RunFacts) -> Html:
    counted = [(step.number, float.fromhex(step.loss)) for step in facts.made if step.counts]
    marks = [(view.first_step, view.number, view.cause) for view in facts.generations if view.first_step is not None]
    quiet = _curve(facts.quiet)
    # Its own text is escaped where it is drawn.
    return Html(loss_curves(counted, marks, quiet or None))


def _curve(points: Points) -> list[tuple[int, float]]:
    return [(step, float.fromhex(loss)) for step, loss in zip(points.steps, points.losses, strict=False)]
