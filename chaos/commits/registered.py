"""The model store as a place that cannot write on conditions, and a register that decides for it, a turn for each step.

The checker sees the register's `latest`; the published copy is elsewhere. A rank may write
several manifests, all of which the checker may see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from chaos.commits.model import Held, ModelStore, Seat
from chaos.commits.turns import Actor
from checkpointing.format import names
from checkpointing.stores.protocol import Data, Versioned, chunks
from checkpointing.stores.register import RegisteredStore

T = TypeVar("T")

PUBLISHED = "published/latest"


@dataclass(slots=True)
class RegisteredModel(ModelStore):
    """Keeps what the register holds beside the objects."""

    values: dict[str, Held] = field(default_factory=dict)

    def seat(self, actor: Callable[[], Actor]) -> Seat:
        """Return an actor's store."""
        return RegisteredSeat(self, actor)

    def decide(self, name: str, expected: str | None, data: bytes) -> bool:
        """Set a value of the register if its token is the expected one, None if there is none."""
        current = self.values.get(name)
        if (current.token if current else None) != expected:
            return False
        self.values[name] = Held(data=data, token=f"r{self.operations}", modified=self.now)
        if name == names.LATEST:
            self.put(name, data.removeprefix(b"whole "))
        return True


class RegisteredSeat(Seat):
    """One actor's store: the production code in front of a place and a register that are turns."""

    decides_creations = False

    def __init__(self, store: RegisteredModel, actor: Callable[[], Actor]) -> None:
        super().__init__(store, actor)
        self._place = _Place(self, store)
        self._registered = RegisteredStore(self._place, _Register(self, store))

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object."""
        return self._registered.get(name, start, stop)

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token."""
        return self._registered.read(name)

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        return self._registered.size(name)

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object."""
        self._registered.put(name, data, check=check)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object."""
        return self._registered.put_if_absent(name, data)

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object."""
        return self._registered.compare_and_swap(name, expected, data)

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._registered.delete(name)


class _Place(Seat):
    """The place itself: it writes whole objects, reads, lists and deletes."""

    def __init__(self, seat: RegisteredSeat, store: RegisteredModel) -> None:
        super().__init__(store, seat._actor)
        self._seat = seat

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return super().get(_there(name), start, stop)

    def size(self, name: str) -> int:
        return super().size(_there(name))

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        whole = b"".join(chunks(data))
        self.take("put", _there(name), lambda: self._store.put(_there(name), whole))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        raise AssertionError("this place cannot write on conditions")

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        raise AssertionError("this place cannot write on conditions")

    def take(self, verb: str, name: str, act: Callable[[], T]) -> T:
        return self._seat.take(verb, name, act)


def _there(name: str) -> str:
    return PUBLISHED if name == names.LATEST else name


class _Register:
    """The register as one actor sees it: each method is a turn."""

    def __init__(self, seat: RegisteredSeat, store: RegisteredModel) -> None:
        self._seat, self._store = seat, store

    def read(self, name: str) -> Versioned | None:
        def act() -> Versioned | None:
            stored = self._store.values.get(name)
            return Versioned(data=stored.data, token=stored.token) if stored else None

        return self._seat.take("read", name, act)

    def create(self, name: str, data: bytes) -> bool:
        return self._seat.take("create", name, lambda: self._store.decide(name, None, data))

    def swap(self, name: str, expected: str, data: bytes) -> bool:
        return self._seat.take("swap", name, lambda: self._store.decide(name, expected, data))

    def delete(self, name: str) -> None:
        self._seat.take("delete", name, lambda: self._store.values.pop(name, None))
