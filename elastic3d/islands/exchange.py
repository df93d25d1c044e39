"""The objects of the store between islands; none is ever changed.

    setup.json                        what all islands have in common
    joins/<island>.json               an island asks to be admitted
    left/<island>.json                an island is over
    sent/<outer>/<island>.json        its delta is there, whole
    outer/<outer>.json                an outer step, sealed
    base/<outer>.json                 the outer parameters after it are there, whole
    deltas/<outer>/<island>/<try>/    a delta, as a checkpoint
    bases/<outer>/<try>/              outer parameters and their momentum, likewise

What must be decided once is an object that only one can create: the store decides, and no wall clock does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, TypeVar

from checkpointing import Key, Store, open_store
from checkpointing.errors import StoreUnfit
from checkpointing.stores.address import redacted
from checkpointing.stores.limited import Bandwidth, LimitedStore
from checkpointing.stores.protocol import create, decides_creations
from elastic3d.errors import ConfigurationError
from elastic3d.islands.folder import Folder
from elastic3d.islands.options import Islands
from elastic3d.islands.record import SCHEMA, Sealed, SentDelta, Setup
from elastic3d.quantities import rate
from elastic3d.values import from_json, to_json

T = TypeVar("T", Setup, Sealed, SentDelta)

_DIGITS = 8


def open_exchange(islands: Islands, *, ranks: int = 1) -> Exchange:
    """Return what is between the islands; ConfigurationError, without secrets, where the store cannot be used.

    ranks: of the island, which share its bandwidth.
    """
    where = redacted(islands.url)
    try:
        store = open_store(islands.url, key=Key.from_file(os.fspath(islands.key)) if islands.key is not None else None)
    except (StoreUnfit, OSError, ValueError) as error:
        raise ConfigurationError(f"elastic3d.Islands(store={where!r}) cannot be used: {error}") from error
    if not decides_creations(store):
        raise ConfigurationError(
            f"elastic3d.Islands(store={where!r}) cannot be used: it does not let one of several writers create an "
            "object, by which outer steps are sealed. Take a store with conditional writes"
        )
    if islands.max_bandwidth is not None:
        store = LimitedStore(store, Bandwidth(rate(islands.max_bandwidth, "max_bandwidth") / ranks))
    return Exchange(store)


class Exchange:
    """Reads and writes these objects. StoreError where the store does not answer: then call it again."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return redacted(self.store.url)

    def setup(self, mine: Setup) -> Setup:
        """Return what all islands have in common: what is there, or else this, which is there then."""
        there = self.store.read("setup.json")
        data = there.data if there is not None else create(self.store, "setup.json", _encoded(mine))
        return self._decoded(Setup, data, "setup.json")

    def agreed(self) -> Setup | None:
        """Return what all islands have in common, None where there is none yet."""
        return self._read(Setup, "setup.json")

    def joined(self) -> list[str]:
        """Return all islands that ever asked to be admitted."""
        return [_stem(name) for name in self.store.list("joins/")]

    def token_of(self, island: str) -> str:
        """Return the token under which an island asked to be admitted, "" where it did not."""
        there = self.store.read(f"joins/{island}.json")
        return "" if there is None else str(json.loads(there.data).get("token", ""))

    def join(self, island: str, token: str) -> bool:
        """Ask to be admitted; False if another one has asked under this name and number."""
        mine = json.dumps({"schema": SCHEMA, "token": token}).encode()
        return create(self.store, f"joins/{island}.json", mine) == mine

    def left(self) -> set[str]:
        """Return the islands that are over."""
        return {_stem(name) for name in self.store.list("left/")}

    def leave(self, island: str, why: str) -> None:
        """Say that an island is over, so that nobody waits for it."""
        create(self.store, f"left/{island}.json", json.dumps({"schema": SCHEMA, "why": why}).encode())

    def come_back(self, island: str) -> None:
        """Say that an island goes on after all, such as with more steps than before."""
        self.store.delete(f"left/{island}.json")

    def sent(self, outer: int) -> dict[str, SentDelta]:
        """Return the deltas of an outer step that are there, by island."""
        names = list(self.store.list(f"sent/{_number(outer)}/"))
        return {_stem(name): self._decoded(SentDelta, self.store.get(name), name) for name in names}

    def sent_by(self, outer: int, island: str) -> SentDelta | None:
        """Return the delta of one island, None if it is not there."""
        return self._read(SentDelta, f"sent/{_number(outer)}/{island}.json")

    def send(self, outer: int, mine: SentDelta) -> SentDelta:
        """Say that a delta is there; return what was said of it first."""
        name = f"sent/{_number(outer)}/{mine.island}.json"
        return self._decoded(SentDelta, create(self.store, name, _encoded(mine)), name)

    def sealed(self, outer: int) -> Sealed | None:
        """Return an outer step, None if it is not sealed."""
        return self._read(Sealed, f"outer/{_number(outer)}.json")

    def newest(self) -> Sealed | None:
        """Return the newest outer step, None if there is none."""
        names = list(self.store.list("outer/"))
        return self._read(Sealed, names[-1]) if names else None

    def records(self) -> Iterator[Sealed]:
        """Yield all outer steps, in order."""
        for name in list(self.store.list("outer/")):
            yield self._decoded(Sealed, self.store.get(name), name)

    def seal(self, mine: Sealed) -> Sealed:
        """Seal an outer step; return what is sealed, by whomever."""
        name = f"outer/{_number(mine.outer)}.json"
        return self._decoded(Sealed, create(self.store, name, _encoded(mine)), name)

    def base(self, most: int | None = None) -> tuple[int, SentDelta] | None:
        """Return the newest outer parameters that are there, of at most so many outer steps, and of how many."""
        names = [name for name in self.store.list("base/") if most is None or int(_stem(name)) <= most]
        if not names:
            return None
        return int(_stem(names[-1])), self._decoded(SentDelta, self.store.get(names[-1]), names[-1])

    def give_base(self, outer: int, mine: SentDelta) -> None:
        """Say that the outer parameters after an outer step are there."""
        create(self.store, f"base/{_number(outer)}.json", _encoded(mine))

    def deltas_from(self, outer: int) -> bool:
        """Return whether the deltas of an outer step have not been deleted."""
        return any(True for _ in self.store.list(f"deltas/{_number(outer)}/"))

    def delta_folder(self, outer: int, island: str, token: str) -> str:
        """Return where a delta goes that is written under a token of its own."""
        return f"deltas/{_number(outer)}/{island}/{token}"

    def base_folder(self, outer: int, token: str) -> str:
        """Return where outer parameters go."""
        return f"bases/{_number(outer)}/{token}"

    def folder(self, name: str) -> Folder:
        """Return a folder as a store of its own."""
        return Folder(self.store, name)

    def forget(self, base: int, keep: int) -> None:
        """Delete deltas that nobody needs who begins at outer step `base`, but for the newest `keep`, and older bases.

        The records stay.
        """
        for kind, last in (("deltas", base - keep), ("bases", base - 1)):
            names = [name for name in self.store.list(f"{kind}/") if int(name.split("/")[1]) <= last]
            if kind == "bases":
                # First nobody is sent there any more.
                for name in [name for name in self.store.list("base/") if int(_stem(name)) <= last]:
                    self.store.delete(name)
            for name in names:
                self.store.delete(name)

    def _read(self, kind: type[T], name: str) -> T | None:
        there = self.store.read(name)
        return None if there is None else self._decoded(kind, there.data, name)

    def _decoded(self, kind: type[T], data: bytes, name: str) -> T:
        try:
            plain: Any = json.loads(data)
            if isinstance(plain, dict) and plain.get("schema", SCHEMA) != SCHEMA:
                raise ConfigurationError(
                    f"{name} in {self.place} was written by another version of elastic3d (schema {plain['schema']}, "
                    f"known here is {SCHEMA}). Trying again does not help: use one version on all islands"
                )
            return from_json(kind, plain)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                f"{name} in {self.place} cannot be read: {error}. Trying again does not help: something else wrote "
                "there, or the object is damaged; restore it, or give the islands another store"
            ) from error


def _encoded(value: Setup | Sealed | SentDelta) -> bytes:
    return json.dumps(to_json(value), separators=(",", ":"), sort_keys=True).encode()


def _number(outer: int) -> str:
    return f"{outer:0{_DIGITS}}"


def _stem(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".json")
