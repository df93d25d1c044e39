"""The inventories of a run's tile servers, and their tiles as a source for the resolver."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from checkpointing.errors import SourceError
from checkpointing.reading.sources import Offered
from elastic3d.clock import SYSTEM
from elastic3d.log import process_log
from elastic3d.snapshots import table as tables
from elastic3d.snapshots import wire
from elastic3d.snapshots.offers import OfferedShard
from elastic3d.snapshots.table import SnapshotTable
from elastic3d.trust.channel import Channel, WireError
from elastic3d.trust.credentials import Credentials

_ASKED_AT_ONCE = 32
_PATIENCE, _PAUSE = 2.0, 0.25
"""Seconds in which a server that does not answer is asked again, and between two tries: a packet may be lost."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """One rank's snapshot as one server holds it, its own or another's replica.

    rank, world: in the generation that made it. facts: as given to `snapshot`. digests: of each box's tiles, together.
    copies: other servers that hold the same.
    """

    server: str
    generation: int
    step: int
    rank: int
    world: int
    facts: dict[str, Any]
    table: SnapshotTable
    digests: tuple[str, ...]
    copies: tuple[str, ...] = ()

    @cached_property
    def shards(self) -> tuple[OfferedShard, ...]:
        """All boxes of the snapshot, on offer."""
        return tuple(
            OfferedShard(
                spec=entry.spec,
                box=entry.box,
                source=self.server,
                copies=self.copies,
                generation=self.generation,
                step=self.step,
                rank=self.rank,
                offset=entry.offset,
                tile_bytes=self.table.tile_bytes,
                digests=digests,
            )
            for entry, digests in zip(self.table.entries, self.digests, strict=True)
        )

    def offers(self) -> Sequence[OfferedShard]:
        """Return what is on offer; the name of its source is the server's address."""
        return self.shards

    def tiles(self) -> list[Offered]:
        """Return all of it tile by tile: many, of which a restore needs few."""
        return [tile for shard in self.shards for tile in shard.tiles()]


def merged(held: Iterable[Inventory]) -> list[Inventory]:
    """Return one inventory for what several servers hold alike, down to the digest of each tile."""
    first: dict[tuple[object, ...], Inventory] = {}
    for one in held:
        same = (one.generation, one.step, one.rank, one.world, one.table.identity, one.digests)
        known = first.get(same)
        first[same] = one if known is None else replace(known, copies=(*known.copies, one.server))
    return list(first.values())


def inventories(servers: Sequence[str], credentials: Credentials) -> list[Inventory]:
    """Ask every server at once what it holds; one that cannot be reached, or is not of this run, holds nothing.

    It is asked again before that: what only it holds would be lost, and a generation has no node that is known to be
    gone. Then it is told (`inventory.missed`).
    """
    if not servers:
        return []
    with ThreadPoolExecutor(max_workers=min(len(servers), _ASKED_AT_ONCE), thread_name_prefix="inventory") as pool:
        answers = pool.map(lambda server: _ask(server, credentials), servers)
        return [inventory for answer in answers for inventory in answer]


def _ask(server: str, credentials: Credentials) -> list[Inventory]:
    until = SYSTEM.monotonic() + _PATIENCE
    while True:
        try:
            with wire.connect(server, credentials) as connection:
                connection.send({"op": "inventory"})
                return _read_inventories(server, connection.receive())
        except WireError as error:
            if SYSTEM.monotonic() >= until:
                process_log().emit("inventory.missed", server=server, error=str(error))
                return []
        SYSTEM.sleep(_PAUSE)


def _read_inventories(server: str, answer: dict[str, Any]) -> list[Inventory]:
    try:
        known = {table.identity: table for table in map(tables.from_wire, answer["tables"].values())}
        return [_inventory(server, one, known[one["table"]]) for one in answer["snapshots"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"{server}: not an inventory: {error!r}") from error


def _inventory(server: str, one: dict[str, Any], table: SnapshotTable) -> Inventory:
    return Inventory(
        server=server,
        generation=int(one["generation"]),
        step=int(one["step"]),
        rank=int(one["rank"]),
        world=int(one["world"]),
        facts=dict(one["facts"]),
        table=table,
        digests=tables.split_digests(table, str(one["digests"])),
    )


class PeerSource:
    """Tiles from one tile server. Safe for several threads.

    A server that has failed once is not asked again: it is dead or cut off, and a thousand tiles need not each find
    out.
    """

    def __init__(self, server: str, credentials: Credentials) -> None:
        self.name = server
        self._credentials = credentials
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._fetched: dict[tuple[int, ...], memoryview] = {}
        self._down: str | None = None

    def prefetch(self, tiles: Sequence[Offered]) -> None:
        """Fetch many tiles in one request, for `fetch` to hand out. Failures show in `fetch`."""
        try:
            fetched = self._request([tuple(tile.where) for tile in tiles])
        except WireError:
            return
        with self._lock:
            self._fetched.update(fetched)

    def fetch(self, tile: Offered) -> bytes | memoryview:
        """Return the tile's bytes, unverified; SourceError if the server is gone or no longer has it."""
        where = tuple(tile.where)
        with self._lock:
            data = self._fetched.pop(where, None)
        if data is None:
            try:
                data = self._request([where]).get(where)
            except WireError as error:
                raise SourceError(f"tile server {self.name}: {error}") from error
        if data is None:
            raise SourceError(f"tile server {self.name} has let go of step {where[1]}")
        return data

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()
            self._fetched.clear()

    def _request(self, wanted: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], memoryview]:
        connection = self._borrow()
        try:
            connection.send({"op": "fetch", "ranges": [list(where) for where in wanted]})
            answer = connection.receive()
            sizes = answer.get("sizes")
            if not isinstance(sizes, list) or len(sizes) != len(wanted):
                raise WireError(str(answer.get("error", "not an answer")))
            return self._receive(connection, wanted, sizes)
        except WireError as error:
            connection.close()
            with self._lock:
                self._down = str(error)
            raise

    def _receive(
        self, connection: Channel, wanted: Iterable[tuple[int, ...]], sizes: Iterable[int]
    ) -> dict[tuple[int, ...], memoryview]:
        present = [(where, size) for where, size in zip(wanted, sizes, strict=True) if size >= 0]
        if any(size != where[4] for where, size in present):
            raise WireError("not the bytes that were asked for")
        data = memoryview(connection.receive_bytes(sum(size for _, size in present)))
        tiles, at = {}, 0
        for where, size in present:
            tiles[where] = data[at : at + size]
            at += size
        with self._lock:
            self._idle.append(connection)
        return tiles

    def _borrow(self) -> Channel:
        with self._lock:
            if self._down is not None:
                raise WireError(self._down)
            if self._idle:
                return self._idle.pop()
        try:
            return wire.connect(self.name, self._credentials)
        except WireError as error:
            with self._lock:
                self._down = str(error)
            raise
