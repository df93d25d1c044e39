"""The model store: objects, tokens, a clock, and the faults between it and a client.

The store itself executes every request at once and keeps its conditions, as S3 does. A client's `Seat` is where faults
are: a request that never arrives, or arrives late or twice, an answer that is lost, a list that is out of date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from chaos.commits.turns import Actor
from checkpointing.errors import StoreError, StoreNotFound
from checkpointing.format import names
from checkpointing.stores.protocol import Data, Entry, Versioned, check_name, chunks

T = TypeVar("T")

_REMEMBERED = 12  # changes that a stale list may not know of


class Fault(StrEnum):
    """Possible faults of one operation."""

    NONE = ""
    DIE_BEFORE = "dies-before"  # the client's process is killed, the request never sent
    DIE_AFTER = "dies-after"  # the same, and the request is done
    LOST = "lost"  # the request does not arrive; the client learns of an error
    UNANSWERED = "unanswered"  # it is done; the client learns of an error
    TWICE = "twice"  # a layer below repeats it at once; the client has the second answer
    LATE = "late"  # the client learns of an error; it is done when the network delivers it
    ECHO = "echo"  # it is done and answered, and done again when the network delivers it
    STALE = "stale"  # a list does not know the last changes; on any other operation, nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An object in the store."""

    data: bytes
    token: str
    modified: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of an actor, with the call that made it; `act` executes it."""

    actor: str
    call: int
    verb: str
    name: str
    act: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One object before and after, and the request that changed it."""

    request: Request
    name: str
    before: Held | None
    after: Held | None


Observer = Callable[[Change], None]


@dataclass(slots=True)
class ModelStore:
    """The objects, and what every actor's seat shares. `now` counts operations: the store's clock, in its seconds."""

    objects: dict[str, Held] = field(default_factory=dict)
    now: float = 0.0
    observers: list[Observer] = field(default_factory=list)
    late: list[Request] = field(default_factory=list)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    operations: int = 0
    alarms: dict[str, float] = field(default_factory=dict)  # by actor: the time that it sleeps until
    _recent: deque[tuple[str, Held | None]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _tokens: int = 0
    _doing: Request | None = None

    def seat(self, actor: Callable[[], Actor]) -> Seat:
        """Return an actor's store."""
        return Seat(self, actor)

    def do(self, request: Request) -> object:
        """Execute one request, and report its change to the observers."""
        self.now += 1.0
        self.operations += 1
        self._doing = request
        result = request.act()
        self._doing = None
        return result

    def deliver(self, number: int) -> None:
        """Execute one of the requests under way, if there is any."""
        if self.late:
            request = self.late.pop(number % len(self.late))
            self.note(request, "arrives")
            self.do(request)

    def note(self, request: Request, what: object) -> None:
        """Keep a line for a report."""
        self.lines.append(f"{int(self.now):4} {request.actor} {request.verb} {request.name}: {what}")

    # Effects of requests. Tokens are numbers: numbered and hashed versions are equivalent here,
    # because every ref has its own write-id.

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""
        self._tokens += 1
        self._change(name, Held(data=data, token=f"v{self._tokens}", modified=self.now))

    def create(self, name: str, data: bytes) -> bool:
        """Write an object if it is not there."""
        if name in self.objects:
            return False
        self.put(name, data)
        return True

    def swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Write an object if its token is the expected one."""
        current = self.objects.get(name)
        if (current.token if current else None) != expected:
            return False
        self.put(name, data)
        return True

    def delete(self, name: str) -> None:
        """Remove an object."""
        if name in self.objects:
            self._change(name, None)

    def held(self, name: str) -> Held:
        """Return an object; StoreNotFound if it is not there."""
        stored = self.objects.get(name)
        if stored is None:
            raise StoreNotFound(f"store model: {name} is not there")
        return stored

    def listed(self, prefix: str, *, stale: bool = False) -> list[Entry]:
        """Return the objects under `prefix`; if stale, those of some changes ago.

        Refs and announcements are few and are the basis of decisions: a store with stale lists of them is not one to
        collect in.
        """
        objects = dict(self.objects)
        if stale and not prefix.startswith((names.REFS, names.ANNOUNCEMENTS)):
            for name, before in reversed(self._recent):
                if before is None:
                    objects.pop(name, None)
                else:
                    objects[name] = before
        return [
            Entry(name=name, size=len(held.data), modified=held.modified)
            for name, held in sorted(objects.items())
            if name.startswith(prefix)
        ]

    def _change(self, name: str, after: Held | None) -> None:
        before = self.objects.get(name)
        if after is None:
            del self.objects[name]
        else:
            self.objects[name] = after
        self._recent.append((name, before))
        assert self._doing is not None
        change = Change(request=self._doing, name=name, before=before, after=after)
        for observer in self.observers:
            observer(change)


class Seat:
    """One actor's store: every operation is a turn, and the last turn of several may go wrong."""

    def __init__(self, store: ModelStore, actor: Callable[[], Actor]) -> None:
        self._store = store
        self._actor = actor
        self.fault = Fault.NONE
        self.call = 0
        self.faults = 0

    @property
    def url(self) -> str:
        """The place, for messages."""
        return "model"

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object."""
        return self.take("get", name, lambda: self._store.held(name).data[start:stop])

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token."""

        def read() -> Versioned | None:
            stored = self._store.objects.get(name)
            return Versioned(data=stored.data, token=stored.token) if stored else None

        return self.take("read", name, read)

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        return self.take("size", name, lambda: len(self._store.held(name).data))

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object, whole or not at all. The model damages nothing: there is nothing to check."""
        whole = b"".join(chunks(data))
        self.take("put", name, lambda: self._store.put(name, whole))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object."""
        return self.take("create", name, lambda: self._store.create(name, data))

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object."""
        return self.take("swap", name, lambda: self._store.swap(name, expected, data))

    def list(self, prefix: str) -> Iterator[str]:
        """Yield names, sorted."""
        for entry in self.entries(prefix):
            yield entry.name

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield objects, sorted by name."""
        yield from self.take("list", prefix, lambda: self._store.listed(prefix))

    def delete(self, name: str) -> None:
        """Remove an object."""
        self.take("delete", name, lambda: self._store.delete(name))

    def take(self, verb: str, name: str, act: Callable[[], T]) -> T:
        """Take the turns for one request, and execute it with the fault that was drawn for it."""
        if verb != "list":
            check_name(name)
        actor = self._actor()
        last = actor.turn(verb)
        fault = self.fault if last else Fault.NONE
        self.faults += bool(fault)
        store = self._store
        request = Request(actor=actor.name, call=self.call, verb=verb, name=name, act=act)
        store.note(request, fault or "done")
        match fault:
            case Fault.DIE_BEFORE:
                actor.die()
            case Fault.LOST:
                raise StoreError(f"store model: cannot {verb} {name}: the request was lost")
            case Fault.LATE:
                if verb in ("put", "create", "swap", "delete"):
                    store.late.append(request)
                raise StoreError(f"store model: cannot {verb} {name}: no answer")
            case Fault.STALE if verb == "list":
                request = Request(
                    actor=actor.name, call=self.call, verb=verb, name=name,
                    act=lambda: store.listed(name, stale=True),
                )  # fmt: skip
        result: T = store.do(request)  # type: ignore[assignment]
        match fault:
            case Fault.DIE_AFTER:
                actor.die()
            case Fault.UNANSWERED:
                raise StoreError(f"store model: cannot {verb} {name}: the answer was lost")
            case Fault.TWICE:
                result = store.do(request)  # type: ignore[assignment]
            case Fault.ECHO if verb in ("put", "create", "swap", "delete"):
                store.late.append(request)
        return result
