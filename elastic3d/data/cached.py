"""A data set whose samples take long to make, kept on a local disk once they are made.

What is kept is the same to the last bit as what the data set makes, so that a run with the cache has the bits of one
without, whichever samples are there. That needs samples which depend on their number alone. One that drew random
numbers does not, and is not kept; of the rest, the first that a trainer finds is made again and compared.
"""

from __future__ import annotations

import mmap
import operator
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from blake3 import blake3

from elastic3d import quantities
from elastic3d.data import notes
from elastic3d.data.dataset_facts import fingerprint_of, is_numbered, name_of, prefetch
from elastic3d.data.making import DrawsNoticed
from elastic3d.data.mixture import Mixture
from elastic3d.data.sample_bytes import Unstorable, decoded, encoded
from elastic3d.data.sample_folder import Damaged, SampleFolder
from elastic3d.data.stratified import Stratified
from elastic3d.errors import UsageError
from elastic3d.paths import expanded

FORMAT = 1


class _Reason(IntEnum):
    """What is said once by all processes of a rank together."""

    DISK = 0
    FULL = 1
    DRAWS = 2
    UNSTORABLE = 3
    DAMAGED = 4


class Cached:
    """A map-style data set that keeps the samples of another one: `Cached(images, "/scratch/images", version=3, ...)`.

    folder: on a disk of the node, for all of its ranks and their loaders' processes, and for other runs. version: a
    word or a number for what makes the samples; give another one whenever that changes. Samples are found by it, by the
    data set's class, length and `fingerprint`, and by their numbers. limit: bytes of all files in the folder, such as
    "200GB". When it is reached, what other versions and data sets have left there goes first; after that the samples
    that are there are used, and no more are kept.

    Samples are tensors, numpy arrays, numbers, strings, bytes and None, and tuples, lists and dictionaries of them. One
    of another kind, and one for which the data set drew from the global random numbers of torch, numpy or Python, is
    made each time. So are all where the disk is full or refuses: the event `samples.uncached` says so, once. A damaged
    file is found by its digest, and its sample made again (`sample.remade`).

    All other attributes are those of the wrapped data set. UsageError for a stream; for a `Stratified` or a `Mixture`,
    which go around it; and where a sample that was kept is not what the data set makes now.
    """

    def __init__(self, dataset: Any, folder: str | os.PathLike[str], *, version: int | str, limit: int | str) -> None:
        kind = type(dataset).__name__
        if isinstance(dataset, Stratified | Mixture):
            raise UsageError(
                f"Cached was given a {kind}, whose order would be lost; wrap the data sets in it: "
                f"{kind}(Cached(...), ...)"
            )
        if not is_numbered(dataset):
            raise UsageError(f"Cached needs a map-style data set, with len() and [index]; {kind} is not one")
        if not isinstance(folder, str | os.PathLike) or not str(folder) or "://" in str(folder):
            raise UsageError(f"Cached: folder={folder!r} must be a folder on a disk of this node")
        if not isinstance(version, int | str) or isinstance(version, bool) or version == "":
            raise UsageError(
                f"Cached: version={version!r} must be a number or a word for what makes the samples; give another one "
                "whenever that changes"
            )
        self._dataset, self._version = dataset, version
        self._folder = expanded(folder, "Cached: folder").absolute()
        self._limit = quantities.size(limit, "Cached: limit")
        made = (FORMAT, type(dataset).__qualname__, len(dataset), fingerprint_of(dataset), version)
        self._set = blake3(repr(made).encode()).hexdigest()[:32]
        self._begin()

    def _begin(self) -> None:
        self._samples: SampleFolder | None = None
        self._keeps, self._compared = True, False
        # Shared with the loader's processes, which are forked.
        self._said = mmap.mmap(-1, len(_Reason))

    @property
    def fingerprint(self) -> str:
        """That of the wrapped data set: with or without the cache, a run is the same."""
        return fingerprint_of(self._dataset)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """Return a sample, made now or before."""
        number = operator.index(index)
        if not 0 <= number < len(self) or not self._opened():
            return self._dataset[index]
        assert self._samples is not None
        try:
            data = self._samples.get(number)
        except Damaged as error:
            if self._first(_Reason.DAMAGED):
                name = name_of(self._dataset, number)
                notes.note(notes.Remade(folder=str(self._folder), sample=name, error=str(error)))
            data = None
        except OSError as error:
            self._uncached(_Reason.DISK, f"{error}: what cannot be read is made each time")
            return self._dataset[index]
        if data is None:
            return self._made(number)
        if not self._compared:
            self._compared = True
            self._compare(number, data.numpy().tobytes())
        return decoded(data)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Tell the wrapped data set which samples are due next, but for those that are here."""
        here = self._samples if self._opened() else None
        prefetch(self._dataset, [number for number in numbers if here is None or not here.has(number)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        own = ("_samples", "_keeps", "_compared", "_said")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew in another process."""
        self.__dict__.update(state)
        self._begin()

    def _opened(self) -> bool:
        if self._samples is None and self._keeps:
            try:
                self._samples = SampleFolder(self._folder, self._set, self._limit)
            except OSError as error:
                self._keeps = False
                self._uncached(_Reason.DISK, f"{error}: samples are made each time")
        return self._samples is not None

    def _made(self, number: int) -> Any:
        if not self._keeps:
            return self._dataset[number]
        draws = DrawsNoticed()
        with draws.around():
            sample = self._dataset[number]
        if draws.any:
            detail = f"random numbers were drawn for {name_of(self._dataset, number)}: such samples are made each time"
            self._uncached(_Reason.DRAWS, f"{detail}; wrap the part of the data set that draws none")
            return sample
        try:
            self._keep(number, encoded(sample))
        except Unstorable as error:
            detail = f"{name_of(self._dataset, number)} cannot be kept, and is made each time: {error}"
            self._uncached(_Reason.UNSTORABLE, detail)
        return sample

    def _keep(self, number: int, data: bytes) -> None:
        assert self._samples is not None
        try:
            if not self._samples.put(number, data):
                self._keeps = False
                detail = (
                    f"its limit of {self._limit:,} bytes is reached: other samples than those there are made each time"
                )
                self._uncached(_Reason.FULL, detail)
        except OSError as error:
            self._keeps = False
            self._uncached(_Reason.DISK, f"{error}: other samples than those there are made each time")

    def _compare(self, number: int, data: bytes) -> None:
        try:
            same = encoded(self._dataset[number]) == data
        except Unstorable:
            same = False
        if not same:
            raise UsageError(
                f"Cached: {name_of(self._dataset, number)} in {self._folder} is not what the data set makes now. If "
                f"what makes it has changed, give another version= than {self._version!r}; if it is made otherwise "
                "each time, by a generator of its own or by the clock, such samples must not be kept"
            )

    def _uncached(self, reason: _Reason, detail: str) -> None:
        if self._first(reason):
            notes.note(notes.Uncached(folder=str(self._folder), detail=detail))

    def _first(self, reason: _Reason) -> bool:
        first = not self._said[reason]
        self._said[reason] = 1
        return first
