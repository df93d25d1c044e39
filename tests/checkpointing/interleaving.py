"""A store whose operations are granted one by one, in an order drawn from a seed, to actors that may die anywhere.

Each actor is a thread that runs the unmodified code; before every store operation it waits for its turn. One operation
is executed at a time, so a seed gives the same history again. The store's clock is virtual and moves with them.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from checkpointing.errors import StoreError, StoreNotFound
from checkpointing.stores.protocol import Data, Entry, Versioned, chunks


class Killed(BaseException):
    """The actor's process has died."""


@dataclass
class Object:
    data: bytes
    modified: float


class World:
    """The objects, the clock, and whose turn it is."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.objects: dict[str, Object] = {}
        self.now = 1000.0
        self.actors: list[Actor] = []
        self.log: list[str] = []
        self.late: list[tuple[float, str]] = []
        self.after: Callable[[str, str], None] = lambda verb, name: None

    def start(self, name: str, work: Callable[[Actor], None], **faults: float) -> Actor:
        """Add an actor; it does nothing before `run`."""
        actor = Actor(self, name, work, **faults)
        self.actors.append(actor)
        return actor

    def run(self) -> None:
        """Grant operations until every actor has ended or died."""
        for actor in self.actors:
            actor.begin()
        try:
            while living := [actor for actor in self.actors if actor.request is not None]:
                awake = [actor for actor in living if actor.asleep_until <= self.now]
                if not awake:
                    self.now = min(actor.asleep_until for actor in living)
                    continue
                # Some pause for long, so that others get far while they are in the middle of something.
                actor = self.random.choices(awake, [actor.weight for actor in awake])[0]
                if self.random.random() < 0.02:
                    actor.weight = self.random.choice((0.01, 0.2, 1.0, 5.0))
                self.now += self.random.random() * 0.2
                self._late()
                actor.grant()
        finally:
            for actor in self.actors:
                actor.kill()

    def _late(self) -> None:
        due = [entry for entry in self.late if entry[0] <= self.now]
        for entry in due:
            self.late.remove(entry)
            if self.objects.pop(entry[1], None) is not None:
                self.log.append(f"{self.now:.1f} (late) delete {entry[1]}")
                self.after("delete", entry[1])


@dataclass
class Actor:
    """One process. The chances are per operation: to die, and that an answer is lost."""

    world: World
    name: str
    work: Callable[[Actor], None]
    dies: float = 0.0
    loses: float = 0.0
    late: float = 0.0
    weight: float = 1.0
    asleep_until: float = 0.0
    request: tuple[str, str] | None = None
    error: BaseException | None = None
    _dead: bool = False
    _go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def begin(self) -> None:
        """Run until its first operation."""
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        self._asked.acquire()

    def grant(self) -> None:
        """Let it execute its operation, and run until the next."""
        if self.world.random.random() < self.dies:
            self.world.log.append(f"{self.world.now:.1f} {self.name} dies before {self.request}")
            self.kill()
            return
        self.request = None
        self._go.release()
        self._asked.acquire()

    def kill(self) -> None:
        """Kill it: nothing it does reaches the store any more."""
        self._dead = True
        while self.request is not None:
            self.request = None
            self._go.release()
            self._asked.acquire()
        self._thread.join()

    def sleep(self, seconds: float) -> None:
        """Sleep by the virtual clock."""
        self.asleep_until = self.world.now + seconds
        self.turn("sleep", f"{seconds:.1f}")

    def clock(self) -> float:
        """Return the virtual clock."""
        return self.world.now

    def turn(self, verb: str, name: str) -> None:
        """Wait until an operation is granted."""
        if self._dead:
            raise Killed
        self.request = (verb, name)
        self._asked.release()
        self._go.acquire()
        if self._dead:
            raise Killed

    def _main(self) -> None:
        try:
            self.work(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error
        self.request = None
        self._asked.release()


class View:
    """The store as one actor sees it."""

    url = "interleaved"

    def __init__(self, actor: Actor) -> None:
        self._actor, self._world = actor, actor.world

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._do("get", name, lambda: self._there(name).data[start:stop])

    def read(self, name: str) -> Versioned | None:
        return self._do("read", name, lambda: self._versioned(name))

    def size(self, name: str) -> int:
        return self._do("size", name, lambda: len(self._there(name).data))

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        self._do("put", name, lambda: self._write(name, b"".join(chunks(data))))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._do("create", name, lambda: name not in self._world.objects and self._write(name, data))

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        def act() -> bool:
            current = self._versioned(name)
            return (current.token if current else None) == expected and self._write(name, data)

        return self._do("swap", name, act)

    def list(self, prefix: str) -> Iterator[str]:
        return iter([entry.name for entry in self.entries(prefix)])

    def entries(self, prefix: str) -> Iterator[Entry]:
        def act() -> list[Entry]:
            objects = sorted(self._world.objects.items())
            return [Entry(name=n, size=len(o.data), modified=o.modified) for n, o in objects if n.startswith(prefix)]

        return iter(self._do("list", prefix, act))

    def delete(self, name: str) -> None:
        if self._world.random.random() < self._actor.late:
            # The request is under way for hours, and its sender gets an error.
            def act() -> None:
                self._world.late.append((self._world.now + self._world.random.choice((5, 60, 3600, 80000)), name))
                raise StoreError("timed out")
        else:

            def act() -> None:
                self._world.objects.pop(name, None)

        self._do("delete", name, act)

    def _do(self, verb: str, name: str, act: Callable[[], Any]) -> Any:
        self._actor.turn(verb, name)
        world = self._world
        mode = world.random.random() / self._actor.loses if self._actor.loses else 1.0
        if mode < 0.5:
            raise StoreError("connection refused")
        result = act()
        world.log.append(f"{world.now:.1f} {self._actor.name} {verb} {name} -> {str(result)[:60]!r}")
        world.after(verb, name)
        if mode < 1.0 and verb != "delete":
            raise StoreError("response lost")
        return result

    def _there(self, name: str) -> Object:
        if name not in self._world.objects:
            raise StoreNotFound(f"{name} is not there")
        return self._world.objects[name]

    def _versioned(self, name: str) -> Versioned | None:
        stored = self._world.objects.get(name)
        return None if stored is None else Versioned(data=stored.data, token=hashlib.md5(stored.data).hexdigest())

    def _write(self, name: str, data: bytes) -> bool:
        self._world.objects[name] = Object(data, self._world.now)
        return True


class Free:
    """An actor that never waits; its store merely has a virtual clock."""

    name, loses, late = "free", 0.0, 0.0

    def __init__(self) -> None:
        self.world = World(0)

    def turn(self, verb: str, name: str) -> None:
        """Go on."""

    def sleep(self, seconds: float) -> None:
        """Let the virtual clock go on."""
        self.world.now += seconds
