"""A store in front of another one, as a base for stores that change one thing about it."""

from __future__ import annotations

from collections.abc import Iterator

from checkpointing.stores.protocol import Data, Entry, Store, Versioned, decides_creations


class PassingStore:
    """Passes everything on to `behind`."""

    def __init__(self, behind: Store) -> None:
        self._store = behind
        self.verifies: bool = getattr(behind, "verifies", False)
        self.decides_creations = decides_creations(behind)

    @property
    def url(self) -> str:
        """The place, for messages."""
        return self._store.url

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object."""
        return self._store.get(name, start, stop)

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token, None if it is not there."""
        return self._store.read(name)

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        return self._store.size(name)

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object, replacing what was there."""
        self._store.put(name, data, check=check)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object; False if one was there."""
        return self._store.put_if_absent(name, data)

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object if its token is `expected`."""
        return self._store.compare_and_swap(name, expected, data)

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, sorted."""
        return self._store.list(prefix)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects whose names begin with `prefix`, sorted by name."""
        return self._store.entries(prefix)

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        self._store.delete(name)
