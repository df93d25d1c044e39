"""A part of a store: the objects below one prefix, as a store of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from checkpointing.stores.protocol import Data, Entry, Store, Versioned, decides_creations


class Folder:
    """The objects of `behind` whose names begin with `prefix` and a slash, under the rest of their names."""

    def __init__(self, behind: Store, prefix: str) -> None:
        self._store, self._prefix = behind, f"{prefix}/"
        self.verifies: bool = getattr(behind, "verifies", False)
        self.decides_creations = decides_creations(behind)

    @property
    def url(self) -> str:
        """The place, for messages."""
        return f"{self._store.url.rstrip('/')}/{self._prefix}"

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object."""
        return self._store.get(self._prefix + name, start, stop)

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token, None if it is not there."""
        return self._store.read(self._prefix + name)

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        return self._store.size(self._prefix + name)

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object, replacing what was there."""
        self._store.put(self._prefix + name, data, check=check)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object; False if one was there."""
        return self._store.put_if_absent(self._prefix + name, data)

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object if its token is `expected`."""
        return self._store.compare_and_swap(self._prefix + name, expected, data)

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, sorted."""
        for name in self._store.list(self._prefix + prefix):
            yield name.removeprefix(self._prefix)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects whose names begin with `prefix`, sorted by name."""
        for entry in self._store.entries(self._prefix + prefix):
            yield replace(entry, name=entry.name.removeprefix(self._prefix))

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._store.delete(self._prefix + name)
