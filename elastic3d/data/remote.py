"""A data set whose samples are objects of an object store, or parts of objects, fetched before they are due."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from blake3 import blake3

from checkpointing import Store, open_store
from checkpointing.errors import StoreError, StoreUnfit
from checkpointing.stores.address import redacted
from checkpointing.stores.protocol import check_name
from checkpointing.stores.retrying import PATIENCE
from elastic3d import quantities, source_waits
from elastic3d.data import notes
from elastic3d.data.fetching import Fetcher
from elastic3d.errors import UsageError

Part = tuple[str, int, int]
"""An object's name, and which of its bytes: the first, and the one after the last; -1 for its end."""


class Remote:
    """A map-style data set of objects: `Remote("s3://bucket/images", names, make=decode)`.

    url: as for checkpoints: a folder, `s3://`, `gs://`, `az://`, `file://` or any other that fsspec has a package for;
    options: of that package, such as `{"endpoint_url": ...}`. samples: for each sample an object's name below the url,
    or (name, start, stop) for its bytes [start, stop). make: makes a sample of its bytes, in the process and the thread
    that asks for it; it is found by nobody but the script, so a run does not notice if it changes.

    ahead: how many samples each process that loads fetches before they are due, up to 16 at once, in the order in which
    the run will ask for them; their bytes are all that is held. 0 fetches each one when it is asked for. patience: for
    how long a store that is busy or does not answer is asked again, such as "2m"; then the sample raises StoreError,
    which ends the run's generation.

    The bytes of a step are in the event `step.committed`, and where a rank's loader waits for too long, the verdict
    names the object.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        samples: Iterable[str | Part],
        *,
        make: Callable[[bytes], Any],
        ahead: int = 32,
        options: Mapping[str, Any] | None = None,
        patience: float | str = PATIENCE,
    ) -> None:
        quantities.whole(ahead, "ahead", 0, "Remote")
        if not callable(make):
            raise UsageError(f"Remote: make= takes a function of a sample's bytes, not {type(make).__name__}")
        self.url, self.ahead = redacted(os.fspath(url)), ahead
        self._url, self._options, self._make = os.fspath(url), dict(options or {}), make
        self._patience = quantities.seconds(patience, "Remote: patience")
        self._parts = [_part(number, given) for number, given in enumerate(samples)]
        if not self._parts:
            raise UsageError("Remote: samples= names no sample")
        self.fingerprint = blake3(repr(self._parts).encode()).hexdigest()
        self._process = 0
        self._store: Store | None = None
        self._fetcher: Fetcher | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._parts)

    def __getitem__(self, index: int) -> Any:
        """Return a sample; StoreError when its bytes cannot be had."""
        number = operator.index(index)
        if not 0 <= number < len(self._parts):
            raise IndexError(f"sample {number} of {len(self._parts)}")
        self._open()
        with source_waits.source(self.name_of(number)):
            data = self._bytes(number) if self._fetcher is None else self._fetcher.get(number)
        notes.read(len(data))
        return self._make(data)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Begin to fetch the samples that will be asked for next in this process, the nearest first."""
        self._open()
        if self._fetcher is None and self.ahead:
            self._fetcher = Fetcher(self._bytes, self.ahead)
        if self._fetcher is not None:
            self._fetcher.want(numbers)

    def name_of(self, number: int) -> str:
        """Return where a sample is."""
        name, start, stop = self._parts[number]
        whole = (start, stop) == (0, -1)
        return f"{self.url.rstrip('/')}/{name}{'' if whole else f' bytes {start} to {stop}'}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        return {**self.__dict__, "_process": 0, "_store": None, "_fetcher": None}

    def _open(self) -> None:
        # Neither threads nor connections outlive a fork.
        if self._store is None or self._process != os.getpid():
            try:
                self._store = open_store(self._url, write=False, options=self._options, patience=self._patience)
            except StoreUnfit as error:
                raise UsageError(f"Remote: {error}") from error
            self._process, self._fetcher = os.getpid(), None

    def _bytes(self, number: int) -> bytes:
        name, start, stop = self._parts[number]
        assert self._store is not None
        data = self._store.get(name, start, None if stop < 0 else stop)
        if stop >= 0 and len(data) != stop - start:
            raise StoreError(
                f"{self.name_of(number)}: the object ends after {len(data):,} of these {stop - start:,} bytes; it was "
                "written anew, or is still being written"
            )
        return data


def _part(number: int, given: Any) -> Part:
    match (given, 0, -1) if isinstance(given, str) else given:
        case (str() as name, int() as start, int() as stop) if isinstance(given, str) or 0 <= start < stop:
            try:
                return check_name(name), start, stop
            except ValueError:
                pass
    raise UsageError(
        f"Remote: sample {number} is {given!r}; give the name of an object, of letters, digits, '.', '_', '-' and '/', "
        "or (name, start, stop) with 0 <= start < stop"
    )
