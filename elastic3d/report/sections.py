"""The sections of a report's page. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from elastic3d.accounting.spans import Category
from elastic3d.cli.ckpt.render.words import count, percent, size
from elastic3d.cli.durations import spell
from elastic3d.cli.goodput_words import held_time, most_lost, spelled, spelled_parts, useful_share
from elastic3d.pages.curves import loss_plot
from elastic3d.pages.findings import cards
from elastic3d.pages.generations import generation_row
from elastic3d.pages.markup import Html, join, tag
from elastic3d.pages.plots import Plot, PlotMark, PlotPoint, bar, plotted
from elastic3d.report.document import ReportRecovery, RunReport
from elastic3d.report.timelines import key, ruler, timeline

ROWS = 200
"""Most rows of a table; --json has all."""

TIMELINES = 64
"""Most nodes whose time is drawn."""

NOTHING = (
    "Nothing was found about this run: no rank held others up, and no numbers were wrong, as far as its files tell."
)


def sections(report: RunReport) -> Iterator[Html]:
    """Yield the sections, in order."""
    yield _section("curves", "Curves", _curves(report))
    yield _section("nodes", "What the time of each node went to", _timelines(report))
    yield _section("time", "Where the time went", _categories(report), _causes(report), _nodes(report))
    yield _section("generations", "Generations", _generations(report))
    yield _section("recoveries", "Recoveries and changes", _recoveries(report))
    yield _section("found", "What was found", cards(report.findings, NOTHING))
    yield _section("checkpoints", "Checkpoints", _checkpoints(report), _troubles(report))


def _section(name: str, title: str, *parts: Html) -> Html:
    return tag("section", tag("h2", title, id=f"h-{name}"), *parts, aria_labelledby=f"h-{name}")


def _table(label: str, heads: Sequence[tuple[str, str]], rows: Sequence[Html], more: int = 0) -> Html:
    """Return a table that scrolls by itself. heads: name and class of each column. more: rows that are left out."""
    head = tag("tr", *(tag("th", name, scope="col", class_=kind or None) for name, kind in heads))
    table = tag("table", tag("thead", head), tag("tbody", *rows))
    note = tag("p", f"and {more:,} more, which --json has", class_="note") if more > 0 else ""
    return join(tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=label), note)


def _curves(report: RunReport) -> Html:
    steps = [(one.step, one.loss, one.seconds, one.generation, one.low, one.high) for one in report.curve]
    loss, made = loss_plot(steps), throughput_plot(report)
    return tag(
        "div",
        tag("figure", tag("figcaption", "Loss by step"), plotted(loss)),
        tag("figure", tag("figcaption", f"{made.title}, over the run's time"), plotted(made)),
        class_="pair",
    )


def throughput_plot(report: RunReport) -> Plot:
    """Return the curve of what was made, with a mark where a generation was sealed."""
    return Plot(
        title=f"{report.throughput_unit.capitalize()} a second that count",
        kind="time",
        points=[PlotPoint(x=one.at, y=one.per_second) for one in report.throughput],
        marks=[PlotMark(x=one.sealed, name=f"g{one.number}") for one in report.generations],
        across=lambda at: spelled(round(at)),
        least=0.0,
        most=float(report.account.microseconds),
        from_zero=True,
        unit="/s",
    )


def _timelines(report: RunReport) -> Html:
    """Return a row for each node; of many, for those whose time was useful least."""
    useful = {one.node: useful_share(one) for one in report.account.nodes}
    poor = {node for node, _ in sorted(useful.items(), key=lambda item: item[1])[:TIMELINES]}
    shown = [one for one in report.timelines if one.node in poor]
    length = report.account.microseconds
    rows = [
        tag(
            "tr",
            tag("th", one.node, scope="row"),
            tag("td", percent(useful[one.node], 1), class_="number"),
            tag("td", timeline(one, length), class_="row"),
        )
        for one in shown
    ]
    heads = [("node", ""), ("useful", "number"), (ruler(report), "row")]
    seen = {band.category for one in shown for band in one.bands}
    left_out = len(report.timelines) - len(shown)
    note = tag("p", f"and {count(left_out, 'node')} whose time was useful more", class_="note") if left_out else ""
    return join(key(seen), tag("div", _table("Time of each node", heads, rows), class_="lines"), note)


def _categories(report: RunReport) -> Html:
    account = report.account
    rows = []
    for category in Category:
        spent = account.by_category[category]
        if not spent:
            continue
        away = category is Category.AWAY or not account.held
        share = 0.0 if away else spent / account.held
        drawn = "" if away else bar([(f"c-{category}", share, f"{category}: {percent(spent, account.held)}")])
        rows.append(
            tag(
                "tr",
                tag("th", str(category), scope="row"),
                tag("td", drawn, class_="row"),
                tag("td", "" if away else percent(spent, account.held), class_="number"),
                tag("td", spelled(spent), class_="number"),
            )
        )
    heads = [("category", ""), ("", "row"), ("share", "number"), ("node-time", "number")]
    return _table("Time by category", heads, rows)


def _causes(report: RunReport) -> Html:
    spent: dict[str, Counter[Category]] = defaultdict(Counter)
    number: Counter[str] = Counter()
    for one in report.account.generations:
        number[one.cause] += 1
        spent[one.cause].update(one.by_category)
    rows = []
    for cause, counted in sorted(spent.items(), key=lambda item: -item[1].total()):
        rows.append(
            tag(
                "tr",
                tag("th", tag("span", (cause or "not known").replace("_", " "), class_="cause"), scope="row"),
                tag("td", f"{number[cause]:,}", class_="number"),
                tag("td", percent(counted.total(), report.account.held), class_="number"),
                tag("td", spelled(counted.total()), class_="number"),
                tag("td", ", ".join(spelled_parts(counted)), class_="text"),
            )
        )
    heads = [("cause", ""), ("generations", "number"), ("share", "number"), ("node-time", "number"), ("of which", "")]
    return _table("Time by cause", heads, rows[:ROWS], len(rows) - ROWS)


def _nodes(report: RunReport) -> Html:
    ordered = sorted(report.account.nodes, key=useful_share)
    rows = [
        tag(
            "tr",
            tag("th", one.node, scope="row"),
            tag("td", spelled(held_time(one)), class_="number"),
            tag("td", percent(useful_share(one), 1), class_="number"),
            tag("td", most_lost(one), class_="text"),
        )
        for one in ordered[:ROWS]
    ]
    heads = [("node", ""), ("held", "number"), ("useful", "number"), ("lost most to", "")]
    return _table("Time by node", heads, rows, len(ordered) - ROWS)


def _generations(report: RunReport) -> Html:
    rows = []
    for one in report.generations[-ROWS:]:
        made = "none" if one.first_step is None else f"{one.first_step} to {one.last_step}"
        lost = f", {one.steps_lost} lost" if one.steps_lost else ""
        more = [
            tag("td", made + lost, class_="number"),
            tag("td", spelled(one.microseconds), class_="number"),
        ]
        rows.append(generation_row(one, f"{one.start}.{one.number}", f"+ {spelled(one.sealed)}", more))
    heads = [
        ("number", "number"),
        ("sealed", ""),
        ("cause", ""),
        ("nodes", "number"),
        ("in and out", ""),
        ("layout", "wide"),
        ("steps", "number"),
        ("cost in node-time", "number"),
        ("why", ""),
    ]
    return _table("Generations", heads, rows, len(report.generations) - ROWS)


def _recoveries(report: RunReport) -> Html:
    longest = max((one.microseconds for one in report.recoveries), default=0)
    rows = [
        tag(
            "tr",
            tag("th", one.generation, scope="row", class_="number"),
            tag("td", f"+ {spelled(one.at)}", class_="nowrap"),
            tag("td", tag("span", (one.cause or "not known").replace("_", " "), class_="cause")),
            tag("td", spelled(sum(part.microseconds for part in one.parts)), class_="number"),
            tag("td", _drawn(one, longest), class_="row"),
            tag("td", ", ".join(spelled_parts(_summed(one))), class_="text"),
            tag("td", {"none": "the beginning"}.get(one.state, one.state)),
            tag("td", one.node),
        )
        for one in report.recoveries[-ROWS:]
    ]
    heads = [
        ("generation", "number"),
        ("began", ""),
        ("cause", ""),
        ("took", "number"),
        ("", "row"),
        ("parts", ""),
        ("state from", ""),
        ("as seen by", ""),
    ]
    said = "The time before the first step of each generation, as the node of its rank 0 spent it."
    return join(tag("p", said), _table("Recoveries", heads, rows, len(report.recoveries) - ROWS))


def _summed(one: ReportRecovery) -> Counter[Category]:
    summed: Counter[Category] = Counter()
    for part in one.parts:
        summed[part.category] += part.microseconds
    return summed


def _drawn(one: ReportRecovery, longest: int) -> Html:
    whole = max(1, longest)
    return bar(
        [(f"c-{category}", spent / whole, f"{category} {spelled(spent)}") for category, spent in _summed(one).items()]
    )


def _checkpoints(report: RunReport) -> Html:
    if not report.checkpoints:
        return tag("p", "No node wrote that a checkpoint was made.")
    rows = []
    for one in reversed(report.checkpoints[-ROWS:]):
        marks = [f"read back: {one.verified}"] if one.verified else []
        marks += ["audits vouch for it"] if one.vetted else []
        done = one.committed is not None
        rows.append(
            tag(
                "tr",
                tag("th", one.step, scope="row", class_="number"),
                tag("td", f"+ {spelled(one.committed)}" if one.committed is not None else "not committed"),
                tag("td", one.generation or "", class_="number"),
                tag("td", one.nodes or "", class_="number"),
                tag("td", size(one.bytes) if one.nodes else "", class_="number"),
                tag("td", size(one.new) if one.nodes else "", class_="number"),
                tag("td", spell(one.seconds) if one.seconds else "", class_="number"),
                tag("td", "; ".join(marks)),
                class_=None if done else "leaving",
            )
        )
    heads = [
        ("step", "number"),
        ("committed", ""),
        ("generation", "number"),
        ("nodes", "number"),
        ("bytes", "number"),
        ("of these new", "number"),
        ("written in", "number"),
        ("verified", ""),
    ]
    return _table("Checkpoints", heads, rows, len(report.checkpoints) - ROWS)


def _troubles(report: RunReport) -> Html:
    if not report.troubles:
        return tag("p", "No save and no reading back failed.")
    rows = [
        tag(
            "tr",
            tag("td", f"+ {spelled(one.at)}", class_="nowrap"),
            tag("td", one.event, class_="nowrap"),
            tag("td", "" if one.step is None else one.step, class_="number"),
            tag("td", ", ".join(one.nodes[:4]) + (f" and {len(one.nodes) - 4} more" if len(one.nodes) > 4 else "")),
            tag("td", f"{one.times:,}", class_="number"),
            tag("td", one.error, class_="text"),
            class_="bad",
        )
        for one in report.troubles[-ROWS:]
    ]
    heads = [("first", ""), ("what", ""), ("step", "number"), ("node", ""), ("times", "number"), ("why", "")]
    return _table("What failed of checkpoints", heads, rows, len(report.troubles) - ROWS)
