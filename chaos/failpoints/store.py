"""A store that kills its own process, with SIGKILL, at one of its operations."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from checkpointing.stores.protocol import Data, Entry, Store, Versioned, chunks

T = TypeVar("T")

_KINDS = {
    "packs/": "pack",
    "saves/": "manifest",
    "checkpoints/": "record",
    "refs/latest": "latest",
    "sweeps/": "tombstone",
    "history/": "history",
    "shadow/": "shadow",
    "probe/": "probe",
}


class When(StrEnum):
    """When, in its operation, the process ends. DURING is for puts: half of the bytes have been handed over."""

    BEFORE = "before"
    DURING = "during"
    AFTER = "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failpoint:
    """End before, during or after the `count`-th operation of this name, such as `create-manifest`, or `any`."""

    when: When
    operation: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.when}:{self.operation}:{self.count}"


def parse_failpoint(text: str) -> Failpoint:
    """Return the failpoint of a text such as `after:swap-latest:2`; ValueError if it is none."""
    when, operation, count = text.split(":")
    return Failpoint(when=When(when), operation=operation, count=int(count))


def operation(verb: str, name: str) -> str:
    """Return what an operation is called: the verb, and the kind of object."""
    kind = next((kind for prefix, kind in _KINDS.items() if name.startswith(prefix)), "object")
    return f"{verb}-{kind}"


class FailingStore:
    """A store that ends its process at a failpoint. reached: called instead of the kill, in tests of this class."""

    def __init__(self, store: Store, failpoint: Failpoint | None, reached: Callable[[], object] | None = None) -> None:
        self._store = store
        self._failpoint = failpoint
        self._reached = reached or _kill
        self._lock = threading.Lock()
        self._count = 0

    @property
    def url(self) -> str:
        """The place, for messages."""
        return self._store.url

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object."""
        return self._at("get", name, lambda: self._store.get(name, start, stop))

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token."""
        return self._at("read", name, lambda: self._store.read(name))

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        return self._at("size", name, lambda: self._store.size(name))

    def put(self, name: str, data: Data, **options: bool) -> None:
        """Write an object; options are the store's business."""
        when = self._meet("put", name)
        if when is When.BEFORE:
            self._reached()
        put: Callable[..., None] = self._store.put
        put(name, self._half(data) if when is When.DURING else data, **options)
        if when is When.AFTER:
            self._reached()

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object."""
        return self._at("create", name, lambda: self._store.put_if_absent(name, data))

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object."""
        return self._at("swap", name, lambda: self._store.compare_and_swap(name, expected, data))

    def list(self, prefix: str) -> Iterator[str]:
        """Yield names, sorted."""
        yield from self._at("list", prefix, lambda: self._store.list(prefix))

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield objects, sorted by name."""
        yield from self._at("list", prefix, lambda: self._store.entries(prefix))

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._at("delete", name, lambda: self._store.delete(name))

    def _at(self, verb: str, name: str, act: Callable[[], T]) -> T:
        when = self._meet(verb, name)
        if when is When.BEFORE:
            self._reached()
        result = act()
        if when in (When.AFTER, When.DURING):
            self._reached()
        return result

    def _meet(self, verb: str, name: str) -> When | None:
        """Count an operation; return when the process is to end, if in this one."""
        point = self._failpoint
        if point is None or point.operation not in ("any", operation(verb, name)):
            return None
        with self._lock:
            self._count += 1
            return point.when if self._count == point.count else None

    def _half(self, data: Data) -> Iterator[memoryview]:
        parts = list(chunks(data))
        total = sum(part.nbytes for part in parts)
        given = 0
        for part in parts:
            if given + part.nbytes > total // 2:
                yield part[: total // 2 - given]
                self._reached()
                yield part[total // 2 - given :]
                total = 1 << 62
            else:
                yield part
            given += part.nbytes


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # the kernel may be a moment late
