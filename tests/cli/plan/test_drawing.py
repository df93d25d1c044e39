"""Drawings of placements and steps: complete where they fit, and never wider than the terminal."""

from __future__ import annotations

import pytest
from rich.console import Console, RenderableType

from elastic3d.cli.plan import mesh, steps
from elastic3d.planner.timeline import timeline
from elastic3d.values import Layout, Schedule


def drawn(picture: RenderableType, width: int) -> list[str]:
    """Return the lines of a drawing in a terminal of some width, without colours."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(picture)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert max(map(len, lines)) <= width
    return lines


def test_nodes_are_rows_and_slots_columns() -> None:
    """Axes of one rank are left out; spares are named."""
    layout = Layout(pp=2, dp=2, tp=2)
    assert drawn(mesh.mesh(layout, 4, 1, 60), 60) == [
        "  node 0  p0 d0 t0  p0 d0 t1  p0 d1 t0  p0 d1 t1",
        "  node 1  p1 d0 t0  p1 d0 t1  p1 d1 t0  p1 d1 t1",
        "  node 2  hot spare",
    ]
    assert drawn(mesh.mesh(Layout(pp=1, dp=2), 2, 0, 60), 60) == ["  node 0  d0  d1"]
    assert drawn(mesh.mesh(Layout(pp=1, dp=1), 1, 2, 60), 60) == ["  node 0  all", "  nodes 1-2  hot spares"]


def test_many_nodes_are_grouped_by_stage() -> None:
    """One line for the nodes of each stage, with ranges on every axis."""
    assert drawn(mesh.mesh(Layout(pp=2, dp=64, tp=8), 8, 3, 80), 80) == [
        "  nodes 0-63    pp 0  dp 0-63  tp 0-7",
        "  nodes 64-127  pp 1  dp 0-63  tp 0-7",
        "  nodes 128-130  hot spares",
    ]
    crowded = drawn(mesh.mesh(Layout(pp=64, dp=3), 8, 0, 80), 80)
    assert len(crowded) <= mesh.ROWS + 1


def test_a_step_shows_its_micro_batches_and_where_ranks_wait() -> None:
    """1F1B with four micro-batches on two ranks, as every text on it draws it."""
    assert drawn(steps.picture(timeline(Layout(pp=2, dp=1), 4), 24), 70) == [
        "  pp 0  01··0=21=32=·3=",
        "  pp 1  ·00=11=22=33=",
        "  1 forward  1= backward  · waiting: bubble 20.0%",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=1, dp=4),
        Layout(pp=8, dp=1),
        Layout(pp=4, dp=1, schedule=Schedule.INTERLEAVED, virtual=2),
        Layout(pp=4, dp=1, schedule=Schedule.ZBV, virtual=2, zero=2),
        Layout(pp=64, dp=1),
    ],
    ids=str,
)
def test_a_step_fits_any_terminal(layout: Layout, width: int) -> None:
    """With all its ranks or as many as are readable, and the share of time in which they wait."""
    for micro_batches in (layout.pp, 8 * layout.pp):
        lines = drawn(steps.picture(timeline(layout, micro_batches), width), width)
        assert sum(line.startswith("  pp ") for line in lines) == min(layout.pp, steps.RANKS)
        assert "bubble" in " ".join(lines)
