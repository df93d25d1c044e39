"""What a node writes for a checkpoint: the tiles that the newest committed one does not have yet."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import replace

from checkpointing import Checkpoint, SaveOptions, Store, open_checkpoint, read_latest, save_rank
from checkpointing.errors import CheckpointError, StoreError, StoreNotFound
from checkpointing.saving.options import Speeds
from elastic3d.membership.records import SavedStep
from elastic3d.provenance.record import spelled_out
from elastic3d.worker.options import Saving
from elastic3d.worker.processes.slot import PinnedSnapshot


class Parent:
    """The newest committed checkpoint, opened once for all slots of the node and kept until there is a newer one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: Checkpoint | None = None
        self._damaged: frozenset[str] = frozenset()

    def distrust(self, damaged: Collection[str]) -> None:
        """Rely on no tile of these checkpoints: they were found damaged."""
        with self._lock:
            self._damaged |= frozenset(damaged)
            self._open = None

    def suspect(self) -> bool:
        """Return whether the newest committed checkpoint is damaged, and with it perhaps packs of the same contents."""
        if not self._damaged:
            return False
        try:
            ref = read_latest(self._store)
        except (CheckpointError, OSError):
            return True
        return ref is not None and ref.checkpoint in self._damaged

    def newest(self) -> Checkpoint | None:
        """Return the checkpoint; None where there is none or it cannot be read, and everything is to be written."""
        with self._lock:
            try:
                ref = read_latest(self._store)
                if ref is None or ref.checkpoint is None or ref.checkpoint in self._damaged:
                    self._open = None
                elif self._open is None or self._open.name != ref.checkpoint:
                    self._open = open_checkpoint(self._store, ref)
            except (CheckpointError, OSError):
                # A store that does not answer says so when it is written to.
                self._open = None
            return self._open


class CheckpointWriter:
    """Writes one slot's part of a save; each slot's uploader calls it on its own thread."""

    def __init__(self, store: Store, saving: Saving, slots: int) -> None:
        self._store, self._saving, self._slots = store, saving, slots
        self._parent = Parent(store)
        self._speeds: dict[int, Speeds | None] = {}

    def distrust(self, damaged: Collection[str]) -> None:
        """Write everything anew until the newest checkpoint is none of these, which are damaged."""
        self._parent.distrust(damaged)

    def write(self, pinned: PinnedSnapshot, saved: SavedStep, last: bool) -> tuple[int, int]:
        """Return the bytes of the slot's tiles, and of those that had to be written.

        last: no other save follows and there is a deadline, so bandwidth is not limited.
        """
        try:
            done = save_rank(
                self._store,
                step=saved.step,
                made_in=saved.made_in,
                attempt=saved.attempt,
                rank=pinned.rank,
                world=saved.world,
                pieces=pinned.pieces,
                facts=spelled_out(pinned.facts),
                parent=self._parent.newest(),
                options=self._options(pinned.rank, last),
            )
        except StoreNotFound as error:
            # Writing there would start a second history beside the missing one, which only a person may decide.
            raise StoreError(
                f"{error}: the store's place is gone, or was emptied. Mount it, or bring it back as it was, and "
                "checkpoints go on. To begin anew, start the job again"
            ) from error
        self._speeds[pinned.rank] = done.speeds
        return done.bytes, done.written

    def _options(self, rank: int, last: bool) -> SaveOptions:
        limit = self._saving.max_bandwidth
        options = SaveOptions(
            codec=self._saving.codec,
            max_bandwidth=limit / self._slots if limit is not None and not last else None,
            speeds=self._speeds.get(rank),
            rewrite=self._parent.suspect(),
        )
        # When time is short and no speeds are known, none are measured: tiles are stored raw.
        return options if not last or options.speeds is not None else replace(options, codec="raw")
