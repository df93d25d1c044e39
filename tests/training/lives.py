"""A run's generations in this process, one after the other: what one keeps, the next goes on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic3d.provenance.record import ScriptOrigin
from elastic3d.training import Run
from elastic3d.values import Layout
from tests.parallel.worlds import Ended, Files, Host, Orders


def live(
    main: Callable[[Run], Any],
    *,
    keep: Path | None = None,
    take: Path | None = None,
    leave_at: int = 0,
    origin: ScriptOrigin | None = None,
) -> Any:
    """Run `main` as a generation of one rank; return its result, None where it was asked to leave.

    keep, take: folders for snapshots, and of them. leave_at: steps of this generation before it is to leave, 0 for all.
    origin: of the states that it makes.
    Errors of `main` and of the run come through.
    """
    leaves = {0: leave_at - 1} if leave_at else {}
    orders = Orders(layout=Layout(pp=1, dp=1), keep=keep, take=take, leave_at=leaves)
    try:
        return main(Run(Host(orders, 0, ("", 0), ""), tiers=Files(), origin=origin))
    except Ended:
        return None
