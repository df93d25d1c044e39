"""Reads boxes of tensors out of files: only the bytes of each box, whichever way it is cut."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from checkpointing.errors import ForeignFormat
from checkpointing.format.tiles import Box
from checkpointing.interchange.foreign import Slab, Stored

TOGETHER = 4096
"""Bytes of a run below which what lies between runs is read too: a disk reads whole pages anyway."""

MOST = 16 << 20
"""Bytes that are read at once beside the caller's buffer."""


class FileRanges:
    """Files that boxes are read from, each opened once. bytes: how many were read so far."""

    def __init__(self) -> None:
        self.bytes = 0
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, stored: Stored, box: Box, buffer: memoryview) -> None:
        """Fill a buffer with a box of what is stored, C-contiguous; ForeignFormat if the file does not hold it.

        buffer: writable bytes, as many as the box has.
        """
        size = stored.spec.itemsize
        assert stored.box.contains(box)
        assert buffer.nbytes == box.numel * size
        if not box.numel:
            return
        if stored.strides is not None:
            buffer[:] = Slab(stored=stored, box=box, skip=0).read()
            self.bytes += buffer.nbytes
            return
        shape, dims = stored.box.shape, len(box.shape)
        whole = dims
        while whole and box.shape[whole - 1] == shape[whole - 1]:
            whole -= 1
        if not whole:
            self._fill(stored, stored.offset, buffer)
            return
        steps = [math.prod(shape[dim + 1 :]) * size for dim in range(dims)]
        first = [a - b for a, b in zip(box.start, stored.box.start, strict=True)]
        run = box.shape[whole - 1] * steps[whole - 1]
        begin = stored.offset + first[whole - 1] * steps[whole - 1]
        joined = whole - 1 if whole > 1 and run < TOGETHER else whole
        outer = [range(first[dim], first[dim] + box.shape[dim]) for dim in range(joined - 1)]
        rows = box.shape[joined - 1] if joined < whole else 1
        at = 0
        for place in itertools.product(*outer):
            offset = begin + sum(index * step for index, step in zip(place, steps, strict=False))
            if joined < whole:
                offset += first[joined - 1] * steps[joined - 1]
                self._fill_rows(stored, offset, steps[joined - 1], rows, buffer[at : at + rows * run])
            else:
                self._fill(stored, offset, buffer[at : at + run])
            at += rows * run

    def _fill_rows(self, stored: Stored, offset: int, step: int, rows: int, buffer: memoryview) -> None:
        """Fill a buffer with short runs that begin `step` bytes apart, reading what is between them too."""
        run = buffer.nbytes // rows
        into = np.frombuffer(buffer, dtype=np.uint8).reshape(rows, run)
        together = max(1, MOST // step)
        for row in range(0, rows, together):
            count = min(together, rows - row)
            data = memoryview(bytearray((count - 1) * step + run))
            self._fill(stored, offset + row * step, data)
            into[row : row + count] = np.lib.stride_tricks.as_strided(
                np.frombuffer(data, dtype=np.uint8), (count, run), (step, 1)
            )

    def _fill(self, stored: Stored, offset: int, buffer: memoryview) -> None:
        got = 0
        try:
            file = self._file(stored.file)
            while got < buffer.nbytes:
                count = os.preadv(file, [buffer[got:]], offset + got)
                if not count:
                    raise ForeignFormat(
                        f"{stored.file}: ends {buffer.nbytes - got} bytes before {stored.spec.key}: it is cut short"
                    )
                got += count
        except OSError as error:
            raise ForeignFormat(f"{stored.file}: cannot be read: {error}") from error
        self.bytes += got

    def _file(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= 64:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]
