"""What `verify` reports, and what readers refuse."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpointing.format.refs
from checkpointing import Retention, Store, collect, open_checkpoint, open_store, repair_latest, verify
from checkpointing.errors import CheckpointError, Corrupt, FormatError, NewerFormat, WrongKey
from checkpointing.format import encoding, names
from checkpointing.format.encoding import document, hexdigest, parse
from checkpointing.format.manifest import StoredTile, decode_manifest
from checkpointing.format.pack import PackTile
from checkpointing.format.refs import decode_ref
from checkpointing.format.tombstone import Tombstone, encode_tombstone
from checkpointing.reading.verify import Fault, Progress
from checkpointing.retention.protection import mark_verified, tag
from tests.checkpointing.states import SMALL, load, make_state, save, save_and_commit

_numbers = itertools.count()


def fresh() -> Store:
    return open_store(f"memory://verify-{next(_numbers)}")


def flip(store: Store, name: str, place: int, bit: int = 0) -> bytes:
    data = store.get(name)
    changed = bytearray(data)
    changed[place] ^= 1 << bit
    store.put(name, bytes(changed))
    return data


@pytest.mark.long
def test_every_flipped_byte_of_every_object_is_found() -> None:
    """One flipped bit at any byte of any object is reported with that object, or with the object it points to."""
    store = fresh()
    tiny = {"w": ("float32", (3, 2)), "step": ("int64", ())}
    save_and_commit(store, make_state(tiny), world=1)
    save(store, make_state(tiny, seed=4), step=2, world=1)  # not committed: checked all the same
    for name in list(store.list("")):
        for place in range(store.size(name)):
            data = flip(store, name, place, bit=place % 8)
            findings = list(verify(store, threads=1))
            assert any(finding.object == name for finding in findings), (name, place)
            store.put(name, data)
    assert list(verify(store, threads=1)) == []


def test_a_damaged_tile_is_named_with_tensor_rank_and_pack() -> None:
    """The finding says what is lost, who wrote it, and which checkpoints are affected."""
    store = fresh()
    done = save_and_commit(store, make_state(SMALL))
    tile = next(tile for tile in open_checkpoint(store).tiles if tile.spec.key == "model/w")
    ranks = {}
    for name in store.list("saves/"):
        manifest = decode_manifest(store.get(name), name)
        ranks.update(dict.fromkeys(((t.pack, t.offset) for t in manifest.tiles), manifest.rank))
    place = tile.pack, tile.offset
    flip(store, f"packs/{tile.pack[:2]}/{tile.pack}.pack", tile.offset + 3)
    (finding,) = verify(store)
    assert (finding.fault, finding.tensor, finding.rank, finding.pack) == (
        Fault.CORRUPT,
        "model/w",
        ranks[place],
        tile.pack,
    )
    assert finding.box == str(tile.box)
    assert finding.checkpoints == (done.checkpoint,)


def test_missing_and_foreign_objects_are_named() -> None:
    """Both an object that a committed checkpoint lacks and one that does not belong are findings."""
    store = fresh()
    done = save_and_commit(store, make_state(SMALL))
    for name in [*store.list("packs/"), *store.list("saves/"), *store.list("checkpoints/")]:
        data = store.get(name)
        store.delete(name)
        assert (name, Fault.MISSING) in {(f.object, f.fault) for f in verify(store)}
        assert all(f.checkpoints == (done.checkpoint,) for f in verify(store))
        store.put(name, data)
    store.put("notes.txt", b"mine")
    assert [(f.object, f.fault) for f in verify(store)] == [("notes.txt", Fault.UNEXPECTED)]


def test_a_lost_ref_is_a_finding() -> None:
    """Where every checkpoint is whole and none can be found, all is not well; an empty place has no faults."""
    store = fresh()
    assert list(verify(store)) == []
    save_and_commit(store, make_state(SMALL))
    store.delete("refs/latest")
    (finding,) = verify(store)
    assert (finding.object, finding.fault) == ("refs/latest", Fault.MISSING)
    assert "ckpt repair" in finding.detail
    repair_latest(store)
    assert list(verify(store)) == []


def test_an_intact_object_in_the_wrong_place_is_refused() -> None:
    """A whole manifest or record that is not the committed one is neither read nor ignored."""
    store, rival = fresh(), fresh()
    save_and_commit(store, make_state(SMALL))
    save_and_commit(rival, make_state(SMALL, seed=8))
    for name in [*store.list("saves/"), *store.list("checkpoints/")]:
        data = store.get(name)
        store.put(name, rival.get(name))
        with pytest.raises(Corrupt, match=f"{name}: is not the (manifest|record) the"):
            open_checkpoint(store)
        assert (name, Fault.INCONSISTENT) in {(f.object, f.fault) for f in verify(store)}
        store.put(name, data)
    assert load(open_checkpoint(store))[0] == make_state(SMALL)


def test_uncommitted_saves_may_be_incomplete() -> None:
    """A save under way, and a pack that no manifest names yet, are no findings."""
    store = fresh()
    save_and_commit(store, make_state(SMALL))
    save(store, make_state(SMALL, seed=1), step=2)
    store.delete(next(name for name in store.list("saves/") if "000000000002." in name))
    assert list(verify(store)) == []


class Meanwhile:
    """A store in which something happens right after one of its operations was called for the first time."""

    def __init__(self, store: Store, verb: str, happens: Callable[[], object]) -> None:
        self._store, self._verb, self._happens = store, verb, happens

    def __getattr__(self, verb: str) -> Any:
        inner = getattr(self._store, verb)
        if verb != self._verb:
            return inner

        def call(*arguments: Any) -> Any:
            result = inner(*arguments)
            result = result if isinstance(result, bytes) else list(result)
            if self._verb:
                self._verb = ""
                self._happens()
            return result

        return call


def test_what_a_live_run_commits_and_collects_meanwhile_is_no_finding() -> None:
    """Neither a checkpoint committed after the listing, nor one dropped after the ref was read, is called missing."""
    store = fresh()
    state = make_state(SMALL)
    for step in range(1, 4):
        save_and_commit(store, make_state(SMALL, seed=step), step=step)
    committing: Any = Meanwhile(store, "entries", lambda: save_and_commit(store, state, step=4))
    assert list(verify(committing, threads=1)) == []
    last = save_and_commit(store, state, step=5)
    collecting: Any = Meanwhile(store, "get", lambda: collect(store, Retention(keep_last=1), grace=0))
    assert list(verify(collecting, threads=1)) == []
    assert len(list(store.list(names.CHECKPOINTS))) == 1
    store.delete(next(store.list(names.SAVES)))
    assert [(finding.fault, finding.checkpoints) for finding in verify(store)] == [(Fault.MISSING, (last.checkpoint,))]


def test_the_tiles_of_all_checkpoints_are_never_in_memory_together() -> None:
    """What is kept of a manifest's tiles is little: a store may have more of them than memory has room for."""
    store = fresh()
    shapes = {f"model/{number}": ("float32", (1,)) for number in range(50)}
    for step in range(1, 9):
        save_and_commit(store, make_state(shapes, seed=step), step=step)

    def alive() -> int:
        # By type(): isinstance() asks a weak proxy for its class, which raises where its object is gone.
        return sum(type(one) in (StoredTile, PackTile) for one in gc.get_objects())

    before, counts = alive(), [0]
    assert list(verify(store, lambda _: counts.append(alive() - before), threads=1)) == []
    assert max(counts) < 3 * len(shapes)


def test_progress_ends_at_the_size_of_the_store() -> None:
    """Every byte is counted once."""
    store = fresh()
    save_and_commit(store, make_state(SMALL))
    seen: list[Progress] = []
    assert list(verify(store, seen.append)) == []
    total = sum(store.size(name) for name in store.list(""))
    assert seen[-1] == Progress(done=total, total=total)
    assert [p.done for p in seen] == sorted(p.done for p in seen)


def test_no_flipped_byte_is_ever_restored() -> None:
    """A reader raises or returns the right bytes."""
    store, state = fresh(), make_state(SMALL)
    save_and_commit(store, state)
    for name in list(store.list("")):
        for place in range(0, store.size(name), 3):
            data = flip(store, name, place, bit=(place + 1) % 8)
            try:
                assert load(open_checkpoint(store))[0] == state
            except CheckpointError:
                pass
            store.put(name, data)


def rank_manifest() -> dict[str, Any]:
    return {
        "step": 1, "made_in": 1, "attempt": 0, "rank": 0, "world": 1, "parent": None,
        "facts": {}, "facts_digest": hexdigest(b"{}"),
        "packs": [{"id": "a" * 64, "size": 200}],
        "tensors": [
            {
                "key": "w", "dtype": "float32", "shape": [4],
                "tiles": [
                    {"start": [0], "stop": [2], "digest": "b" * 64, "pack": 0, "offset": 8, "length": 8,
                     "codec": "raw", "stats": None},
                    {"start": [2], "stop": [4], "digest": "b" * 64, "pack": 0, "offset": 16, "length": 8,
                     "codec": "raw", "stats": [0, 1.5, "inf", 2]},
                ],
            }
        ],
    }  # fmt: skip


def test_a_valid_encoded_tile_is_accepted() -> None:
    """The hostile manifests are made from this one."""
    body = rank_manifest()
    body["tensors"][0]["tiles"][1] = {**encoded(), "codec": "xor-planes", "base": encoded()}
    assert decode_manifest(document("rank", body), NAME).tiles[1].base is not None


NAME = "saves/000000000001.00000001.0000/00000.manifest"


def put_in(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(body: Any) -> None:
        for part in path[:-1]:
            body = body[part]
        body[path[-1]] = value

    return change


tile = ("tensors", 0, "tiles", 1)


def encoded() -> dict[str, Any]:
    """Return a valid tile of byte planes."""
    where = {"start": [2], "stop": [4], "digest": "b" * 64, "pack": 0, "offset": 16, "length": 7}
    return {**where, "codec": "planes", "check": "c" * 64, "stats": None}


def nested(levels: int) -> dict[str, Any]:
    """Return facts nested to so many levels."""
    return {"x": nested(levels - 1)} if levels else {}


def huge() -> dict[str, Any]:
    """Return a tensor whose one tile would unpack from 7 bytes to a terabyte."""
    return {"key": "w", "dtype": "uint8", "shape": [1 << 40], "tiles": [{**encoded(), "start": [0], "stop": [1 << 40]}]}


def tangled() -> dict[str, Any]:
    """Return a tensor whose boxes all overlap in all dims but the last, each cut differently."""
    count, dims = 24, 8
    tiles = [
        {**encoded(), "start": [n] * dims + [n], "stop": [2 * count - n] * dims + [n + 1], "length": 1}
        for n in range(count)
    ]
    return {"key": "w", "dtype": "float32", "shape": [2 * count] * dims + [count], "tiles": tiles}


@pytest.mark.parametrize(
    "change",
    [
        put_in("packs", 0, "id", value="../../../etc/passwd"),
        put_in("packs", 0, "id", value="A" * 64),
        put_in("packs", 0, "size", value=-1),
        put_in("packs", 0, "size", value=True),
        put_in("packs", value=None),
        put_in("parent", value="../up"),
        put_in("rank", value=1),
        put_in("step", value=2),
        put_in("step", value=1 << 70),
        put_in("facts", value={"other": 1}),
        put_in("facts", value={"x": "\ud800"}),
        put_in("tensors", 0, "dtype", value="object"),
        put_in("tensors", 0, "shape", value=[1 << 62, 1 << 62]),
        put_in("tensors", 0, "shape", value=[-4]),
        put_in("tensors", 0, "shape", value=[1] * 65),
        put_in("tensors", 0, "key", value="w\x1b[2J"),
        put_in("tensors", 0, "key", value="w" * 5000),
        put_in("tensors", 0, "key", value=["w"]),
        put_in(*tile, "start", value=[1]),
        put_in(*tile, "start", value=[-2]),
        put_in(*tile, "start", value=[4]),
        put_in(*tile, "start", value=[2, 0]),
        put_in(*tile, "stop", value=[5]),
        put_in(*tile, "digest", value="b" * 63),
        put_in(*tile, "pack", value=1),
        put_in(*tile, "offset", value=0),
        put_in(*tile, "offset", value=190),
        put_in(*tile, "offset", value=1.5),
        put_in(*tile, "length", value=9),
        put_in(*tile, "codec", value="pickle"),
        put_in(*tile, "stats", value=["__import__", 1, 2, 3]),
        put_in(*tile, value=None),
        put_in("facts", value=nested(100)),
        put_in(*tile, "codec", value="planes"),
        put_in(*tile, value={**encoded(), "check": "x"}),
        put_in(*tile, value={**encoded(), "length": 0}),
        put_in(*tile, value={**encoded(), "length": 8}),
        put_in(*tile, value={**encoded(), "codec": "xor-planes"}),
        put_in(*tile, value={**encoded(), "codec": "xor-planes", "base": []}),
        put_in(*tile, value={**encoded(), "codec": "xor-planes", "base": {**encoded(), "codec": "xor-planes"}}),
        put_in(*tile, value={**encoded(), "codec": "xor-planes", "base": {**encoded(), "pack": 1}}),
        put_in(*tile, value={**encoded(), "codec": "xor-planes", "base": {**encoded(), "offset": 150}}),
        put_in("tensors", 0, value=huge()),
        put_in("tensors", 0, value=tangled()),
    ],
)
def test_a_hostile_manifest_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    """Escaping names, impossible sizes, bad or overlapping boxes, unknown dtypes: FormatError and nothing else."""
    body = rank_manifest()
    assert decode_manifest(document("rank", body), NAME).tiles
    change(body)
    try:
        data = document("rank", body)
    except UnicodeEncodeError:
        return  # cannot even be written
    with pytest.raises(FormatError, match=r"saves/"):
        decode_manifest(data, NAME)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from([*rank_manifest(), "id", "size"]), x),
    )
)
def test_any_json_is_a_manifest_or_a_format_error(value: object) -> None:
    """Documents of any shape raise FormatError, nothing else."""
    body = {**rank_manifest(), **(value if isinstance(value, dict) else {"tensors": value})}
    try:
        decode_manifest(document("rank", body), NAME)
    except FormatError:
        pass
    except UnicodeEncodeError:
        pass


@given(st.binary(max_size=200))
def test_any_bytes_are_a_document_or_refused_as_damaged(data: bytes) -> None:
    """Bytes that begin like an encrypted document ask for the key instead."""
    with pytest.raises((Corrupt, WrongKey), match=r"damaged|key"):
        decode_ref(data, "refs/latest")


def test_what_no_reader_would_take_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank whose facts are too large hears of it; a commit could only refuse its manifest."""
    monkeypatch.setattr(encoding, "LARGEST", 4000)
    store = open_store("memory://verify-large")
    with pytest.raises(FormatError, match="readers refuse more than 4000: save what is large as tensors"):
        save(store, make_state(SMALL), facts={"order": list(range(2000))})
    assert list(store.list(names.SAVES)) == []


def test_a_newer_version_and_a_decompression_bomb_are_refused() -> None:
    """The error of a newer version says to upgrade; content that would unpack to gigabytes is not unpacked."""
    import zstandard

    frame = encoding.pack_json({"format": encoding.FORMAT, "version": 2, "kind": "ref"})
    with pytest.raises(NewerFormat, match="upgrade"):
        parse(sealed(frame), "ref", "refs/latest")
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(1 << 28))
    with pytest.raises(FormatError, match=r"cannot hold|not JSON"):
        parse(sealed(bomb), "ref", "refs/latest")
    deep = zstandard.ZstdCompressor().compress(b"[" * 200_000)
    with pytest.raises(FormatError):
        parse(sealed(deep), "ref", "refs/latest")


def sealed(frame: bytes) -> bytes:
    return frame + bytes.fromhex("502a4d1820000000") + bytes.fromhex(hexdigest(frame))


def test_history_tombstones_and_shadow_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped byte in any of them is found, a missing link is named, and history entries count as committed."""
    monkeypatch.setattr(checkpointing.format.refs, "LONGEST", 2)
    monkeypatch.setattr(checkpointing.format.refs, "SPILLED", 1)
    store = fresh()
    steps = [save_and_commit(store, make_state({"w": ("float32", (3,))}, seed=n), step=n) for n in range(1, 6)]
    tag(store, "best", steps[0].checkpoint)
    mark_verified(store, steps[1].checkpoint)
    store.put_if_absent(names.tombstone("a" * 32), encode_tombstone(Tombstone(grace=1.0, objects=())))
    assert list(verify(store)) == []
    others = [*store.list(names.HISTORY), *store.list(names.SWEEPS), names.SHADOW]
    assert len(others) > 2
    for name in others:
        for place in range(0, store.size(name), 7):
            data = flip(store, name, place, bit=place % 8)
            assert name in {finding.object for finding in verify(store, threads=1)}, (name, place)
            store.put(name, data)
    part = next(store.list(names.HISTORY))
    data = store.get(part)
    store.delete(part)
    assert (part, Fault.MISSING) in {(f.object, f.fault) for f in verify(store)}
    store.put(part, data)
    record = names.record(steps[0].checkpoint)
    store.delete(record)
    (finding,) = [f for f in verify(store) if f.object == record]
    assert (finding.fault, finding.checkpoints) == (Fault.MISSING, (steps[0].checkpoint,))
