"""The curves of a run by its steps, as pictures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic3d.pages.plots import Plot, PlotMark, PlotPoint

SeriesPoint = Sequence[float | int | None]
"""A point of `StepSeries.chunks`: step, loss, seconds, generation, and perhaps the lowest loss and the highest."""

SECONDS_HIGH = 3.0
"""How many times the 95th percentile a step may take to be in the picture: single ones would flatten the rest."""


def loss_plot(points: Sequence[SeriesPoint], class_: str = "") -> Plot:
    """Return the curve of the loss."""
    drawn = [
        PlotPoint(x=at, y=loss, low=low, high=high)
        for one in points
        for at, loss, _, _, low, high in [(*one, None, None)[:6]]
        if at is not None and loss is not None
    ]
    return Plot(title="Loss by step", kind="loss", points=drawn, marks=_marks(points), across=_step, class_=class_)


def seconds_plot(points: Sequence[SeriesPoint], class_: str = "") -> Plot:
    """Return the curve of the seconds that steps took."""
    drawn = [PlotPoint(x=one[0], y=one[2]) for one in points if one[0] is not None and one[2] is not None]
    usual = sorted(one.y for one in drawn)
    most = SECONDS_HIGH * usual[int(0.95 * (len(usual) - 1))] if usual else 0.0
    cut = [PlotPoint(x=one.x, y=min(one.y, most)) if most > 0 else one for one in drawn]
    marks = _marks(points)
    return Plot(
        title="Seconds of a step",
        kind="time",
        points=cut,
        marks=marks,
        across=_step,
        from_zero=True,
        unit=" s",
        class_=class_,
    )


def _marks(points: Sequence[SeriesPoint]) -> list[PlotMark]:
    """Return where a generation began."""
    marks: list[PlotMark] = []
    before: float | int | None = None
    for one in points:
        if before is not None and one[3] != before and one[0] is not None:
            marks.append(PlotMark(x=one[0], name=f"g{one[3]}"))
        before = one[3]
    return marks


_step: Callable[[float], str] = "{:.0f}".format
