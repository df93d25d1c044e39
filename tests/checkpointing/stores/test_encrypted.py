"""Encryption at rest: what the holder of the key can do and others cannot."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import (
    Box,
    Checkpoint,
    Key,
    Store,
    TensorSpec,
    commit,
    fence,
    open_checkpoint,
    open_store,
    read_latest,
    save_rank,
    verify,
)
from checkpointing.errors import StoreNotFound, StoreUnfit, Tampered, WrongKey
from checkpointing.format import names
from checkpointing.format.encoding import pack_json
from checkpointing.stores.encrypted import CHUNK, EncryptedStore
from tests.checkpointing.states import SMALL, load, make_state, piece, save_and_commit
from tests.paths import DATA

_numbers = itertools.count()
KEY = Key(bytes(range(32)))
SECRET = b"the weights of the model"
STORED = CHUNK + 28


@pytest.fixture
def inner() -> Store:
    return open_store(f"memory://encrypted-{next(_numbers)}/x")


@pytest.fixture
def store(inner: Store) -> EncryptedStore:
    return EncryptedStore(inner, KEY)


def test_an_encrypted_store_reveals_no_contents(inner: Store, store: EncryptedStore) -> None:
    """Neither of documents nor of packs, and equal objects do not look equal."""
    store.put("a", SECRET * 10_000)
    store.put_if_absent("b", SECRET)
    store.compare_and_swap("c", None, SECRET)
    for name in "abc":
        assert SECRET[:8] not in inner.get(name)
    assert inner.get("b")[16:] != inner.get("c")[16:]


@given(size=st.integers(0, 4 * CHUNK), cuts=st.lists(st.integers(0, 4 * CHUNK), max_size=5), data=st.data())
def test_every_range_of_every_size_decrypts(size: int, cuts: list[int], data: st.DataObject) -> None:
    """However the data came in, at chunk boundaries or not."""
    store = EncryptedStore(open_store("memory://encrypted-ranges/x", write=False), KEY)
    plain = (os.urandom(1009) * (size // 1009 + 1))[:size]
    borders = [0, *sorted(cut for cut in cuts if cut < size), size]
    store.put("x", (memoryview(plain)[a:b] for a, b in itertools.pairwise(borders)))
    assert store.get("x") == plain
    assert store.size("x") == size
    assert next(store.entries("x")).size == size
    edge = st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, size - 1, size, size + 1]).map(
        lambda at: max(0, at)
    )
    start, stop = data.draw(edge | st.integers(0, size + 10)), data.draw(edge | st.integers(0, size + 10))
    assert store.get("x", start, stop) == plain[start : max(start, stop)]
    assert store.get("x", start) == plain[start:]


def test_a_producer_may_reuse_its_memory(store: EncryptedStore) -> None:
    """Each chunk is processed before the next is asked for."""
    buffer = bytearray(CHUNK + 5)

    def made() -> object:
        for value in range(3):
            buffer[:] = bytes([value]) * len(buffer)
            yield memoryview(buffer)

    store.put("x", made())  # type: ignore[arg-type]
    assert store.get("x") == b"".join(bytes([value]) * len(buffer) for value in range(3))


@pytest.mark.parametrize("at", [0, 9, 16, 20, 16 + STORED - 1, 16 + STORED, 16 + 2 * STORED + 40])
def test_a_flipped_bit_is_detected(inner: Store, store: EncryptedStore, at: int) -> None:
    """Anywhere: in the header, a nonce, the contents, a tag."""
    store.put("x", bytes(2 * CHUNK + 100))
    stored = bytearray(inner.get("x"))
    stored[at] ^= 1
    inner.put("x", bytes(stored))
    with pytest.raises((Tampered, WrongKey)):
        store.get("x")


@pytest.mark.parametrize("left", [16, 17, 16 + STORED, 16 + STORED + 5])
def test_truncation_is_detected(inner: Store, store: EncryptedStore, left: int) -> None:
    """At a chunk boundary too, and by a range read that passes it."""
    store.put("x", bytes(2 * CHUNK + 100))
    inner.put("x", inner.get("x")[:left])
    with pytest.raises(Tampered):
        store.get("x")
    with pytest.raises(Tampered):
        store.get("x", 10, 2 * CHUNK + 50)


def test_chunks_and_objects_cannot_be_exchanged(inner: Store, store: EncryptedStore) -> None:
    """Neither within an object nor between objects, although the key is the same."""
    store.put("x", bytes(3 * CHUNK))
    store.put("y", bytes(3 * CHUNK))
    x, y = inner.get("x"), inner.get("y")
    inner.put("y", x)
    with pytest.raises(Tampered):
        store.get("y", CHUNK, CHUNK + 1)
    inner.put("y", y)
    first, second = slice(16, 16 + STORED), slice(16 + STORED, 16 + 2 * STORED)
    inner.put("x", x[:16] + x[second] + x[first] + x[16 + 2 * STORED :])
    with pytest.raises(Tampered):
        store.get("x")


def test_a_wrong_key_is_distinguished_from_damage(inner: Store, store: EncryptedStore) -> None:
    """The error says which key is needed; that of a range read does too."""
    store.put("x", b"1" * 100)
    other = EncryptedStore(inner, Key.generate())
    for ask in (lambda: other.get("x"), lambda: other.get("x", 3, 9), lambda: other.read("x")):
        with pytest.raises(WrongKey, match=KEY.id.hex()):
            ask()
    inner.put("plain", pack_json("not encrypted at all"))
    with pytest.raises(WrongKey, match="is not encrypted"):
        store.get("plain")


@pytest.mark.parametrize("how", ["emptied", "cut", "of no kind", "as of another key"])
def test_damage_to_the_first_bytes_is_damage(how: str, inner: Store, store: EncryptedStore) -> None:
    """Not a wrong key: an older checkpoint helps then. Who has opened what others have written has the right one."""
    store.put(names.LATEST, b"a ref")
    store.put("x", b"1" * 100)
    assert store.get(names.LATEST) == b"a ref"
    whole = inner.get("x")
    damaged = {"emptied": b"", "cut": whole[:4], "of no kind": b"?" + whole[1:]}
    inner.put("x", damaged.get(how, whole[:9] + b"?" + whole[10:]))
    for ask in (lambda: store.get("x"), lambda: store.read("x")):
        with pytest.raises(Tampered):
            ask()


def test_whoever_has_opened_its_own_objects_alone_has_any_key(inner: Store, store: EncryptedStore) -> None:
    """A probe that it has just written, say."""
    store.put(names.LATEST, b"a ref")
    other = EncryptedStore(inner, Key.generate())
    other.put(f"{names.PROBE}a", b"probe")
    assert other.get(f"{names.PROBE}a") == b"probe"
    with pytest.raises(WrongKey):
        other.get(names.LATEST)


def damage(inner: Store, name: str, place: int) -> None:
    data = bytearray(inner.get(name))
    data[place] ^= 1
    inner.put(name, bytes(data))


def test_a_damaged_pack_of_an_earlier_try_is_written_anew(inner: Store, store: EncryptedStore) -> None:
    """As in a plain store: the same contents have the same pack each time."""
    fence(store, 1)
    state = make_state(SMALL)
    save_and_commit(store, state)
    pack = next(entry.name for entry in inner.entries(names.PACKS))
    damage(inner, pack, inner.size(pack) // 2)
    assert list(verify(store))
    save_and_commit(store, state, step=2)
    assert load(open_checkpoint(store))[0] == state


ROW = 1 << 16
ROWS = os.urandom(8 * ROW)


def rows(store: Store) -> Checkpoint:
    """Commit a tensor of eight rows, a tile each, that lie side by side in one pack."""
    spec = TensorSpec(key="model/w", dtype="float32", shape=(8, ROW // 4))
    pieces = [piece(spec, ROWS, Box(start=(row, 0), stop=(row + 1, ROW // 4))) for row in range(8)]
    fence(store, 1)
    save_rank(store, step=1, made_in=1, attempt=0, rank=0, world=1, pieces=pieces, facts={})
    commit(store, step=1, made_in=1, attempt=0, committed_in=1, world=1)
    return open_checkpoint(store)


def filled(checkpoint: Checkpoint) -> tuple[list[int], dict[int, bytes]]:
    """Return the rows that could not be read, and the bytes of the others."""
    offers = list(checkpoint.offers("s"))
    buffers = [memoryview(bytearray(ROW)) for _ in offers]
    errors = dict(checkpoint.source("s").fill(list(zip(offers, buffers, strict=True))))
    at = {number: offer.box.start[0] for number, offer in enumerate(offers)}
    lost = [at[number] for number, error in errors.items() if error is not None]
    return lost, {at[n]: bytes(buffer) for n, buffer in enumerate(buffers) if at[n] not in lost}


def test_each_tile_of_a_damaged_stretch_is_read_by_itself(inner: Store, store: EncryptedStore) -> None:
    """One chunk is lost, and with it what lies in it; not all that would have been read at once."""
    checkpoint = rows(store)
    pack = next(entry.name for entry in inner.entries(names.PACKS))
    damage(inner, pack, inner.size(pack) // 2)
    lost, read = filled(checkpoint)
    assert 1 <= len(lost) <= 2
    assert read == {row: ROWS[row * ROW : (row + 1) * ROW] for row in range(8) if row not in lost}


def test_verify_names_the_tiles_that_a_damaged_chunk_has(inner: Store, store: EncryptedStore) -> None:
    """Those and no others, and the checkpoints that need them."""
    checkpoint = rows(store)
    pack = next(entry.name for entry in inner.entries(names.PACKS))
    damage(inner, pack, inner.size(pack) // 2)
    lost, _ = filled(checkpoint)
    findings = list(verify(store))
    boxes = [str(Box(start=(row, 0), stop=(row + 1, ROW // 4))) for row in sorted(lost)]
    assert [(one.tensor, one.box) for one in findings] == [("model/w", box) for box in boxes]
    assert {one.checkpoints for one in findings} == {(checkpoint.name,)}
    assert all("not as they were encrypted" in one.detail for one in findings)


def test_a_pack_that_is_gone_is_not_asked_for_tile_by_tile(
    inner: Store, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand requests would all be told the same."""
    checkpoint, asked = rows(store), list[str]()
    inner.delete(next(entry.name for entry in inner.entries(names.PACKS)))
    get = EncryptedStore.get

    def counted(store: EncryptedStore, name: str, start: int = 0, stop: int | None = None) -> bytes:
        asked.append(name)
        return get(store, name, start, stop)

    monkeypatch.setattr(EncryptedStore, "get", counted)
    lost, _ = filled(checkpoint)
    assert (sorted(lost), len(asked)) == ([*range(8)], 1)


def test_checkpoints_work_in_an_encrypted_store(inner: Store, store: EncryptedStore) -> None:
    """They are saved, restored and verified as anywhere; without the key, the reader is told that one is needed."""
    state = make_state(SMALL)
    fence(store, 1)
    save_and_commit(store, state)
    assert load(open_checkpoint(store))[0] == state
    assert list(verify(store)) == []
    with pytest.raises(WrongKey, match="open the store with the key"):
        read_latest(inner)


def test_keys_are_read_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As raw bytes, hex or base64."""
    secret = bytes(range(32))
    for number, content in enumerate([secret, secret.hex().encode() + b"\n", KEY.text().encode()]):
        path = tmp_path / str(number)
        path.write_bytes(content)
        assert Key.from_file(path).id == KEY.id
    monkeypatch.setenv("ELASTIC3D_STORE_KEY", KEY.text())
    assert Key.from_env().id == KEY.id
    assert Key.generate().id != KEY.id


def test_a_malformed_key_is_refused_without_being_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says where it was read and how to make a key."""
    (tmp_path / "short").write_text("c2VjcmV0")
    with pytest.raises(StoreUnfit, match="openssl rand") as raised:
        Key.from_file(tmp_path / "short")
    assert "c2VjcmV0" not in str(raised.value)
    with pytest.raises(StoreUnfit, match="cannot be read"):
        Key.from_file(tmp_path / "missing")
    with pytest.raises(StoreUnfit, match="knows no such user"):
        Key.from_file("~nobody-here/key")
    monkeypatch.delenv("ELASTIC3D_STORE_KEY", raising=False)
    with pytest.raises(StoreUnfit, match="is not set"):
        Key.from_env()


def test_a_key_does_not_show_its_secret() -> None:
    """It is neither printed nor pickled."""
    assert KEY.text() not in repr(KEY)
    assert bytes(range(32)).hex() not in repr(KEY)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(KEY)


def test_names_of_packs_reveal_nothing_of_their_contents(tmp_path: Path) -> None:
    """The same contents have one name under one key, and another under another; listings show the ids."""
    plain = open_store(str(tmp_path / "plain"))
    save_and_commit(plain, make_state(SMALL))
    packs = list(plain.list("packs/"))
    hidden = []
    for number in (1, 2):
        root = tmp_path / str(number)
        store = open_store(str(root), key=Key(bytes([number]) * 32))
        save_and_commit(store, make_state(SMALL))
        assert list(store.list("packs/")) == packs
        assert [entry.size for entry in store.entries(packs[0][:9])] == [plain.size(packs[0])]
        hidden.append({path.name for path in (root / "packs").rglob("*.pack")})
        assert not hidden[-1] & {name.rpartition("/")[2] for name in packs}
        assert not list(verify(store))
        store.delete(packs[0])
        assert list(store.list("packs/")) == packs[1:]
    assert not hidden[0] & hidden[1]


def test_packs_of_older_stores_are_found_beside_new_ones(tmp_path: Path) -> None:
    """They are not written again, and can be deleted."""
    shutil.copytree(DATA / "stores" / "encrypted-v1", tmp_path / "store")
    store = open_store(str(tmp_path / "store"), key=Key(bytes(range(32))))
    packs = list(store.list("packs/"))
    assert len(packs) == 4
    contents = store.get(packs[0])
    store.put(packs[0], contents)
    assert (list(store.list("packs/")), store.get(packs[0])) == (packs, contents)
    assert not list(verify(store))
    store.delete(packs[0])
    assert list(store.list("packs/")) == packs[1:]
    with pytest.raises(StoreNotFound):
        store.get(packs[0])
