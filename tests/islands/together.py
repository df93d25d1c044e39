"""Islands that train at the same time, and what they have come to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.machine.processes import wait_until
from checkpointing import open_store
from elastic3d.islands import Islands
from elastic3d.islands.exchange import Exchange
from elastic3d.islands.record import Sealed
from elastic3d.training import Run
from elastic3d.values import Layout
from tests.islands import mains
from tests.parallel.worlds import Orders, Report, run_world

ALONE = Layout(pp=1, dp=1)


class Together:
    """Islands that train at the same time, each a world of its own, around one store."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.store = folder / "between"
        self._options = {"every": mains.EVERY, "patience": 60, "longest": 100, "minimum": 2, "keep": None} | options
        self._threads: dict[str, threading.Thread] = {}
        self._reports: dict[str, list[Report]] = {}

    def start(self, name: str, layout: Layout = ALONE, main: Callable[[Run], Any] = mains.train, **orders: Any) -> None:
        """Start an island; orders: of its hosts."""
        islands = Islands(store=self.store, **(self._options | orders.pop("options", {})))
        given = Orders(layout=layout, islands=islands, run_id=name, **orders)

        def run() -> None:
            self._reports[name] = run_world(main, given)

        self._threads[name] = threading.Thread(target=run)
        self._threads[name].start()

    def end(self, name: str, how: str = "done") -> list[Report]:
        """Wait for an island; return its ranks' reports."""
        self._threads.pop(name).join()
        for report in self._reports[name]:
            assert report.ended == how, f"{name}: {report.ended}: {report.error}"
        return self._reports[name]

    def await_that(self, seen: Callable[[Exchange], Any]) -> None:
        """Wait until something is in the store."""
        assert wait_until(lambda: self.store.exists() and seen(Exchange(open_store(str(self.store), write=False))), 60)

    @property
    def records(self) -> list[Sealed]:
        """All outer steps."""
        return list(Exchange(open_store(str(self.store))).records())


def results(reports: list[Report]) -> tuple[str, str]:
    """Return the digests of an island, which all its ranks agree on; all of its samples are accounted for."""
    assert all(report.result[2] for report in reports)
    (one,) = {report.result[:2] for report in reports}
    return one
