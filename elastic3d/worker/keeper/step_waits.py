"""What all nodes wait for within steps, as this keeper hears it: for the account, and on rank 0's node for files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic3d.health.step_waits import StepWaits, WaitsHeard
from elastic3d.port import StepRecord
from elastic3d.worker.keeper.trainer_group import TrainerGroup

DIGITS = 6
"""Of seconds, in events and in the account alike: whole microseconds, as there."""


class WaitsReporter:
    """Called on the keeper's main thread. emit: writes events; account: takes what is heard, as an event's fields."""

    def __init__(self, emit: Callable[..., None], account: Callable[[int, dict[str, Any]], None]) -> None:
        self._emit, self._account = emit, account
        self._heard = WaitsHeard()

    def stepped(self, record: StepRecord, group: TrainerGroup) -> None:
        """Take note of a step of the node's first slot, after it was accounted for."""
        if not record.sheets:
            return
        waits = self._heard.heard(record.step, record.sheets, group.generation)
        if waits is None:
            return
        fields = _fields(waits)
        self._account(record.generation, fields)
        if group.first_rank == 0:
            self._emit("steps.waited", generation=record.generation, **fields)


def _fields(waits: StepWaits) -> dict[str, Any]:
    data, saving, slow = (round(seconds, DIGITS) for seconds in waits.others)
    return {
        "first": waits.first,
        "last": waits.last,
        "data": data,
        "saving": saving,
        "slow": slow,
        "apart": [[node, *(round(seconds, DIGITS) for seconds in mine)] for node, mine in waits.apart.items()],
    }
