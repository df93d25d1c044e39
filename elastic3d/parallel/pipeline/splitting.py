"""What a backward pass in two parts cannot be combined with, beyond what a layout alone says."""

from __future__ import annotations

from elastic3d.errors import LayoutError
from elastic3d.parallel.numerics.recompute import Recompute
from elastic3d.planner.schedules import schedule_of
from elastic3d.values import Layout


def check(layout: Layout, recompute: Recompute) -> None:
    """Refuse selective recomputing, whose kept products torch hands out for one backward pass alone."""
    schedule = schedule_of(layout)
    if schedule is not None and schedule.splits_backward and recompute is Recompute.SELECTIVE:
        raise LayoutError(
            f'{layout}: schedule {schedule} goes back through a stage twice, which recompute="selective" does not '
            'allow; use recompute="full", or schedule=interleaved or 1f1b'
        )
