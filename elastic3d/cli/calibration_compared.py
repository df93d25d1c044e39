"""The display of two calibrations that were compared."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic3d.calibration.comparison import ComparedSpeed, Comparison, SpeedChange
from elastic3d.cli.plan.shown import spell_time
from elastic3d.cli.render import clean

NARROW = 100
_STYLES = {
    SpeedChange.SLOWER: "bold red",
    SpeedChange.FASTER: "green",
    SpeedChange.UNKNOWN: "dim",
    SpeedChange.SAME: "",
}


def compared(comparison: Comparison, width: int) -> RenderableType:
    """Return the table of what got slower or faster, and what each line means; below it where space is short."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("", "before", "now", "speed", ""):
        made.add_column(column, justify="right" if column in ("before", "now", "speed") else "left", no_wrap=True)
    wide = width >= NARROW
    if wide:
        made.add_column("what it is", overflow="fold")
    for one in comparison.speeds:
        said = str(one.change) if one.change is not SpeedChange.UNKNOWN else "not compared"
        cells = [Text(one.what), _figure(one.before, one), _figure(one.after, one), _ratio(one)]
        cells.append(Text(said, style=_STYLES[one.change]))
        if wide:
            cells.append(Text(_meaning(one), style="dim"))
        made.add_row(*cells)
    lines: list[RenderableType] = [
        Text(f"before: made {clean(comparison.before)}; now: made {clean(comparison.after)}", style="dim"),
        made,
    ]
    if not wide:
        lines += [Text(f"  {one.what}: {_meaning(one)}", style="dim") for one in comparison.speeds]
    lines += [Text(clean(note), style="yellow") for note in comparison.notes]
    within = f"{comparison.tolerance:.3%}".replace(".000", "")
    style = "bold red" if comparison.slower else "bold"
    lines.append(
        Text(
            f"{comparison.slower} slower and {comparison.faster} faster by more than {within}"
            if comparison.slower or comparison.faster
            else f"nothing is slower or faster by more than {within}",
            style=style,
        )
    )
    return Group(*lines)


def _figure(value: float | None, one: ComparedSpeed) -> Text:
    if value is None:
        return Text("-")
    if one.unit == "s":
        return Text(spell_time(value))
    return Text(f"{value / 1e12:.3g} TFLOP/s" if one.unit == "FLOP/s" else f"{value / 1e9:.3g} GB/s")


def _ratio(one: ComparedSpeed) -> Text:
    return Text("-" if one.ratio is None else f"x {one.ratio:.2f}", style=_STYLES[one.change])


def _meaning(one: ComparedSpeed) -> str:
    return clean(f"{one.means}; {one.why}" if one.why else one.means)
