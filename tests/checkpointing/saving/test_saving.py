"""Saving as a pipeline: packs, codecs, parents, retries."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing import (
    Box,
    Checkpoint,
    Piece,
    SavedRank,
    SaveOptions,
    Store,
    TensorSpec,
    commit,
    open_checkpoint,
    open_store,
    save_rank,
    verify,
)
from checkpointing.errors import Corrupt, Miswritten, StoreError
from checkpointing.format import names
from checkpointing.format.codecs import Codec, decode
from checkpointing.format.encoding import hexdigest
from checkpointing.format.grid import cut
from checkpointing.format.manifest import Base, StoredTile, decode_manifest
from checkpointing.format.pack import check_tiles, read_index
from checkpointing.format.tiles import copy_box, digest
from checkpointing.saving.options import Choice, Speeds, Trial, choose
from checkpointing.stores.checking import Sent
from checkpointing.stores.protocol import Data, Entry, Versioned, chunks
from tests.checkpointing.states import FACTS, SMALL, State, load, make_state, piece, spread

_numbers = itertools.count()


def fresh() -> Store:
    return open_store(f"memory://saving-{next(_numbers)}")


def tiny(**options: Any) -> SaveOptions:
    """Return options that cut tensors into tiles of 1 KiB."""
    return SaveOptions(tile_bytes=1024, **options)


class Seam:
    """A store in front of another one; `before` is called for each pack that is put, and may change it or raise."""

    def __init__(self, inner: Store, before: Callable[[str, bytes], bytes]) -> None:
        self.inner, self.before = inner, before
        self.url = inner.url
        self.reads: list[str] = []

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        sent = Sent([b"".join(chunks(data))])
        self.inner.put(name, self.before(name, b"".join(sent)))
        if check:
            sent.compare(self.inner, name)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        self.reads.append(name)
        return self.inner.get(name, start, stop)

    def read(self, name: str) -> Versioned | None:
        return self.inner.read(name)

    def size(self, name: str) -> int:
        return self.inner.size(name)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self.inner.put_if_absent(name, data)

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        return self.inner.compare_and_swap(name, expected, data)

    def list(self, prefix: str) -> Iterator[str]:
        return self.inner.list(prefix)

    def entries(self, prefix: str) -> Iterator[Entry]:
        return self.inner.entries(prefix)

    def delete(self, name: str) -> None:
        self.inner.delete(name)


def save_one(
    store: Store,
    state: State,
    options: SaveOptions,
    *,
    step: int = 1,
    parent: Checkpoint | None = None,
    **more: Any,
) -> SavedRank:
    """Save a whole state as one rank."""
    pieces = [piece(spec, data, spec.box) for spec, data in state.items()]
    return save_rank(
        store,
        step=step,
        made_in=1,
        attempt=0,
        rank=0,
        world=1,
        pieces=pieces,
        facts=FACTS,
        parent=parent,
        options=options,
        **more,
    )


def committed(store: Store, step: int = 1) -> Checkpoint:
    commit(store, step=step, made_in=1, attempt=0, committed_in=1, world=1)
    return open_checkpoint(store)


def stored_bytes(store: Store, spec: TensorSpec, where: StoredTile | Base, nbytes: int) -> bytes:
    data = store.get(names.pack(where.pack), where.offset, where.offset + where.length)
    if where.codec is not Codec.RAW:
        assert hexdigest(data) == where.check
    base = None
    if where.codec is Codec.XOR_PLANES:
        assert isinstance(where, StoredTile)
        assert where.base is not None
        assert where.base.codec is not Codec.XOR_PLANES
        base = stored_bytes(store, spec, where.base, nbytes)
    return bytes(decode(where.codec, data, nbytes, spec.itemsize, base))


def by_hand(checkpoint: Checkpoint) -> State:
    """Build a checkpoint's tensors from its tiles alone, checking every digest."""
    state = {spec: bytearray(spec.box.numel * spec.itemsize) for spec in checkpoint.specs.values()}
    for tile in checkpoint.tiles:
        data = stored_bytes(checkpoint.store, tile.spec, tile, tile.nbytes)
        assert digest(tile.spec, tile.box, data) == tile.digest
        copy_box(data, tile.box, state[tile.spec], tile.spec.box, tile.spec.itemsize)
    return {spec: bytes(data) for spec, data in state.items()}


def weights(dtype: str, shape: tuple[int, ...], seed: int, step: int = 0) -> bytes:
    """Return normal numbers that have drifted a little for some steps."""
    random = np.random.default_rng(seed)
    values = random.normal(size=shape).astype(np.float32)
    for _ in range(step):
        values += random.normal(size=shape).astype(np.float32) * 1e-4
    wide = values.astype("<f4")
    return ((wide.view("<u4") >> 16).astype("<u2") if dtype == "bfloat16" else wide).tobytes()


def training(step: int) -> State:
    """Return weights, moments and a frozen tensor as they are after some steps."""
    return {
        TensorSpec(key="frozen", dtype="bfloat16", shape=(40, 64)): weights("bfloat16", (40, 64), 9),
        TensorSpec(key="moment", dtype="float32", shape=(30, 64)): weights("float32", (30, 64), 1, step),
        TensorSpec(key="w", dtype="bfloat16", shape=(50, 64)): weights("bfloat16", (50, 64), 2, step),
        TensorSpec(key="step", dtype="int64", shape=()): step.to_bytes(8, "little"),
    }


options = st.builds(
    SaveOptions,
    codec=st.sampled_from(["raw", "planes", "xor", "auto"]),
    pack_bytes=st.sampled_from([1, 2000, 7000, 30000]),
    transfers=st.integers(1, 4),
    workers=st.integers(1, 3),
    check=st.booleans(),
)


@settings(max_examples=10, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 4), options), min_size=1, max_size=3), limit=st.integers(500, 5000))
def test_any_chain_of_saves_restores_every_byte(steps: list[tuple[int, SaveOptions]], limit: int) -> None:
    """With any packs, codecs and parents, the tiles alone are enough, and `verify` has no findings."""
    store, parent = fresh(), None
    for number, (step, chosen) in enumerate(steps):
        chosen = dataclasses.replace(chosen, tile_bytes=limit)
        saved = save_one(store, training(step), chosen, step=number, parent=parent)
        parent = committed(store, number)
        assert by_hand(parent) == load(parent)[0] == training(step)
        assert saved.bytes == sum(map(len, training(step).values()))
        assert saved.stored == sum(parent.packs[pack] for pack in saved.packs)
    assert list(verify(store)) == []


@pytest.mark.parametrize("codec", ["raw", "planes", "xor"])
def test_the_number_of_threads_does_not_change_the_objects(codec: str) -> None:
    """The same pieces, parent, codec and pack size give the same objects."""
    stores = []
    for threads in (1, 2, 4):
        store = fresh()
        chosen = tiny(codec=codec, pack_bytes=5000, transfers=threads, workers=threads)
        save_one(store, training(0), chosen)
        save_one(store, training(1), chosen, step=2, parent=committed(store))
        stores.append({name: store.get(name) for name in store.list("saves/")})
        stores[-1].update({name: store.get(name) for name in store.list("packs/")})
    assert stores[0] == stores[1] == stores[2]
    assert len(stores[0]) > 6


def test_packs_keep_their_size_limit_and_are_self_checking() -> None:
    """Each agrees with its own index, encoded tiles too."""
    store = fresh()
    saved = save_one(store, training(2), tiny(codec="planes", pack_bytes=4096))
    assert len(saved.packs) >= saved.bytes // 4096
    codecs = set()
    for pack in saved.packs:
        tiles, _ = read_index(store, names.pack(pack), pack)
        assert sum(tile.box.numel * tile.spec.itemsize for tile in tiles) <= 4096
        assert all(good for _, good in check_tiles(store, names.pack(pack), tiles))
        codecs |= {tile.codec for tile in tiles}
    assert codecs == {Codec.RAW, Codec.PLANES}  # the scalar is not worth a codec


def test_equal_tiles_are_stored_once() -> None:
    """Tied tensors, empty moments and renamed tensors share their bytes, within a save and with its parent."""
    store = fresh()
    one, two = (TensorSpec(key=key, dtype="float32", shape=(16, 64)) for key in ("embedding", "head"))
    zeros = TensorSpec(key="zeros", dtype="float32", shape=(16, 64))
    data = weights("float32", (16, 64), 3)
    saved = save_one(store, {one: data, two: data, zeros: bytes(4096)}, tiny())
    assert (saved.tiles, saved.bytes, saved.written) == (12, 3 * 4096, 4096 + 1024)
    renamed = TensorSpec(key="renamed", dtype="float32", shape=(16, 64))
    again = save_one(store, {renamed: data}, tiny(), step=2, parent=committed(store))
    assert (again.written, again.stored, again.packs) == (0, 0, ())
    checkpoint = committed(store, 2)
    assert by_hand(checkpoint) == {renamed: data}
    assert list(verify(store)) == []


def test_a_save_with_ninety_percent_frozen_writes_ten_percent() -> None:
    """Written bytes, manifest and indexes included, are at most 1.05 of the changed ones if tiles are large enough."""
    store, state = fresh(), make_state({f"layer{n}": ("float32", (256, 64)) for n in range(10)})
    first = save_one(store, state, tiny(pack_bytes=32 << 10))
    changed = {**state, **make_state({"layer7": ("float32", (256, 64))}, seed=3)}
    saved = save_one(store, changed, tiny(pack_bytes=32 << 10), step=2, parent=committed(store))
    assert first.written == 10 * (64 << 10)
    assert saved.written == 64 << 10
    index = 200 * 64  # tiles are 1 KiB here and 4 MiB elsewhere: the overhead per tile is not counted
    assert saved.stored - index <= 1.05 * saved.written
    assert by_hand(committed(store, 2)) == changed


def test_a_retry_of_a_save_killed_at_ninety_percent_uploads_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what was missing or under way: at most 15 % of the bytes of a save of sixty tiles."""
    small, tiles = 1024, 60
    monkeypatch.setattr("checkpointing.saving.options._SMALL", small)
    store, state = fresh(), make_state({"w": ("float32", (4 * tiles, 64))})
    chosen = tiny(pack_bytes=8 * small, transfers=4)
    total = save_one(fresh(), state, chosen).stored
    landed, lock = [0], threading.Lock()

    def dies(name: str, data: bytes) -> bytes:
        with lock:
            # Four packs are under way, on average half sent: 0.9 of all bytes were sent.
            if landed[0] >= (0.9 - 4 / tiles / 2) * total:
                raise StoreError("killed")
            landed[0] += len(data)
        return data

    with pytest.raises(StoreError, match="killed"):
        save_one(Seam(store, dies), state, chosen)
    assert not list(store.list("saves/"))
    assert not [one.name for one in threading.enumerate() if one.name.startswith(("transfers", "digests"))]
    saved = save_one(store, state, chosen)
    assert saved.stored == total
    assert 0 < saved.sent <= 0.15 * total
    assert by_hand(committed(store)) == state
    assert save_one(store, state, chosen).sent == 0


def test_packs_become_smaller_towards_the_end_of_a_save() -> None:
    """Large saves make few objects, and the bytes under way are always few compared to those left."""
    assert SaveOptions().limit(100 << 30) == 32 << 20
    assert SaveOptions().limit(160 << 20) == 20 << 20
    assert SaveOptions().limit(1 << 20) == 4 << 20
    assert SaveOptions(pack_bytes=1000).limit(1 << 30) == 1000


def test_transfers_are_parallel_up_to_their_limit() -> None:
    """All of them are under way at once; a pack is not even encoded before one is free."""
    store, state = fresh(), make_state({"w": ("float32", (128, 64))})
    meeting, lock, now, most = threading.Barrier(4), threading.Lock(), [0], [0]

    def meets(name: str, data: bytes) -> bytes:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        meeting.wait(20)
        with lock:
            now[0] -= 1
        return data

    saved = save_one(Seam(store, meets), state, tiny(pack_bytes=1024, transfers=4, check=False))
    assert (len(saved.packs), most) == (32, [4])


def test_a_pack_that_arrives_damaged_is_sent_again() -> None:
    """With `check` a pack is read back. If it never arrives whole that is an error, and no manifest is written."""
    store, state = fresh(), make_state(SMALL)
    seen: dict[str, int] = {}

    def flips(times: int) -> Callable[[str, bytes], bytes]:
        def flip(name: str, data: bytes) -> bytes:
            seen[name] = seen.get(name, 0) + 1
            return data if seen[name] > times else data[:9] + bytes([data[9] ^ 1]) + data[10:]

        return flip

    with pytest.raises(Miswritten, match="proxy"):
        save_one(Seam(store, flips(99)), state, SaveOptions())
    assert not list(store.list("saves/"))
    seen.clear()
    save_one(Seam(store, flips(1)), state, SaveOptions())
    assert by_hand(committed(store)) == state


def test_differences_are_one_deep() -> None:
    """A difference to a tile that is a difference itself uses its base; after a while a full tile is stored again."""
    store, parent, seen = fresh(), None, []
    chosen = tiny(codec="xor")
    for step in range(4):
        save_one(store, training(step), chosen, step=step, parent=parent)
        parent = committed(store, step)
        seen.append({tile.box: tile for tile in parent.tiles if tile.spec.key == "w"})
        assert by_hand(parent) == training(step)
    differences = [tile for tiles in seen[1:] for tile in tiles.values() if tile.base is not None]
    assert len(differences) > 20
    for box, tile in seen[3].items():
        if tile.base is not None:
            assert tile.base.digest == seen[0][box].digest
    other = {**training(3), **make_state({"w": ("bfloat16", (50, 64))})}
    save_one(store, other, chosen, step=4, parent=parent)
    assert not any(tile.base for tile in committed(store, 4).tiles if tile.spec.key == "w")


def test_a_missing_or_damaged_base_is_not_used() -> None:
    """The tile is then stored by itself."""
    store = fresh()
    chosen = tiny(codec="xor", pack_bytes=1 << 20)
    saved = save_one(store, training(0), chosen)
    parent = committed(store)
    (pack,) = saved.packs
    data = store.get(names.pack(pack))
    tiles, _ = read_index(store, names.pack(pack), pack)
    for tile in tiles:
        data = data[: tile.offset] + bytes([data[tile.offset] ^ 1]) + data[tile.offset + 1 :]
    store.put(names.pack(pack), data)
    damaged = save_one(store, training(1), chosen, step=2, parent=parent)
    store.delete(names.pack(pack))
    gone = save_one(store, training(2), chosen, step=3, parent=parent)
    for saved in (damaged, gone):
        manifest = decode_manifest(store.get(saved.manifest), saved.manifest)
        assert not any(tile.base for tile in manifest.tiles)


def test_an_older_state_in_memory_saves_a_read() -> None:
    """What `recall` returns is used only if it is the older tile; the bytes are right either way."""
    store = fresh()
    chosen = tiny(codec="xor")
    save_one(store, training(0), chosen)
    committed(store)
    seam = Seam(store, lambda _, data: data)

    def recall(spec: TensorSpec, box: Box) -> bytes:
        return bytes(piece(spec, older[spec], box).data)

    saved = []
    for step in (0, 2):
        older = training(step)
        parent = open_checkpoint(seam)
        seam.reads.clear()
        saved.append(save_one(store, training(1), chosen, step=2 + step, parent=parent, recall=recall))
        assert bool(seam.reads) == (step == 2)
    assert by_hand(committed(store, 2)) == training(1)
    assert saved[0].packs == saved[1].packs


def test_a_parent_in_another_store_is_refused() -> None:
    """Its tiles are not in this store."""
    store = fresh()
    save_one(store, training(0), SaveOptions())
    with pytest.raises(ValueError, match="same store"):
        save_one(fresh(), training(1), SaveOptions(), parent=committed(store))


@pytest.mark.parametrize(("codec", "most"), [("raw", 4), ("planes", 40)])
def test_the_memory_of_a_save_is_bounded(tmp_path: Path, codec: str, most: int) -> None:
    """Raw tiles are copied a piece at a time; only encoded ones under way are held, however large the state is."""
    spec = TensorSpec(key="w", dtype="int16", shape=(24, 1 << 20))
    data = np.random.default_rng(0).integers(0, 255, spec.box.numel, "<i2")
    whole = Piece(spec=spec, box=spec.box, data=memoryview(data).cast("B"))
    store = open_store(str(tmp_path))
    tracemalloc.start()
    try:
        saved = save_rank(
            store, step=1, made_in=1, attempt=0, rank=0, world=1, pieces=[whole], facts=FACTS,
            options=SaveOptions(codec=codec, pack_bytes=4 << 20, transfers=2),
        )  # fmt: skip
        assert tracemalloc.get_traced_memory()[1] < most << 20
    finally:
        tracemalloc.stop()
    assert saved.bytes == 48 << 20


def test_tiles_that_do_not_compress_are_stored_raw() -> None:
    """Below a ratio of 1.05, whatever codec the save was given."""
    store, state = fresh(), make_state({"w": ("int8", (64, 64)), "b": ("bfloat16", (600,))})
    for step, codec in enumerate(["planes", "xor"]):
        saved = save_one(store, state, tiny(codec=codec), step=step)
        assert {tile.codec for tile in committed(store, step).tiles} == {Codec.RAW}
        assert saved.written == saved.bytes


@given(
    store=st.floats(1e5, 1e11),
    rate=st.floats(1e6, 1e10),
    ratio=st.floats(1, 40),
    xor=st.none() | st.builds(Trial, rate=st.floats(1e6, 1e10), ratio=st.floats(1, 40)),
    threads=st.integers(1, 8),
)
def test_auto_chooses_a_codec_that_makes_the_save_faster(
    store: float, rate: float, ratio: float, xor: Trial | None, threads: int
) -> None:
    """By at least a tenth, and the faster one of two."""
    speeds = Speeds(store=store, planes=Trial(rate=rate, ratio=ratio), xor=xor)
    ways = {Choice.RAW: store, Choice.PLANES: min(rate * threads, store * ratio)}
    if xor is not None:
        ways[Choice.XOR] = min(xor.rate * threads, store * xor.ratio)
    chosen = choose(speeds, threads)
    assert SaveOptions(codec="auto", speeds=speeds, transfers=threads).choice is chosen
    assert chosen is Choice.RAW or ways[chosen] == max(ways.values()) > 1.1 * store
    if chosen is Choice.RAW:
        assert max(ways.values()) <= 1.1 * store


class Time:
    """A clock that moves when somebody sleeps, and by a microsecond at each reading."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def clock(self) -> float:
        with self._lock:
            self.now += 1e-6
            return self.now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


@pytest.mark.parametrize(("most", "codec"), [(99, Codec.PLANES), (1 << 62, Codec.RAW)])
def test_auto_measures_the_first_transfers(most: int, codec: Codec) -> None:
    """On a slow store the tiles after them are encoded if they become smaller; a retry does the same."""
    time, store = Time(), fresh()

    def slow(name: str, data: bytes) -> bytes:
        time.sleep(1.0)
        return data

    chosen = tiny(codec="auto", pack_bytes=2048, transfers=2)
    spec = TensorSpec(key="w", dtype="int64", shape=(32, 64))
    state, later = ({spec: np.random.default_rng(n).integers(-most, most, 2048).tobytes()} for n in range(2))
    saved = save_one(Seam(store, slow), state, chosen, clock=time.clock, sleep=time.sleep)
    assert saved.speeds is not None
    assert 2e3 < saved.speeds.store < 1e4
    checkpoint = committed(store)
    assert [tile.codec for tile in checkpoint.tiles] == 4 * [Codec.RAW] + 12 * [codec]
    store.delete(saved.manifest)
    again = save_one(store, state, chosen, clock=time.clock, sleep=time.sleep)
    assert (again.sent, again.packs) == (0, saved.packs)
    known = tiny(codec="auto", speeds=saved.speeds)
    save_one(store, later, known, step=2, parent=checkpoint)
    assert {tile.codec for tile in committed(store, 2).tiles} == {codec}


def digested(state: State, tile_bytes: int) -> list[Piece]:
    """Return a state cut into tiles that come with their digests."""
    return [
        dataclasses.replace(tile, digest=digest(tile.spec, tile.box, tile.data))
        for spec, data in state.items()
        for tile in cut(piece(spec, data, spec.box), tile_bytes)
    ]


def save_tiles(store: Store, tiles: list[Piece], *, step: int = 1, parent: Checkpoint | None = None) -> SavedRank:
    """Save tiles as one rank."""
    return save_rank(
        store, step=step, made_in=1, attempt=0, rank=0, world=1, pieces=tiles, facts=FACTS, parent=parent
    )  # fmt: skip


def test_tiles_that_come_with_digests_are_saved_as_they_were_cut() -> None:
    """The checkpoint is the same as that of a save of whole pieces."""
    store, other = fresh(), fresh()
    save_one(store, training(0), tiny())
    saved = save_tiles(other, digested(training(0), 1024))
    assert (saved.tiles, saved.packs) == (len(committed(store).tiles), tuple(committed(store).packs))
    assert committed(other).root == committed(store).root
    assert by_hand(committed(other)) == training(0)


def test_a_tile_that_the_parent_has_is_not_read_again() -> None:
    """Only its digest is compared: bytes that have changed since are not noticed."""
    store = fresh()
    save_tiles(store, digested(training(0), 1024))
    before = committed(store)
    tiles = [dataclasses.replace(tile, data=memoryview(bytes(len(tile.data)))) for tile in digested(training(0), 1024)]
    assert save_tiles(store, tiles, step=2, parent=before).written == 0
    assert by_hand(committed(store, 2)) == training(0)


def test_a_tile_that_changed_after_it_was_digested_is_not_written() -> None:
    """A bit that flips in memory between snapshot and upload is found, and named, before it is in a checkpoint."""
    store, tiles = fresh(), digested(training(0), 1024)
    flipped = bytearray(tiles[3].data)
    flipped[7] ^= 1
    tiles[3] = dataclasses.replace(tiles[3], data=memoryview(flipped))
    with pytest.raises(Corrupt, match=rf"{tiles[3].spec.key} .* changed in memory"):
        save_tiles(store, tiles)
    assert not list(store.list("saves/"))


def test_a_save_keeps_its_bandwidth_limit() -> None:
    """`max_bandwidth` holds for all transfers together."""
    time, state = Time(), make_state({"w": ("float32", (1000, 1000))})
    save_one(fresh(), state, SaveOptions(max_bandwidth=1e6), clock=time.clock, sleep=time.sleep)
    assert 3.4 < time.now < 4.2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"codec": "zip"}, "zip"),
        ({"transfers": 0}, "transfers"),
        ({"max_bandwidth": 0.0}, "max_bandwidth"),
        ({"tile_bytes": 0}, "tile_bytes"),
        ({"tile_bytes": (64 << 20) + 1}, "readers refuse"),
    ],
)
def test_invalid_save_options_are_refused(bad: dict[str, Any], message: str) -> None:
    """When they are made, not in the middle of a save."""
    with pytest.raises(ValueError, match=message):
        SaveOptions(**bad)


def test_ranks_may_save_with_different_options(tmp_path: Path) -> None:
    """The checkpoint is the same."""
    store, state = open_store(str(tmp_path)), training(0)
    for rank, (pieces, codec) in enumerate(zip(spread(state, 2, (20,)), ["raw", "planes"], strict=True)):
        save_rank(
            store, step=1, made_in=1, attempt=0, rank=rank, world=2, pieces=pieces, facts=FACTS,
            options=SaveOptions(codec=codec),
        )  # fmt: skip
    commit(store, step=1, made_in=1, attempt=0, committed_in=1, world=2)
    assert by_hand(open_checkpoint(store)) == state
