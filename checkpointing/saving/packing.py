"""Gathers a save's tiles into packs, and uploads several packs at once.

One thread adds tiles in order; those that are not stored yet fill packs. Each pack is encoded and uploaded by one
thread of a pool, so that encoding, uploading and the hashing before them go on at the same time. The number of
transfers bounds the packs under way, and with them the memory: only encoded tiles take any.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from checkpointing.format.codecs import Codec
from checkpointing.format.manifest import StoredTile
from checkpointing.format.pack import PackPlan, plan_pack
from checkpointing.format.tiles import Box, Piece, TensorSpec
from checkpointing.saving.bases import Bases
from checkpointing.saving.encoding import Encoded, Hashed, encode_tile
from checkpointing.saving.measuring import measure
from checkpointing.saving.options import Choice, SaveOptions, Speeds, choose
from checkpointing.saving.uploading import is_there, upload
from checkpointing.stores.limited import Bandwidth, LimitedStore
from checkpointing.stores.protocol import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """All tiles of a save with their places. packs: sizes of all that they need. sent: bytes of packs uploaded."""

    tiles: tuple[StoredTile, ...]
    packs: dict[str, int]
    sent: int
    speeds: Speeds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    # Not the plan, which holds the encoded bytes.
    pack: str
    size: int
    tiles: tuple[StoredTile, ...]
    sent: int
    began: float
    ended: float


class Packer:
    """Takes the tiles of one save in order. For one thread; leaving its context closes it."""

    def __init__(
        self,
        store: Store,
        bases: Bases,
        options: SaveOptions,
        *,
        tiles: Sequence[Piece],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._bases, self._options = bases, options
        # A local disk is trusted with what it has written: reading back would only ask the page cache.
        self._check = options.check and not getattr(store, "verifies", False)
        rate = options.max_bandwidth
        limited = None if rate is None else LimitedStore(store, Bandwidth(rate, clock=clock, sleep=sleep))
        self._store: Store = limited or store
        self._clock = clock
        self._left = sum(tile.data.nbytes for tile in tiles)
        self._limit = 0
        self._tiles = tiles
        self._choice = options.choice
        self._speeds = options.speeds
        self._pool = ThreadPoolExecutor(options.transfers, thread_name_prefix="transfers")
        self._free = threading.Semaphore(options.transfers)
        self._transfers: list[Future[_Done]] = []
        self._kept: list[StoredTile] = []
        self._twins: list[tuple[TensorSpec, Box, str]] = []
        self._fresh: set[str] = set()
        self._pack: list[Hashed] = []
        self._filled = 0

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Transfers under way are completed: a retry then finds them.
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, tile: Hashed) -> None:
        """Take the next tile; block while the most packs are under way, and raise the error that stopped one."""
        spec, box = tile.piece.spec, tile.piece.box
        known = self._bases.same(spec, box, tile.digest)
        if known is not None:
            self._kept.append(dataclasses.replace(known, spec=spec, box=box))
        elif tile.digest in self._fresh:
            self._twins.append((spec, box, tile.digest))
        else:
            if self._pack and self._filled + tile.piece.data.nbytes > self._limit:
                self._send()
            if not self._pack:
                self._limit = self._options.limit(self._left)
            self._fresh.add(tile.digest)
            self._pack.append(tile)
            self._filled += tile.piece.data.nbytes
        self._left -= tile.piece.data.nbytes

    def finish(self) -> Packed:
        """Upload the rest, and return when everything is durable."""
        if self._pack:
            self._send()
        done = [transfer.result() for transfer in self._transfers]
        fresh = {tile.digest: tile for one in done for tile in one.tiles}
        twins = [dataclasses.replace(fresh[digest], spec=spec, box=box) for spec, box, digest in self._twins]
        tiles = (*self._kept, *fresh.values(), *twins)
        packs = {one.pack: one.size for one in done}
        for tile in tiles:
            for pack in {tile.pack, tile.base.pack if tile.base is not None else tile.pack} - packs.keys():
                packs[pack] = self._bases.size(pack)
        return Packed(
            tiles=tiles,
            packs=dict(sorted(packs.items())),
            sent=sum(one.sent for one in done),
            speeds=self._speeds,
        )

    def _send(self) -> None:
        pack, self._pack, self._filled = self._pack, [], 0
        choice = self._choice
        if choice is Choice.AUTO:
            choice = self._settle(pack)
        self._free.acquire()
        for transfer in self._transfers:
            if transfer.done():
                transfer.result()
        transfer = self._pool.submit(self._transfer, pack, choice)
        transfer.add_done_callback(lambda _: self._free.release())
        self._transfers.append(transfer)

    def _transfer(self, pack: Sequence[Hashed], choice: Choice) -> _Done:
        encoded = [encode_tile(tile, choice, self._bases) for tile in pack]
        plan = plan_pack([tile.content for tile in encoded])
        there = not self._options.rewrite and is_there(self._store, plan)
        began = self._clock()
        if not there:
            upload(self._store, plan, check=self._check)
        return _Done(
            pack=plan.id,
            size=plan.size,
            tiles=tuple(_placed(plan, encoded)),
            sent=0 if there else plan.size,
            began=began,
            ended=self._clock(),
        )

    def _settle(self, pack: Sequence[Hashed]) -> Choice:
        """Return the codec for the next pack before anything is measured: raw, until one round of transfers is over."""
        if len(self._transfers) < self._options.transfers:
            return Choice.RAW
        round_ = [transfer.result() for transfer in self._transfers[-self._options.transfers :]]
        if any(not done.sent for done in round_):
            # An earlier try has written this. It had measured, and is followed if its choice can be determined.
            return self._followed(pack) or Choice.RAW
        seconds = max(done.ended for done in round_) - min(done.began for done in round_)
        store = sum(done.sent for done in round_) / max(seconds, 1e-9)
        self._speeds = measure(store, self._tiles, self._bases, self._clock)
        self._choice = choose(self._speeds, self._options.transfers)
        return self._choice

    def _followed(self, pack: Sequence[Hashed]) -> Choice | None:
        for choice in (Choice.RAW, Choice.PLANES, Choice.XOR):
            plan = plan_pack([encode_tile(tile, choice, self._bases).content for tile in pack])
            if is_there(self._store, plan):
                self._choice = choice
                return choice
        return None


def _placed(plan: PackPlan, encoded: Sequence[Encoded]) -> list[StoredTile]:
    return [
        StoredTile(
            spec=entry.spec,
            box=entry.box,
            digest=entry.digest,
            pack=plan.id,
            offset=entry.offset,
            length=entry.length,
            codec=entry.codec,
            check=entry.check if entry.codec is not Codec.RAW else "",
            base=tile.base,
            stats=tile.stats,
        )
        for entry, tile in zip(plan.tiles, encoded, strict=True)
    ]
