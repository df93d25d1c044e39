"""The local disk between a node's processes and a farther source."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from checkpointing import Checkpoint, Offered, Resolved, open_checkpoint, resolve
from checkpointing.errors import MissingTile, SourceError, StoreUnfit, TileLost
from checkpointing.reading.tier import DiskTier, _Claims
from checkpointing.stores.local import LocalStore
from tests.checkpointing.states import SMALL, make_state, save_and_commit

LARGE = {f"w{number}": ("float32", (64, 16)) for number in range(12)}


class Counted(LocalStore):
    """A store that notes reads of packs in a file, so that processes can share it."""

    def read_into(self, name: str, start: int, buffers: Sequence[memoryview]) -> int:
        got = super().read_into(name, start, buffers)
        with open(f"{self.url}.log", "a") as log:
            log.write(f"{got}\n")
        return got

    @property
    def read_bytes(self) -> int:
        path = Path(f"{self.url}.log")
        return sum(map(int, path.read_text().split())) if path.exists() else 0


def restore(checkpoint: Checkpoint, tier: DiskTier, *, fall_through: bool = True) -> tuple[dict[str, bytes], Resolved]:
    """Restore every tensor through the tier, and the tiles that it lacks from the store."""
    buffers = {spec: bytearray(spec.box.numel * spec.itemsize) for spec in checkpoint.specs.values()}
    sources = {"disk": tier, **({"store": checkpoint.source()} if fall_through else {})}
    offers = [*tier.offers(checkpoint.offers()), *(checkpoint.offers() if fall_through else ())]
    resolved = resolve([(s, s.box) for s in buffers], offers, sources, lambda s, _: memoryview(buffers[s]))
    return {spec.key: bytes(data) for spec, data in buffers.items()}, resolved


@pytest.fixture
def place(tmp_path: Path) -> tuple[Counted, dict[str, bytes]]:
    store, state = Counted(tmp_path / "store"), make_state({**SMALL, **LARGE})
    save_and_commit(store, state)
    return store, {spec.key: data for spec, data in state.items()}


def through(store: Counted, path: Path, limit: int = 1 << 20) -> tuple[Checkpoint, DiskTier]:
    checkpoint = open_checkpoint(store)
    return checkpoint, DiskTier(path, limit, behind=checkpoint.source())


def test_the_second_restore_reads_nothing_from_the_store(
    place: tuple[Counted, dict[str, bytes]], tmp_path: Path
) -> None:
    """Tiles stay on disk between processes, with the right bytes."""
    store, state = place
    assert restore(*through(store, tmp_path / "disk"))[0] == state
    before = store.read_bytes
    assert before <= 1.1 * sum(map(len, state.values()))
    assert restore(*through(store, tmp_path / "disk"))[0] == state
    assert store.read_bytes == before


def _process(url: str, path: Path, go: object, results: object) -> None:
    go.wait()  # type: ignore[attr-defined]
    restored, resolved = restore(*through(Counted(Path(url)), path))
    results.put((restored, resolved.failures))  # type: ignore[attr-defined]


def test_processes_of_a_node_fetch_each_tile_once(place: tuple[Counted, dict[str, bytes]], tmp_path: Path) -> None:
    """Four processes that restore everything at once read it from the store once."""
    store, state = place
    context = multiprocessing.get_context("fork")
    go, results = context.Event(), context.Queue()
    children = [context.Process(target=_process, args=(store.url, tmp_path / "disk", go, results)) for _ in range(4)]
    for child in children:
        child.start()
    go.set()
    assert all(results.get(timeout=60) == (state, ()) for _ in children)
    for child in children:
        child.join()
    assert store.read_bytes <= 1.1 * sum(map(len, state.values()))


class Slow:
    """A source that never answers, in a process that is killed."""

    name = "slow"

    def __init__(self, started: object) -> None:
        self.started = started

    def fetch(self, tile: Offered) -> bytes:
        self.started.set()  # type: ignore[attr-defined]
        time.sleep(60)
        return b""


def _stuck(path: Path, tile: Offered, started: object) -> None:
    DiskTier(path, 1 << 20, behind=Slow(started)).fetch(tile)


def test_a_claim_dies_with_its_process(place: tuple[Counted, dict[str, bytes]], tmp_path: Path) -> None:
    """A process that waits for a tile fetches it when the process that claimed it is killed."""
    store, state = place
    context = multiprocessing.get_context("fork")
    started = context.Event()
    tile = next(open_checkpoint(store).offers())
    child = context.Process(target=_stuck, args=(tmp_path / "disk", tile, started))
    child.start()
    assert started.wait(30)
    checkpoint, tier = through(store, tmp_path / "disk")
    restored: list[dict[str, bytes]] = []
    waiter = threading.Thread(target=lambda: restored.append(restore(checkpoint, tier)[0]))
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    waiter.join(30)
    assert restored == [state]


def tiles(path: Path) -> list[Path]:
    return sorted(path.glob("tiles/*/*"))


@pytest.mark.parametrize("damage", ["flip", "short", "empty", "long"])
def test_a_damaged_file_is_replaced(place: tuple[Counted, dict[str, bytes]], tmp_path: Path, damage: str) -> None:
    """Whatever a crash or the disk left of a tile, the right bytes are returned, and are there afterwards."""
    store, state = place
    restore(*through(store, tmp_path / "disk"))
    files = tiles(tmp_path / "disk")
    whole = {file: file.read_bytes() for file in files}
    for file in files[::2]:
        data = whole[file]
        changed = {"flip": bytes([data[0] ^ 4]) + data[1:], "short": data[:-1], "empty": b"", "long": data + b"x"}
        file.write_bytes(changed[damage])
    restored, resolved = restore(*through(store, tmp_path / "disk"))
    assert restored == state
    assert {file: file.read_bytes() for file in tiles(tmp_path / "disk")} == whole
    # A wrong length is seen by the tier itself, wrong bytes by the resolver.
    assert (resolved.repaired > 0) == (damage == "flip")


def test_the_disk_limit_holds_and_the_oldest_go_first(place: tuple[Counted, dict[str, bytes]], tmp_path: Path) -> None:
    """Everything is restored within any limit, and never more than that is on disk."""
    store, state = place
    limit = 5000
    assert restore(*through(store, tmp_path / "disk", limit))[0] == state
    assert 0 < sum(file.stat().st_size for file in tiles(tmp_path / "disk")) <= limit
    checkpoint, tier = through(store, tmp_path / "disk", 3 * 4096)
    offers = [offer for offer in checkpoint.offers() if offer.spec.key.startswith("w") and offer.nbytes > 1000][:6]
    for offer in offers[:3] + offers[:1]:
        tier.fetch(offer)
    for file in tiles(tmp_path / "disk"):
        if file.name == offers[0].digest:
            os.utime(file)
        else:
            os.utime(file, (1, 1))
    for offer in offers[3:]:
        tier.fetch(offer)
        names = {file.name for file in tiles(tmp_path / "disk")}
        assert offer.digest in names
    assert offers[1].digest not in names


def test_a_failing_disk_is_bypassed(place: tuple[Counted, dict[str, bytes]], tmp_path: Path) -> None:
    """A directory that vanished costs another read, not the restore; an impossible one is refused."""
    import shutil

    store, state = place
    checkpoint, tier = through(store, tmp_path / "disk")
    shutil.rmtree(tmp_path / "disk")
    assert restore(checkpoint, tier)[0] == state
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnfit, match=r"disk tier .* Give a directory"):
        DiskTier(tmp_path / "file", 10)
    with pytest.raises(ValueError, match="limit"):
        DiskTier(tmp_path / "disk", 0)


@pytest.mark.parametrize("waiting", [False, True])
def test_a_claim_is_granted_where_locks_fail(tmp_path: Path, waiting: bool) -> None:
    """As on a network mount whose lock service is down: processes may fetch a tile twice, and the restore goes on."""
    descriptor = os.open(tmp_path, os.O_RDONLY)  # nothing that was opened to be read can be locked to be written
    try:
        assert _Claims(descriptor).take("0" * 64, wait=waiting)
    finally:
        os.close(descriptor)


def test_only_verified_tiles_are_kept_on_disk(place: tuple[Counted, dict[str, bytes]], tmp_path: Path) -> None:
    """Tiles are verified before they are kept, and the errors of the source are distinct."""

    class Liar:
        name = "liar"

        def fetch(self, tile: Offered) -> bytes:
            if tile.spec.key == "model/b":
                raise SourceError("down")
            return bytes(tile.nbytes)

    store, _ = place
    checkpoint = open_checkpoint(store)
    tier = DiskTier(tmp_path / "disk", 1 << 20, behind=Liar())
    for offer in checkpoint.offers():
        expected = SourceError if offer.spec.key == "model/b" else TileLost
        with pytest.raises(expected):
            tier.fetch(offer)
    assert tiles(tmp_path / "disk") == []
    with pytest.raises(MissingTile, match=r"digest they were offered with|down"):
        restore(checkpoint, tier, fall_through=False)


def test_a_tier_without_a_source_returns_its_tiles(place: tuple[Counted, dict[str, bytes]], tmp_path: Path) -> None:
    """Prefetching warms a disk; another tier on it needs no source."""
    store, state = place
    checkpoint, tier = through(store, tmp_path / "disk")
    tier.prefetch(list(checkpoint.offers()))
    cold = DiskTier(tmp_path / "disk", 1 << 20)
    assert restore(checkpoint, cold, fall_through=False)[0] == state
    with pytest.raises(TileLost, match="is not on"):
        DiskTier(tmp_path / "other", 1 << 20).fetch(next(checkpoint.offers()))
