"""The report of a run as one HTML file that needs nothing else: no script, font or picture. Pure, but for a file."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from importlib.resources import files

from elastic3d.accounting.spans import Category
from elastic3d.cli.ckpt.render.words import percent
from elastic3d.cli.goodput_words import spelled
from elastic3d.pages.markup import Html, join, tag, text
from elastic3d.pages.template import filled, style, style_source
from elastic3d.report import sections
from elastic3d.report.document import RunEnding, RunReport

POLICY = "; ".join(("default-src 'none'", style_source(), "img-src data:", "base-uri 'none'", "form-action 'none'"))
"""The Content-Security-Policy: the page's own style, and nothing else, whatever is written into it."""

_BADGES = {RunEnding.DONE: "ok", RunEnding.FAILED: "bad", RunEnding.OPEN: "leaving"}
_REMARKS = 30


@functools.cache
def _template() -> str:
    return files("elastic3d.report").joinpath("report.html").read_text(encoding="utf-8")


def page(report: RunReport, *, written: float) -> str:
    """Return the page. written: when, by this machine's wall clock."""
    account = report.account
    return filled(
        _template(),
        {
            "policy": text(POLICY),
            "title": text(f"{account.run or 'a run'}: {report.ending}"),
            "style": style(),
            "head": _head(report),
            "written": text(f"written {_moment(written)}"),
            "remarks": _remarks(report),
            "figures": _figures(report),
            "sections": join(*sections.sections(report)),
        },
    )


def _head(report: RunReport) -> Html:
    badge = tag("span", report.ending, class_=f"state {_BADGES[report.ending]}")
    began = f"Its first event is of {_moment(report.account.first)}; all times below are since then."
    said = [tag("p", report.summary), tag("p", began)]
    if report.error:
        said.append(tag("p", f"The error: {report.error}", class_="wrong"))
    return join(tag("h1", report.account.run or "a run without a name"), badge, *said)


def _remarks(report: RunReport) -> Html:
    lines = report.account.remarks
    shown = [tag("li", line) for line in lines[:_REMARKS]]
    if len(lines) > _REMARKS:
        shown.append(tag("li", f"and {len(lines) - _REMARKS} more, which --json has"))
    return tag("ul", *shown, class_="warnings") if shown else Html("")


def _figures(report: RunReport) -> Html:
    account = report.account
    last = report.curve[-1] if report.curve else None
    loss = next((point.loss for point in reversed(report.curve) if point.loss is not None), None)
    committed = [one for one in report.checkpoints if one.committed is not None]
    lost = sum(one.steps_lost for one in report.generations)
    verified = [one.step for one in committed if one.verified]
    rows: list[tuple[str, object, object]] = [
        ("Steps that count", f"{account.steps:,}", f"{lost:,} were made again" if lost else "none was lost"),
        ("Last loss", f"{loss:.5g}" if loss is not None else "not known", f"step {last.step}" if last else ""),
        ("Duration", spelled(account.microseconds), ""),
        ("Nodes", len(account.nodes), f"held {spelled(account.held)} in all"),
        ("Generations", len(account.generations), ""),
        ("Goodput", percent(account.goodput, 1), "of the time that nodes were held"),
        (
            "Effective training time",
            percent(account.effective_training_time_ratio, 1),
            f"useful {spelled(account.by_category[Category.USEFUL])} of nodes' time",
        ),
        (
            "Checkpoints",
            len(committed),
            f"the newest that was read back is of step {max(verified)}" if verified else "none was read back",
        ),
    ]
    return join(*(tag("div", tag("dt", name), tag("dd", value, tag("small", more))) for name, value, more in rows))


def _moment(seconds: float) -> str:
    """Return a time of a wall clock in UTC: readers of a file may be anywhere."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
