"""A folder of checkpoints that were exported one by one, and the list of them beside, so that none comes twice."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from checkpointing.format.names import parse_checkpoint
from elastic3d.errors import UsageError

LIST = "exported.jsonl"
BEGUN, DONE = "begun", "done"


class ExportFolder:
    """The folder, for one process at a time. suffix: of what is written into it; "" for folders.

    The list has a line before a checkpoint appears and one after it, so that one that appeared just before the process
    was killed is known too; one that somebody has removed since is not written again.
    """

    def __init__(self, folder: Path, store: str, suffix: str) -> None:
        self._folder, self._store, self._suffix = folder, store, suffix
        self._targets: dict[str, str] = {}
        self.done: set[str] = set()
        """Names of the checkpoints of the store that are in it, or were."""

    def __enter__(self) -> Self:
        """Take the folder over; UsageError where another process has it, or it is none."""
        if self._folder.exists() and not self._folder.is_dir():
            raise UsageError(f"{self._folder} is no folder: with --follow, each checkpoint becomes a part of one")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._list = (self._folder / LIST).open("a+b")
        try:
            fcntl.flock(self._list, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._list.close()
            raise UsageError(
                f"{self._folder}: another command exports into it; give each a folder of its own"
            ) from error
        from checkpointing.interchange.appearing import left_behind, remove  # imports torch, which takes seconds

        for path in left_behind(self._folder, "step-.*"):
            remove(path)
        self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of it."""
        self._list.close()

    def begin(self, checkpoint: str) -> Path:
        """Return where a checkpoint is to be written: `step-N`, with more of its name if another one is there."""
        parsed = parse_checkpoint(checkpoint)
        assert parsed is not None, "refs hold names of checkpoints only"
        save = parsed[0]
        names = (f"step-{save.step}", f"step-{save.step}-generation-{save.made_in}", f"step-{checkpoint}")
        name = next(name for name in (f"{one}{self._suffix}" for one in names) if self._free(name, checkpoint))
        self._write(checkpoint, name, BEGUN)
        return self._folder / name

    def end(self, checkpoint: str, target: Path) -> None:
        """Note that a checkpoint is written."""
        self.done.add(checkpoint)
        self._write(checkpoint, target.name, DONE)

    def _free(self, name: str, checkpoint: str) -> bool:
        if name == f"step-{checkpoint}{self._suffix}":
            return True
        return self._targets.get(name, checkpoint) == checkpoint and not os.path.lexists(self._folder / name)

    def _read(self) -> None:
        self._list.seek(0)
        for line in self._list.read().splitlines():
            try:
                entry: dict[str, Any] = json.loads(line)
                checkpoint, name, state = entry["checkpoint"], entry["target"], entry["state"]
                ours = entry["store"] == self._store and parse_checkpoint(checkpoint) is not None
            except (ValueError, KeyError, TypeError):
                continue  # cut short when its process was killed
            self._targets[name] = checkpoint if ours else ""
            if ours and (state == DONE or os.path.lexists(self._folder / name)):
                self.done.add(checkpoint)

    def _write(self, checkpoint: str, name: str, state: str) -> None:
        self._targets[name] = checkpoint
        entry = {"checkpoint": checkpoint, "target": name, "state": state, "store": self._store}
        self._list.seek(0, os.SEEK_END)
        self._list.write(b"" if self._whole() else b"\n")
        self._list.write(json.dumps(entry).encode() + b"\n")
        self._list.flush()
        os.fsync(self._list.fileno())

    def _whole(self) -> bool:
        """Return whether the list ends with a whole line."""
        end = self._list.tell()
        if not end:
            return True
        self._list.seek(end - 1)
        return self._list.read(1) == b"\n"
