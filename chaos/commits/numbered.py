"""The model store as a directory: `latest` is swapped by the production code, a turn for each of its steps.

Another process may do anything between a writer's read of the versions and its link, and again before it checks
whether its number counts. The checker always sees the highest version as `latest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from chaos.commits.model import ModelStore, Seat
from chaos.commits.turns import Actor
from checkpointing.format import names
from checkpointing.stores.numbered import newest, swap
from checkpointing.stores.protocol import Versioned


@dataclass(slots=True)
class NumberedStore(ModelStore):
    """Keeps all versions of `latest` that are there, by number."""

    versions: dict[int, bytes] = field(default_factory=dict)

    def seat(self, actor: Callable[[], Actor]) -> Seat:
        """Return an actor's store."""
        return NumberedSeat(self, actor)

    def link(self, number: int, data: bytes) -> bool:
        """Take a number, if it is free; the highest is `latest`."""
        if number in self.versions:
            return False
        self.versions[number] = data
        if number == max(self.versions):
            self.put(names.LATEST, data)
        return True


class NumberedSeat(Seat):
    """One actor's store."""

    def __init__(self, store: NumberedStore, actor: Callable[[], Actor]) -> None:
        super().__init__(store, actor)
        self._versions = _Versions(self, store)

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token."""
        if name != names.LATEST:
            return super().read(name)
        stored = newest(self._versions, name)
        return stored[1] if stored is not None else None

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object."""
        if name != names.LATEST:
            return super().compare_and_swap(name, expected, data)
        if expected is None:
            return self._versions.link(0, data)
        return swap(self._versions, expected, data, name)


class _Versions:
    """The versions as one actor sees them: each method is a turn."""

    def __init__(self, seat: NumberedSeat, store: NumberedStore) -> None:
        self._seat, self._store = seat, store

    def numbers(self) -> Iterable[int]:
        return self._seat.take("read", names.LATEST, lambda: [number for number in self._store.versions if number])

    def open(self, number: int) -> bytes | None:
        return self._seat.take("read", names.LATEST, lambda: self._store.versions.get(number))

    def link(self, number: int, data: bytes) -> bool:
        return self._seat.take("swap", names.LATEST, lambda: self._store.link(number, data))

    def remove(self, number: int) -> None:
        self._seat.take("delete", names.LATEST, lambda: self._store.versions.pop(number, None))
