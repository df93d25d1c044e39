"""The card, for people and as one JSON document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from chaos.score.card import Row
from chaos.score.results import Result
from elastic3d.values import to_json

SCHEMA = 1


def line(result: Result) -> str:
    """Return what became of one trial in one line."""
    if result.skipped:
        return f"{result.trial}: skipped, {result.skipped}"
    first = result.first
    said = f"{first.fault} on {', '.join(first.nodes) or 'nobody'} after {first.after:.1f} s" if first else "nothing"
    bits = "same bits" if result.same_bits else "OTHER BITS"
    back = "" if math.isnan(result.recovered) else f", next step after {result.recovered:.1f} s"
    broken = "".join(f"\n    {text}" for text in result.broken)
    return f"{result.trial}: {said}{back}; {bits}{broken}"


def table(rows: tuple[Row, ...]) -> Table:
    """Return the card for a terminal."""
    shown = Table(box=None)
    for name in (
        "kind",
        "jobs",
        "precision",
        "recall",
        "culprit",
        "p50",
        "p95",
        "bar",
        "next step",
        "lost",
        "same bits",
    ):
        shown.add_column(name, justify="left" if name == "kind" else "right")
    for row in rows:
        style = "" if row.passed else "bold red" if row.trials else "yellow"
        shown.add_row(
            row.kind,
            str(row.trials),
            f"{row.precision:.2f}",
            f"{row.recall:.2f}",
            f"{row.culprits:.2f}",
            *(_seconds(value) for value in (row.p50, row.p95)),
            f"{row.bar:.0f} s" if row.bar else "none",
            _seconds(row.recovered_p50),
            str(row.steps_lost),
            f"{row.same_bits} of {row.trials}" if row.trials else "skipped",
            style=style,
        )
    return shown


def document(
    rows: Sequence[Row], results: Sequence[Result], *, wanted: int, interrupted: bool = False
) -> dict[str, Any]:
    """Return the card as `--json` prints it. Numbers that were not measured are null.

    wanted: trials that were asked for. interrupted: whether somebody ended it before they all were over.
    """
    shown = [
        {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in to_json(row).items()
        }
        | {"passed": row.passed}
        for row in rows
    ]
    return {
        "schema": SCHEMA,
        "wanted": wanted,
        "interrupted": interrupted,
        "rows": shown,
        "jobs": [result.document() for result in results],
    }


def _seconds(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1f} s"
