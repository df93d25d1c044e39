"""Weights & Biases: one run for each job, whose id is made from the job's, resumed whenever another node takes over.

W&B takes steps in rising order only and drops the others: the first point of a step stays, also where the run goes
back. Offline each opening has a folder of its own; those of the same id are read back as far as they are on this
node's disk. A `.wandb` file is a log as LevelDB's (doc/log_format.md there) after a header of 7 bytes, of records of
W&B's wandb_internal.proto.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from elastic3d.trackers.tracker import Position, Tracker

CLOSING = 10.0
"""Seconds that W&B may take to send what is left."""

BLOCK, HEADER = 32_768, 7
"""Bytes of a block of a log, and of what stands before each piece; the file's own header has as many."""

FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
"""Kinds of pieces."""


class WandbRuns(Tracker):
    """Writes to a run of a W&B project."""

    def __init__(self, project: str, entity: str | None = None) -> None:
        self._project, self._entity = project, entity
        self._run: Any = None
        self._newest = 0

    def open(self, run_id: str, config: Mapping[str, str | int]) -> Position | None:
        """Resume the run of this job, or begin it."""
        import wandb

        id = re.sub(r"[^A-Za-z0-9_.-]", "-", run_id)[:128]
        self._run = run = wandb.init(
            project=self._project,
            entity=self._entity,
            id=id,
            name=run_id,
            resume="allow",
            config={f"elastic3d_{name}": value for name, value in config.items()},
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_transaction_log_flush_interval=1.0,
                finish_timeout=CLOSING,
                finish_timeout_raises=True,
            ),
            allow_val_change=True,
            reinit="create_new",
        )
        if run.offline:
            position = _offline(Path(run.dir).parent.parent, id)
        else:
            summary: Any = run.summary
            last, generation = run.starting_step - 1, summary.get("generation", 0)
            position = Position(last, int(generation)) if run.resumed and last > 0 else None
        self._newest = position.step if position is not None else 0
        return position

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Hand a point to W&B's own process, which sends it."""
        if step > self._newest:
            self._run.log({**values, "_timestamp": at}, step=step, commit=True)
            self._newest = step

    def close(self) -> None:
        """Have W&B send what it has, for a bounded time."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


def _offline(folder: Path, id: str) -> Position | None:
    """Return the newest point of a run's former offline folders on this disk."""
    from wandb.proto import wandb_internal_pb2

    read: Any = wandb_internal_pb2
    newest: Position | None = None
    # W&B adds to the folder's name where two are made within a second.
    for path in folder.glob(f"offline-run-*/run-{id}.wandb"):
        with open(path, "rb") as file:
            for data in _records(file):
                record = read.Record.FromString(data)
                if record.WhichOneof("record_type") != "history":
                    continue
                values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                step, generation = (json.loads(values.get(name, "0")) for name in ("_step", "generation"))
                if newest is None or step > newest.step:
                    newest = Position(int(step), int(generation))
    return newest


def _records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the whole records of a W&B log."""
    size = os.fstat(file.fileno()).st_size
    file.read(HEADER)
    record = b""
    while (at := file.tell()) < size:
        if BLOCK - at % BLOCK < HEADER:
            file.seek(at + BLOCK - at % BLOCK)
            continue
        header = file.read(HEADER)
        if len(header) < HEADER:
            return
        _, length, kind = struct.unpack("<IHB", header)
        piece = file.read(length)
        if len(piece) < length or not FULL <= kind <= LAST:
            return
        record = piece if kind in (FULL, FIRST) else record + piece
        if kind in (FULL, LAST):
            yield record
