"""The resolver: many sources, each of which may fail or return wrong bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from checkpointing import Box, Offered, Resolved, TensorSpec, open_checkpoint, resolve
from checkpointing.errors import MissingTile, SourceError, SpecMismatch
from checkpointing.format.tiles import digest
from checkpointing.stores.local import LocalStore
from tests.checkpointing.states import load, make_state, piece, save_and_commit, split

SPEC = TensorSpec(key="w", dtype="int32", shape=(12, 3))
DATA = bytes(range(144))


class Memory:
    """A real source with tiles in this process. It counts, and fails or damages tiles on request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tiles: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.broken: set[str] = set()
        self.wrong: set[str] = set()
        self.dead = False

    def offer(self, spec: TensorSpec, box: Box, data: bytes) -> Offered:
        tile = bytes(piece(spec, data, box).data)
        where = f"{spec.key}{box}"
        self.tiles[where] = tile
        return Offered(spec=spec, box=box, digest=digest(spec, box, tile), source=self.name, where=where)

    def fetch(self, tile: Offered) -> bytes:
        self.asked.append(tile.where)
        if self.dead or tile.where in self.broken:
            raise SourceError(f"{self.name} cannot")
        data = self.tiles[tile.where]
        return bytes([data[0] ^ 1]) + data[1:] if tile.where in self.wrong else data


class Ahead(Memory):
    """A source that is asked to prefetch."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.batches: list[list[str]] = []
        self.lock = threading.Lock()

    def prefetch(self, tiles: Sequence[Offered]) -> None:
        with self.lock:
            self.batches.append([tile.where for tile in tiles])
        if self.dead:
            raise SourceError("not there")


def restore(
    offers: list[Offered], sources: list[Memory], wanted: list[Box] | None = None, spec: TensorSpec = SPEC
) -> tuple[dict[Box, bytes], Resolved]:
    boxes = [spec.box] if wanted is None else wanted
    buffers = {box: bytearray(box.numel * spec.itemsize) for box in boxes}
    resolved = resolve(
        [(spec, box) for box in boxes],
        offers,
        {source.name: source for source in sources},
        lambda _, box: memoryview(buffers[box]),
    )
    return {box: bytes(buffer) for box, buffer in buffers.items()}, resolved


def test_a_tile_is_fetched_once_for_all_regions_that_need_it() -> None:
    """Regions are intersections: a tile goes to each of them, and only needed tiles are fetched."""
    source = Memory("peer")
    offers = [source.offer(SPEC, box, DATA) for box in split(SPEC, (3, 6, 9))]
    wanted = [Box(start=(1, 0), stop=(5, 2)), Box(start=(2, 1), stop=(5, 3))]
    filled, resolved = restore(offers, [source], wanted)
    assert all(data == bytes(piece(SPEC, DATA, box).data) for box, data in filled.items())
    assert sorted(source.asked) == ["w[0:3, 0:3]", "w[3:6, 0:3]"]
    assert (resolved.sources["peer"].tiles, resolved.sources["peer"].bytes) == (2, 72)


def test_the_first_source_is_preferred_and_replicas_are_not_fetched() -> None:
    """Farther sources are not asked for what nearer ones have, even if they cut it differently."""
    near, far = Memory("near"), Memory("far")
    offers = [far.offer(SPEC, box, DATA) for box in split(SPEC, (2, 7))]
    offers += [near.offer(SPEC, box, DATA) for box in split(SPEC, (4, 8))[:2]]
    filled, resolved = restore(offers, [near, far])
    assert filled[SPEC.box] == DATA
    assert resolved.sources["near"].tiles == 2
    assert far.asked == ["w[7:12, 0:3]"]


def test_a_corrupt_tile_falls_through_to_the_next_source() -> None:
    """After a wrong digest, an error or a dead source, the right bytes come from elsewhere, and it is reported."""
    near, far = Memory("near"), Memory("far")
    offers = [source.offer(SPEC, box, DATA) for source in (near, far) for box in split(SPEC, (4, 8))]
    near.wrong = {"w[0:4, 0:3]"}
    near.broken = {"w[8:12, 0:3]"}
    filled, resolved = restore(offers, [near, far])
    assert filled[SPEC.box] == DATA
    assert (resolved.sources["near"].tiles, resolved.sources["far"].tiles) == (1, 2)
    assert {(f.source, str(f.box)) for f in resolved.failures} == {("near", "[0:4, 0:3]"), ("near", "[8:12, 0:3]")}
    assert any("digest" in f.reason for f in resolved.failures)


def test_a_corrupt_tile_is_replaced_from_tiles_cut_differently() -> None:
    """The replacement need not have the same boxes."""
    near, far = Memory("near"), Memory("far")
    offers = [near.offer(SPEC, SPEC.box, DATA)] + [far.offer(SPEC, box, DATA) for box in split(SPEC, (5,))]
    near.wrong = {"w[0:12, 0:3]"}
    assert restore(offers, [near, far])[0][SPEC.box] == DATA


def test_each_tile_that_was_read_is_noted_in_the_callers_thread() -> None:
    """A damaged one as well: reading goes on."""
    first, second = Memory("first"), Memory("second")
    offers = [source.offer(SPEC, box, DATA) for source in (first, second) for box in split(SPEC, [4, 8])]
    first.wrong.add(offers[0].where)
    threads: list[int] = []
    resolve(
        [(SPEC, SPEC.box)],
        offers,
        {"first": first, "second": second},
        lambda spec, box: memoryview(bytearray(box.numel * spec.itemsize)),
        arrived=lambda: threads.append(threading.get_ident()),
    )
    assert threads == [threading.get_ident()] * (len(first.asked) + len(second.asked))


def test_a_missing_tile_is_named() -> None:
    """MissingTile names tensor and box, before anything is fetched if no source offered it."""
    source = Memory("peer")
    offers = [source.offer(SPEC, box, DATA) for box in split(SPEC, (4, 8))]
    with pytest.raises(MissingTile, match=r"w \[8:12, 0:3\].*none was offered"):
        restore(offers[:2], [source])
    assert source.asked == []
    source.wrong = {"w[4:8, 0:3]"}
    with pytest.raises(MissingTile, match=r"w \[4:8, 0:3\].*peer: its bytes do not have the digest"):
        restore(offers, [source])


def test_another_shape_or_dtype_is_refused_by_name() -> None:
    """Nothing is cast or reshaped; all tensors that do not fit are named."""
    source = Memory("peer")
    offers = [source.offer(SPEC, SPEC.box, DATA)]
    other = TensorSpec(key="w", dtype="float32", shape=(12, 3))
    with pytest.raises(SpecMismatch, match=r"w: saved int32 \[12, 3\], wanted float32 \[12, 3\]"):
        restore(offers, [source], spec=other)


def test_a_source_that_keeps_failing_is_given_up() -> None:
    """After a few errors in a row a dead peer is not asked again."""
    near, far = Memory("near"), Memory("far")
    offers = [s.offer(SPEC, box, DATA) for s in (near, far) for box in split(SPEC, range(1, 12))]
    near.dead = True
    filled, resolved = restore(offers, [near, far])
    assert filled[SPEC.box] == DATA
    assert len(near.asked) == 3
    assert resolved.sources["far"].tiles == 12


def test_a_source_is_asked_to_prefetch() -> None:
    """`prefetch` gets every tile once; an error in it does not end the restore."""
    source = Ahead("peer")
    offers = [source.offer(SPEC, box, DATA) for box in split(SPEC, (4, 8))]
    restore(offers, [source])
    assert source.batches == [["w[0:4, 0:3]", "w[4:8, 0:3]", "w[8:12, 0:3]"]]
    source.dead, backup = True, Memory("backup")
    filled, _ = restore([*offers, backup.offer(SPEC, SPEC.box, DATA)], [source, backup])
    assert filled[SPEC.box] == DATA


def test_scalars_and_empty_tensors_resolve() -> None:
    """A scalar's box has no dims; a region without elements needs no tile."""
    source = Memory("peer")
    step = TensorSpec(key="step", dtype="float32", shape=())
    empty = TensorSpec(key="empty", dtype="float32", shape=(0, 4))
    assert restore([source.offer(step, step.box, b"abcd")], [source], spec=step)[0][step.box] == b"abcd"
    assert restore([], [source], spec=empty)[0][empty.box] == b""


def test_many_small_tiles_of_a_pack_need_few_requests(tmp_path: Path) -> None:
    """Neighbours are read together: a thousand scalars do not cost a thousand round trips."""

    class Counting(LocalStore):
        reads = 0

        def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            self.reads += name.startswith("packs/")
            return super().get(name, start, stop)

    store = Counting(tmp_path)
    state = make_state({f"step/{number}": ("float32", ()) for number in range(1000)})
    save_and_commit(store, state)
    store.reads = 0
    assert load(open_checkpoint(store))[0] == state
    assert store.reads <= 2 * 5
