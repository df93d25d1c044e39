"""TensorBoard: event files in a folder, a new one whenever another node takes over.

A reader takes the files in the order of their names. Each of ours begins with a mark (SessionLog.START, what
TensorBoard's `purge_step` writes) after which readers forget all points from its step on; so a step that a former
writer still wrote is not shown twice. The mark also stands where the run goes back. All values of a step are in one
record: a step is there as a whole or not at all.

The format of a record is that of tensorboard/summary/writer/record_writer.py: its length (8 bytes), a check of that
(4), its bytes, and a check of those (4).
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from elastic3d.clock import SYSTEM
from elastic3d.trackers.media import FileMedium
from elastic3d.trackers.tracker import Position, Tracker

ENDING = ".elastic3d"
"""How the names of our files end. Other files of the folder are never read."""

HEADER, FOOTER = 12, 4
"""Bytes of a record before and after its own."""

LARGEST = 1 << 24
"""Bytes of one record, at most."""


class EventFiles(Tracker):
    """Writes TensorBoard's event files into a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: FileMedium | None = None
        self._unwritten: list[Any] = []
        self._used = False

    def open(self, run_id: str, config: Mapping[str, str | int]) -> Position | None:
        """Read what is there, and take the newest file from whoever may still have it open."""
        self._unwritten.clear()
        self._folder.mkdir(parents=True, exist_ok=True)
        files = self._files()
        if files:
            newest = FileMedium(files[-1])
            newest.take(_whole)
            newest.release()
        position = self._position(files)
        self._begin(position.step + 1 if position is not None else 0)
        return position

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Keep a record for the next flush."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        summary = summary_pb2.Summary(
            value=[summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._unwritten.append(event_pb2.Event(wall_time=at, step=step, summary=summary))

    def flush(self) -> None:
        """Write the records to the disk."""
        assert self._file is not None
        events, self._unwritten = self._unwritten, []
        self._used = self._used or bool(events)
        self._file.append(_encoded(events))

    def rewind(self, step: int) -> bool:
        """Have readers forget later points."""
        self._unwritten.clear()
        self._begin(step + 1)
        return True

    def close(self) -> None:
        """Forget what was not flushed: this node may no longer be the one that writes."""
        self._unwritten.clear()
        if self._file is not None:
            file, self._file = self._file, None
            file.release()
            if not self._used:
                file.path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(path for path in self._folder.glob(f"events.out.tfevents.*{ENDING}") if path.is_file())

    def _begin(self, first: int) -> None:
        """Begin a file that readers take after all others, and in which no step before `first` will be."""
        from tensorboard.compat.proto import event_pb2

        self.close()
        files, now = self._files(), int(SYSTEM.wall())
        # By the clocks of two nodes, the second may have begun before the first.
        newest = int(files[-1].name.split(".")[3]) if files else 0
        name = f"events.out.tfevents.{max(now, newest + 1):010d}.{os.getpid()}{ENDING}"
        self._file, self._used = FileMedium(self._folder / name), False
        self._file.take(lambda old, new: None)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        events = [
            event_pb2.Event(wall_time=SYSTEM.wall(), file_version="brain.Event:2"),
            event_pb2.Event(wall_time=SYSTEM.wall(), step=first, session_log=start),
        ]
        self._file.append(_encoded(events))

    def _position(self, files: list[Path]) -> Position | None:
        """Return the newest point that readers see."""
        from tensorboard.compat.proto import event_pb2

        runs: list[tuple[int, int, int]] = []  # first and last step, generation
        for path in files:
            with open(path, "rb") as file:
                for record in _records(file):
                    event = event_pb2.Event.FromString(record[HEADER:-FOOTER])
                    if event.HasField("session_log"):
                        runs = [(a, min(b, event.step - 1), g) for a, b, g in runs if a < event.step]
                    elif event.HasField("summary"):
                        generation = next(
                            (int(v.simple_value) for v in event.summary.value if v.tag == "generation"), 0
                        )
                        if runs and runs[-1][2] == generation:
                            runs[-1] = (runs[-1][0], event.step, generation)
                        else:
                            runs.append((event.step, event.step, generation))
        return Position(*runs[-1][1:]) if runs else None


def _encoded(events: Iterable[Any]) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    data = io.BytesIO()
    writer = RecordWriter(data)
    for event in events:
        writer.write(event.SerializeToString())
    return data.getvalue()


def _records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the records of a file with their frames, up to the first that is not whole.

    Of the bytes, only those of the last are checked: that takes Python 40 microseconds each.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    last = b""
    while len(header := file.read(HEADER)) == HEADER:
        length, check = struct.unpack("<QI", header)
        if masked_crc32c(header[:8]) != check or length > LARGEST:
            break
        body = file.read(length + FOOTER)
        if len(body) < length + FOOTER:
            break
        if last:
            yield last
        last = header + body
    if last and struct.unpack("<I", last[-FOOTER:])[0] == masked_crc32c(last[HEADER:-FOOTER]):
        yield last


def _whole(old: BinaryIO, new: BinaryIO) -> None:
    new.writelines(_records(old))
