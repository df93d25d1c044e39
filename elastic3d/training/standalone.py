"""The host of a script that was started by hand: a world of one, no keeper, nothing to restore from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from elastic3d.devices import device_at
from elastic3d.errors import CollectiveFailed
from elastic3d.port import (
    UNRECORDED,
    Assignment,
    AuditReport,
    Flags,
    Go,
    LocalState,
    Progress,
    StateRestored,
    StepRecord,
)
from elastic3d.values import Layout, ModelProfile, ProvenChain

if TYPE_CHECKING:
    pass


class StandalonePort:
    """A `Port` without a process behind it, which keeps the records of the steps for its owner.

    measured: takes the model's profile and ends `main` at `run.restore`; None for a script that trains.
    """

    def __init__(
        self,
        *,
        run_id: str = "alone",
        threads: int = 1,
        measured: Callable[[ModelProfile], NoReturn] | None = None,
        device: str = "cpu",
        slot: int = 0,
    ) -> None:
        self.records: list[StepRecord] = []
        self.progress: Progress = UNRECORDED
        self._measured = measured
        self.device = device_at(device, slot)
        self.assignment = Assignment(
            run_id=run_id,
            generation=1,
            attempt=0,
            measuring=measured is not None,
            rank=0,
            world=1,
            node="alone",
            slot=0,
            layout=Layout(pp=1, dp=1) if measured is None else None,
            store_host="",
            store_port=0,
            store_prefix="",
            interface="",
            store=None,
            threads=threads,
            snapshot_every=0,
            checkpoint_every=0,
            device=device,
        )

    def measured(self, profile: ModelProfile, proven: ProvenChain | None = None) -> NoReturn:
        """Pass the profile on."""
        assert self._measured is not None, "a script that trains does not measure"
        self._measured(profile)

    def await_go(self) -> Go:
        """Begin at once, from nothing."""
        return Go(servers=())

    def flags(self) -> Flags:
        """Return no flags."""
        return Flags(leave=False, etcd_away=False)

    def held(self) -> int:
        """Return -1: nothing is held."""
        return -1

    def snapshot_needs(self) -> float:
        """Return 0.0: nothing is taken."""
        return 0.0

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        """Keep nothing."""

    def finish_copy(self) -> None:
        """Return at once."""

    def copied(self, step: int, key: str, at: int) -> int | None:
        """Return None: nothing is copied."""
        return None

    def committed(self, record: StepRecord) -> None:
        """Keep the record."""
        self.records.append(record)

    def audited(self, report: AuditReport) -> None:
        """Do nothing: one rank is audited by nobody."""

    def convicted(self, report: AuditReport) -> NoReturn:
        """Never called."""
        raise AssertionError("a script started by hand is never audited")

    def restored(self, state: StateRestored) -> None:
        """Do nothing."""

    def leave(self, step: int) -> NoReturn:
        """Never called."""
        raise AssertionError("a script started by hand is never asked to leave")

    def peer_lost(self, error: BaseException, *, patience: float | None = None) -> NoReturn:
        """Raise the error: without peers of ours, the failed collective is one that the script itself made."""
        raise CollectiveFailed(f"a collective of the script's own failed: {error}") from error

    def done(self, digest: str | None, unsaved: int = -1) -> NoReturn:
        """End the script."""
        raise SystemExit(0)

    def failed(self, error: BaseException) -> NoReturn:
        """Raise the user's error as it is."""
        raise error
