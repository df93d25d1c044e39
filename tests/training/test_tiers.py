"""Where a trainer's state comes from if no keeper holds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointing import Box, Piece, TensorSpec, commit, open_store, resolve, save_rank
from checkpointing.errors import MissingTile
from checkpointing.reading.sources import Offered
from checkpointing.stores.keys import Key
from checkpointing.stores.register import StoreRegister
from elastic3d.errors import ConfigurationError, StateError
from elastic3d.storage import open_checked
from elastic3d.training import restoring
from elastic3d.training.tiers import KeepersAndStore
from elastic3d.values import StoreAt
from tests.checkpointing.states import SMALL, make_state, save_and_commit

SPEC = TensorSpec(key="model/w", dtype="float32", shape=(1024,))
WHOLE = Box(start=(0,), stop=(1024,))
KNOWN = restoring.Known(generation=2)
FACTS = {"order": {}, "step": 5}
TENSOR = torch.arange(1024, dtype=torch.float32)


def save(at: StoreAt) -> None:
    """Commit one checkpoint."""
    store, _ = open_checked(at, None)
    piece = Piece(spec=SPEC, box=WHOLE, data=memoryview(TENSOR.numpy().tobytes()))
    save_rank(store, step=5, made_in=1, attempt=0, rank=0, world=1, pieces=[piece], facts=FACTS)
    commit(store, step=5, made_in=1, attempt=0, committed_in=1, world=1)


def restore(at: StoreAt) -> bytes:
    """Return the bytes of the tensor as a trainer would get them."""
    tiers = KeepersAndStore("run")
    decision = restoring.load(restoring.dump(restoring.decide(tiers, (), at, [SPEC], KNOWN)))
    assert (decision.source, decision.step, decision.facts) == ("store", 5, FACTS)
    buffer = bytearray(WHOLE.numel * 4)
    sources = tiers.sources(decision, at, 0)
    offers = restoring.offers(decision, sources, [(SPEC, WHOLE)])
    resolve([(SPEC, WHOLE)], offers, sources, lambda spec, box: memoryview(buffer))
    return bytes(buffer)


def remove_packs(store: Path) -> None:
    for pack in store.glob("**/*.pack"):
        pack.unlink()


def test_tiles_are_read_from_the_store_once_and_then_from_the_disk(tmp_path: Path) -> None:
    """A second trainer of the node reads none from the store."""
    at = StoreAt(url=str(tmp_path / "store"), cache=str(tmp_path / "cache"), cache_bytes=1 << 20)
    save(at)
    assert restore(at) == TENSOR.numpy().tobytes()
    remove_packs(tmp_path / "store")
    assert restore(at) == TENSOR.numpy().tobytes()
    with pytest.raises(MissingTile):
        restore(StoreAt(url=at.url))


def test_a_damaged_file_on_the_disk_is_replaced(tmp_path: Path) -> None:
    """The store has the tile, and the next trainer reads good bytes from the disk."""
    at = StoreAt(url=str(tmp_path / "store"), cache=str(tmp_path / "cache"), cache_bytes=1 << 20)
    save(at)
    restore(at)
    for tile in (path for path in (tmp_path / "cache" / "tiles").rglob("*") if path.is_file()):
        tile.write_bytes(bytes(tile.stat().st_size))
    assert restore(at) == TENSOR.numpy().tobytes()
    remove_packs(tmp_path / "store")
    assert restore(at) == TENSOR.numpy().tobytes()


def test_an_unusable_disk_is_bypassed(tmp_path: Path) -> None:
    """A restore is then slower, and right."""
    (tmp_path / "cache").write_text("a file")
    at = StoreAt(url=str(tmp_path / "store"), cache=str(tmp_path / "cache"), cache_bytes=1 << 20)
    save(at)
    assert restore(at) == TENSOR.numpy().tobytes()


def test_an_encrypted_checkpoint_needs_its_key(tmp_path: Path) -> None:
    """Nothing of the tensor is in the store; without the key, or with another, the error says so."""
    key = tmp_path / "key"
    key.write_text(Key.generate().text())
    at = StoreAt(url=str(tmp_path / "store"), key=str(key))
    save(at)
    assert restore(at) == TENSOR.numpy().tobytes()
    for file in (path for path in (tmp_path / "store").rglob("*") if path.is_file()):
        assert TENSOR.numpy().tobytes()[1000:1100] not in file.read_bytes()
    with pytest.raises(StateError):
        restore(StoreAt(url=at.url))
    other = tmp_path / "other"
    other.write_text(Key.generate().text())
    with pytest.raises(StateError):
        restore(StoreAt(url=at.url, key=str(other)))
    with pytest.raises(ConfigurationError, match="key"):
        open_checked(StoreAt(url=at.url, key=str(tmp_path / "missing")), None)


def test_a_damaged_pack_of_an_encrypted_store_is_damage(tmp_path: Path) -> None:
    """Not a store that is away: reading it again does not help, and an older checkpoint may."""
    key = tmp_path / "key"
    key.write_text(Key.generate().text())
    at = StoreAt(url=str(tmp_path / "store"), key=str(key))
    save(at)
    (pack,) = (tmp_path / "store").glob("**/*.pack")
    damaged = bytearray(pack.read_bytes())
    # The second time its head is damaged, too, which then names no key.
    for place in (len(damaged) // 2, 0):
        damaged[place] ^= 1
        pack.write_bytes(damaged)
        with pytest.raises(MissingTile) as lost:
            restore(at)
        assert lost.value.damaged, lost.value


def test_a_store_without_commits_has_no_state(tmp_path: Path) -> None:
    """It was opened and never committed to."""
    at = StoreAt(url=str(tmp_path / "store"))
    open_store(at.url)
    assert restoring.decide(KeepersAndStore("run"), (), at, [SPEC], KNOWN).source == restoring.NONE


def test_each_rank_begins_with_another_keeper() -> None:
    """The first keeper is not asked for everything that all of them hold; what only one holds is still found."""
    offers = tuple(
        Offered(spec=SPEC, box=WHOLE, digest="0" * 64, source=server, where=[1, 5, 0, 0, 4096])
        for server in ("a:1", "b:1", "c:1")
    )
    decision = restoring.Decision(source=restoring.MEMORY, step=5, generation=1, offers=offers)
    tiers = KeepersAndStore("run")
    orders = ["".join(name[0] for name in tiers.sources(decision, None, rank)) for rank in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


def test_a_job_does_not_write_beside_a_register(tmp_path: Path) -> None:
    """The jobs that have it would not see its checkpoints, nor be fenced."""
    at, register = StoreAt(url=str(tmp_path / "run")), StoreRegister(open_store(str(tmp_path / "register")))
    store, _ = open_checked(at, register)
    save_and_commit(store, make_state(SMALL, seed=1))
    assert open_checked(at, register)[1] == 1
    with pytest.raises(ConfigurationError, match=r"a register decides here.*register='etcd'"):
        open_checked(at, None)


def test_no_secret_of_a_store_url_is_repeated(tmp_path: Path) -> None:
    """An error names the store without user name, password and query."""
    at = StoreAt(url="nothing://me:hidden@host/run?token=hidden", key="")
    for fails, error in ((lambda: open_checked(at, None), ConfigurationError), (lambda: restore(at), StateError)):
        with pytest.raises(error) as raised:
            fails()
        assert "host/run" in str(raised.value)
        assert "hidden" not in str(raised.value)


def test_what_is_lost_for_good_is_named_by_its_newest_step() -> None:
    """The membership notes the first step that was safe; nodes know of later ones."""
    known = restoring.Known(generation=2, newest=12, reached=3)
    with pytest.raises(StateError, match=r"step 12 had been made and was held in memory, .* there is no store"):
        restoring.decide(KeepersAndStore("run"), (), None, [SPEC], known)
