"""Token files: flat binary arrays of token numbers on disk, read through a memory map."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastic3d.errors import UsageError
from elastic3d.paths import expanded

NPY = b"\x93NUMPY"
WORDS = "uint8, uint16, uint32, int32 or int64"


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One file: its tokens begin after `offset` bytes."""

    path: str
    dtype: str
    offset: int
    tokens: int


class TokenFile:
    """A map-style data set of windows over token files: sample i is (input, target), each `length` tokens as int64.

    Window i of a file is its tokens [i * length, (i + 1) * length + 1): targets are the inputs shifted by one, and each
    token but the first of a file is the target in one window. Windows do not cross the ends of files; the rest at an
    end, too short for a window, is counted in `left_out`.

    path: a file, a glob, or several of either; files of a glob are taken in the order of their names. dtype: of flat
    files; a .npy file names its own. Only the sizes are read at first; a file is mapped where and when it is first
    used, so that the data set is small to pickle and safe to fork.
    """

    def __init__(
        self, path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, length: int, dtype: Any = "uint16"
    ) -> None:
        if not isinstance(length, int) or length < 1:
            raise UsageError(f"TokenFile: length must be the number of tokens of a sample, 1 or more; it is {length!r}")
        self._files = [_look(name, _dtype(dtype)) for name in _paths(path)]
        self._length = length
        windows = [max(0, file.tokens - 1) // length for file in self._files]
        self._starts = [0, *accumulate(windows)]
        self.left_out = sum(
            max(0, file.tokens - 1) - count * length for file, count in zip(self._files, windows, strict=True)
        )
        if not len(self):
            raise UsageError(
                f"TokenFile: none of {len(self._files)} file(s) has the {length + 1} tokens of one window; the longest "
                f"has {max(file.tokens for file in self._files)}"
            )
        self._maps: dict[int, Any] = {}

    @property
    def fingerprint(self) -> str:
        """The names, types and sizes of the files, without their folders and contents."""
        files = [(os.path.basename(file.path), file.dtype, file.tokens) for file in self._files]
        return repr((self._length, files))

    @property
    def sample_tokens(self) -> int:
        """Number of tokens of each sample."""
        return self._length

    @property
    def tokens(self) -> int:
        """Number of tokens in all files."""
        return sum(file.tokens for file in self._files)

    def __len__(self) -> int:
        """Return the number of windows."""
        return self._starts[-1]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one window as (input, target)."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        number = bisect_right(self._starts, index) - 1
        first = (index - self._starts[number]) * self._length
        window = torch.from_numpy(self._map(number)[first : first + self._length + 1].astype(np.int64))
        return window[:-1], window[1:]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the maps."""
        return {**self.__dict__, "_maps": {}}

    def _map(self, number: int) -> Any:
        if number not in self._maps:
            file = self._files[number]
            self._maps[number] = np.memmap(
                file.path, dtype=file.dtype, mode="r", offset=file.offset, shape=(file.tokens,)
            )
        return self._maps[number]


def _paths(path: Any) -> list[str]:
    given = [path] if isinstance(path, str | os.PathLike) else list(path)
    files: list[str] = []
    for each in (str(expanded(one, "TokenFile: path")) for one in given):
        matches = [each] if os.path.isfile(each) else sorted(filter(os.path.isfile, glob.glob(each, recursive=True)))
        if not matches:
            raise UsageError(f"TokenFile: there is no file {each!r} here; every node needs the same files")
        files += matches
    if not files:
        raise UsageError("TokenFile: no path was given")
    return files


def _dtype(given: Any) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(given)
    except TypeError as error:
        raise UsageError(f"TokenFile: {given!r} is not a dtype; use {WORDS}") from error
    if dtype.kind not in "iu" or dtype == np.uint64:
        raise UsageError(f"TokenFile: tokens are whole numbers that fit int64, not {dtype}; use {WORDS}")
    return dtype


def _look(path: str, dtype: np.dtype[Any]) -> _File:
    offset, size = 0, Path(path).stat().st_size
    with open(path, "rb") as stream:
        if stream.read(len(NPY)) == NPY:
            stream.seek(0)
            try:
                shape, _, dtype = _header(stream)
            except ValueError as error:
                raise UsageError(
                    f"TokenFile: {path} begins like a .npy file but has no valid header: {error}"
                ) from error
            if len(shape) != 1:
                raise UsageError(f"TokenFile: {path} holds an array of shape {list(shape)}; save it flattened")
            dtype, offset = _dtype(dtype), stream.tell()
            if size - offset != shape[0] * dtype.itemsize:
                raise UsageError(
                    f"TokenFile: {path} says that it has {shape[0]} tokens of {dtype}, which is not its size of "
                    f"{size:,} bytes: it was cut off, or is still being written"
                )
    if (size - offset) % dtype.itemsize:
        raise UsageError(
            f"TokenFile: {path} has {size:,} bytes, which is not a whole number of {dtype} tokens: it was cut off, or "
            "has another dtype"
        )
    return _File(path=path, dtype=dtype.str, offset=offset, tokens=(size - offset) // dtype.itemsize)


def _header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)
