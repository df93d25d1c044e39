"""The snapshots of one slot, and of those whose buddy it is: their bytes, their digests and the use of buffers.

Shared by the slot's thread, the replicator and the tile server's threads; every public method takes the lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from checkpointing.format import tiles
from checkpointing.format.tiles import Piece
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.arena import Arena
from elastic3d.snapshots.holdings import HOME_BUFFERS, Holdings, Mark, Origin, Replicas
from elastic3d.snapshots.permits import REPLICAS
from elastic3d.snapshots.table import BoxExtent, SnapshotTable


@dataclass(slots=True)
class Stored:
    """One complete snapshot in this host's memory.

    digests: of the table's tiles, "" until computed; those that came with it are of what was written.
    """

    mark: Mark
    rank: int
    world: int
    facts: Mapping[str, Any]
    table: SnapshotTable
    data: memoryview
    digests: list[str]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def digest_run(self, first: int, stop: int) -> list[str]:
        """Return the digests of tiles [first, stop), computing those that are missing."""
        with self.lock:
            for index in range(first, stop):
                if not self.digests[index]:
                    (self.digests[index],) = digests(self.table, self.data, index, index + 1)
            return self.digests[first:stop]

    def digest_all(self) -> list[str]:
        """Return the digest of every tile, computing those that are missing."""
        for first, stop in self.table.runs:
            self.digest_run(first, stop)
        return self.digests

    def altered(self) -> BoxExtent | None:
        """Return the first tile whose bytes do not have the digest that is known of them; None if all have."""
        for index, (tile, known) in enumerate(zip(self.table.tiles, self.digests, strict=True)):
            if known and digests(self.table, self.data, index, index + 1) != [known]:
                return tile
        return None

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Return the half-open range of bytes that tiles [first, stop) lie in."""
        last = self.table.tiles[stop - 1]
        return self.table.tiles[first].offset, last.offset + last.nbytes


def digests(table: SnapshotTable, data: memoryview, first: int, stop: int) -> list[str]:
    """Return the digests of tiles [first, stop) of a snapshot's bytes."""
    return [
        tiles.digest(tile.spec, tile.box, data[tile.offset : tile.offset + tile.nbytes])
        for tile in table.tiles[first:stop]
    ]


class SnapshotName(NamedTuple):
    """One rank's snapshot among all of a run."""

    generation: int
    step: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """A snapshot that is not overwritten for now, and a descriptor of the segment that it begins."""

    descriptor: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arriving:
    """A snapshot that is arriving in `stored` from its origin; it is not offered before it is complete."""

    buffer: int
    stored: Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """A snapshot to send, the steps that its origin keeps at home, and what its generation would go back to."""

    stored: Stored
    keep: tuple[int, ...]
    base: Mark | None


class NoRoom(Exception):
    """A replica would take more memory than this host has for replicas."""


class SnapshotMemory:
    """See the module. replica_bytes: memory for all replicas together, None for no limit."""

    def __init__(self, *, replica_bytes: int | None = None) -> None:
        self._replica_bytes = replica_bytes
        self._changed = threading.Condition()
        self._holdings = Holdings()
        self._replicas = Replicas()
        self._arenas = [Arena.create() for _ in range(HOME_BUFFERS)]
        self._home: dict[Mark, Stored] = {}
        self._others: dict[int, Stored] = {}
        self._other_arenas: list[Arena] = []
        self._tables: dict[str, SnapshotTable] = {}
        self._closed = False

    # The slot's thread, on behalf of the trainer.

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors of the home segments, for a trainer to inherit."""
        return tuple(arena.descriptor for arena in self._arenas)

    def learn(self, table: SnapshotTable) -> None:
        """Take note of how the snapshots that follow are laid out."""
        with self._changed:
            if table.identity in self._tables:
                return
        # Cutting a table of many thousands of boxes takes a while, and a vote must not wait for it.
        assert table.runs is not None
        with self._changed:
            self._tables.setdefault(table.identity, table)

    def grant(self, trainer: int = 0) -> list[int]:
        """Grant every free buffer to the trainer of this number; return those newly granted."""
        with self._changed:
            return self._holdings.grant(trainer)

    def want(self, trainer: int = 0) -> None:
        """Free a buffer for a final snapshot, now or as soon as one is idle."""
        with self._changed:
            self._holdings.want(trainer)
            self._forget()

    def written(
        self,
        buffer: int,
        mark: Mark,
        *,
        rank: int,
        world: int,
        facts: Mapping[str, Any],
        table: str,
        checkpoint: bool,
        digests: Sequence[str] = (),
    ) -> None:
        """Take note of a complete snapshot. table: the identity of one that was learnt. digests: see `Stored`."""
        with self._changed:
            known = self._tables[table]
            assert len(digests) in (0, len(known.tiles))
            self._holdings.written(buffer, mark, checkpoint=checkpoint)
            self._home[mark] = Stored(
                mark=mark,
                rank=rank,
                world=world,
                facts=facts,
                table=known,
                data=self._arenas[buffer].view(known.nbytes),
                digests=list(digests) or [""] * len(known.tiles),
            )
            self._forget()
            self._changed.notify_all()

    def trainer_gone(self, trainer: int = 0) -> None:
        """Take back what was granted to a trainer, which has ended."""
        with self._changed:
            self._holdings.trainer_gone(trainer)

    # Generations.

    def set_generation(self, number: int) -> None:
        """Refuse replicas of older generations from now on."""
        with self._changed:
            self._replicas.refuse_below(number)

    def restored(self, generation: int, base: Mark | None) -> None:
        """Begin a generation: of older ones, only the snapshot that it restored from is kept."""
        with self._changed:
            self._holdings.restored(generation, base)
            self._replicas.restored(generation, base)
            self._forget()

    def safe(self, mark: Mark) -> None:
        """Take note of a vote's safe step: older steps and generations are dropped."""
        with self._changed:
            self._holdings.safe(mark)
            self._replicas.settled(mark.generation)
            self._forget()

    # The replicator.

    def wait_for_work(self, timeout: float) -> Replication | None:
        """Return the next snapshot to hash and send, held unchanged until `replicated`; None if none came in time."""
        with self._changed:
            if self._closed:
                return None
            mark = self._holdings.next_to_replicate()
            if mark is None:
                self._changed.wait(timeout)
                mark = self._holdings.next_to_replicate()
            if mark is None or self._closed:
                return None
            self._holdings.begin(mark)
            keep = tuple(m.step for m in self._holdings.marks() if m.generation == mark.generation)
            return Replication(stored=self._home[mark], keep=keep, base=self._holdings.base)

    def replicated(self, mark: Mark, *, held: bool, refused: bool = False) -> bool:
        """End a replication; return whether it made `mark` the newest step held twice."""
        with self._changed:
            newer = self._holdings.end(mark, held=held, refused=refused)
            self._forget()
            return newer

    def altered(self, mark: Mark) -> bool:
        """Take note that a snapshot being sent is not as it was written; return whether no newer one can be safe."""
        with self._changed:
            return self._holdings.altered(mark)

    def buddy_changed(self) -> None:
        """Replicate again what only the former buddy has."""
        with self._changed:
            self._holdings.buddy_changed()
            self._changed.notify_all()

    @property
    def nbytes(self) -> int:
        """Bytes that all snapshots take here, and those that may be written next: no segment shrinks."""
        with self._changed:
            return sum(arena.size for arena in (*self._arenas, *self._other_arenas))

    def close(self) -> None:
        """Let `wait_for_work` return. The memory is freed with the last view of it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for arena in (*self._arenas, *self._other_arenas):
                arena.close()
            self._home.clear()
            self._others.clear()

    # The tile server.

    def offered(self) -> list[Stored]:
        """Return every complete snapshot with its digests, those at home first."""
        with self._changed:
            stored = list(self._home.values())
        for one in stored:
            one.digest_all()
        with self._changed:
            # A snapshot that was dropped while it was being hashed may have been overwritten.
            return [one for one in stored if self._home.get(one.mark) is one] + list(self._others.values())

    def find(self, generation: int, step: int, rank: int) -> Stored | None:
        """Return a complete snapshot."""
        with self._changed:
            home = self._home.get(Mark(generation, step))
            if home is not None and home.rank == rank:
                return home
            for stored in self._others.values():
                if stored.mark == Mark(generation, step) and stored.rank == rank:
                    return stored
            return None

    def arriving(
        self,
        mark: Mark,
        *,
        rank: int,
        world: int,
        facts: Mapping[str, Any],
        table: str,
        keep: Collection[int],
        base: Mark | None,
    ) -> Arriving | None:
        """Return where to receive a snapshot, None if its generation is too old; UnknownTable, NoRoom."""
        with self._changed:
            known = self._tables.get(table)
            if known is None:
                raise tables.UnknownTable(table)
            origin = Origin(generation=mark.generation, rank=rank)
            self._replicas.follow(mark.generation, base)
            buffer = self._replicas.begin(origin, mark.step, keep)
            if buffer is None:
                return None
            self._forget()
            while buffer >= len(self._other_arenas):
                self._other_arenas.append(Arena.create())
            arena = self._other_arenas[buffer]
            try:
                if self._replicas.count(origin) > REPLICAS:
                    raise NoRoom(f"{REPLICAS} snapshots of rank {rank} are here already")
                self._check_room(arena, known.nbytes)
                arena.reserve(known.nbytes)
                data = arena.view(known.nbytes)
            except BaseException:
                self._replicas.abort(buffer)
                raise
            stored = Stored(
                mark=mark,
                rank=rank,
                world=world,
                facts=facts,
                table=known,
                data=data,
                digests=[""] * len(known.tiles),
            )
            return Arriving(buffer=buffer, stored=stored)

    def _check_room(self, arena: Arena, nbytes: int) -> None:
        if self._replica_bytes is None:
            return
        others = sum(one.size for one in self._other_arenas if one is not arena)
        if others + max(nbytes, arena.size) > self._replica_bytes:
            raise NoRoom(
                f"a replica of {nbytes} bytes, beside {others} that are held, is more than the {self._replica_bytes} "
                "that this host has for replicas"
            )

    def arrived(self, arriving: Arriving) -> bool:
        """Offer a snapshot whose every tile was verified; return whether it is held."""
        with self._changed:
            held = self._replicas.complete(arriving.buffer)
            if held:
                self._others[arriving.buffer] = arriving.stored
            self._forget()
            return held

    def lost(self, arriving: Arriving) -> None:
        """Give up a snapshot that did not arrive whole and intact."""
        with self._changed:
            self._replicas.abort(arriving.buffer)

    # Trainers of this node.

    @contextmanager
    def lent(self, wanted: Sequence[SnapshotName]) -> Iterator[list[Lent | None]]:
        """Hold complete snapshots unchanged while the context is open, None for those that are not here.

        The descriptors are closed with the context.
        """
        with ExitStack() as back:
            with self._changed:
                lent = [self._lend(name, back) for name in wanted]
            yield lent

    def _lend(self, name: SnapshotName, back: ExitStack) -> Lent | None:
        mark = Mark(name.generation, name.step)
        home = self._home.get(mark)
        if home is not None and home.rank == name.rank:
            arena, nbytes = self._arenas[self._holdings.lend(mark)], home.table.nbytes
            back.callback(self._take_back, lambda: self._holdings.take_back(mark))
        else:
            copies = ((n, one) for n, one in self._others.items() if (one.mark, one.rank) == (mark, name.rank))
            buffer, stored = next(copies, (-1, None))
            if stored is None:
                return None
            self._replicas.lend(buffer)
            back.callback(self._take_back, lambda: self._replicas.take_back(buffer))
            arena, nbytes = self._other_arenas[buffer], stored.table.nbytes
        descriptor = os.dup(arena.descriptor)  # stays the same segment, whatever is closed meanwhile
        back.callback(os.close, descriptor)
        return Lent(descriptor=descriptor, nbytes=nbytes)

    def _take_back(self, end: Callable[[], None]) -> None:
        with self._changed:
            end()
            self._forget()

    # The keeper, for uploads.

    @contextmanager
    def pinned(self, step: int) -> Iterator[Stored]:
        """Hold the newest snapshot of `step` unchanged while the context is open; StateError if there is none."""
        with self._changed:
            stored = self._home[self._holdings.pin(step)]
        try:
            yield stored
        finally:
            with self._changed:
                self._holdings.release()
                self._forget()

    def unpin(self, step: int) -> None:
        """Free a snapshot that was taken for a checkpoint."""
        with self._changed:
            self._holdings.unpin(step)
            self._forget()

    def descriptor_of(self, stored: Stored) -> int:
        """Return the descriptor of the segment that holds a home snapshot."""
        with self._changed:
            buffer = self._holdings.find(stored.mark)
            assert buffer is not None, stored.mark
            return self._arenas[buffer].descriptor

    def _forget(self) -> None:
        marks = set(self._holdings.marks())
        for mark in [mark for mark in self._home if mark not in marks]:
            del self._home[mark]
        held = {buffer for _, _, buffer in self._replicas.held()}
        for buffer in [buffer for buffer in self._others if buffer not in held]:
            del self._others[buffer]
        used = {one.table.identity for one in (*self._home.values(), *self._others.values())}
        # Forget tables of layouts that are long gone; those just learnt are the youngest.
        for identity in [i for i in list(self._tables)[:-8] if i not in used]:
            del self._tables[identity]


def pieces(table: SnapshotTable, data: memoryview, digests: Sequence[str]) -> list[Piece]:
    """Return a snapshot's bytes as tiles with these digests, as a save takes them.

    One without bytes has no digest: it names the tensor to the save, and is not a tile in a checkpoint.
    """
    return [
        Piece(
            spec=tile.spec,
            box=tile.box,
            data=data[tile.offset : tile.offset + tile.nbytes],
            digest=digest if tile.nbytes else "",
        )
        for tile, digest in zip(table.tiles, digests, strict=True)
    ]
