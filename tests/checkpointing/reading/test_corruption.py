"""A campaign of random damage: all of it is found, healed where another copy exists, and never restored."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path

import pytest

from checkpointing import Checkpoint, Resolved, Store, open_checkpoint, open_store, resolve, verify
from checkpointing.errors import CheckpointError, MissingTile
from checkpointing.format import names
from checkpointing.format.codecs import Codec
from checkpointing.format.manifest import decode_manifest
from checkpointing.reading.findings import Finding
from checkpointing.reading.resolver import TileSource
from checkpointing.reading.spares import Spares
from checkpointing.reading.tier import DiskTier
from tests.checkpointing.encoded import save_encoded, smooth
from tests.checkpointing.states import SMALL, State, make_state, save_and_commit

_numbers = itertools.count()
SHAPES = {"a": ("float32", (40, 8)), "b": ("bfloat16", (300,)), "c": ("int64", (6, 40)), "t": ("uint8", ())}


def restore(checkpoint: Checkpoint, *more: TileSource, repair: bool = False) -> tuple[State, Resolved]:
    """Restore every tensor from the checkpoint's own packs, then from the further sources."""
    buffers = {spec: bytearray(spec.box.numel * spec.itemsize) for spec in checkpoint.specs.values()}
    sources: dict[str, TileSource] = {"store": checkpoint.source(repair=repair)}
    sources |= {source.name: source for source in more}
    offers = list(checkpoint.offers())
    for source in more:
        offers += source.offers(checkpoint.offers()) if isinstance(source, DiskTier) else source.offers()  # type: ignore[attr-defined]
    resolved = resolve([(s, s.box) for s in buffers], offers, sources, lambda s, _: memoryview(buffers[s]))
    return {spec: bytes(data) for spec, data in buffers.items()}, resolved


def damage(data: bytes, random: random.Random) -> tuple[bytes, int]:
    """Return other bytes of the same length, and where they first differ: a bit, some bytes, or a stretch of zeros."""
    place = random.randrange(len(data))
    kind = random.randrange(3)
    if kind == 0:
        changed = bytes([data[place] ^ 1 << random.randrange(8)])
    elif kind == 1:
        changed = random.randbytes(random.randint(2, 16))
    else:
        changed = bytes(random.randint(2, 600))
    new = (data[:place] + changed + data[place + len(changed) :])[: len(data)]
    if new == data:
        return damage(data, random)
    return new, next(n for n, (a, b) in enumerate(zip(data, new, strict=True)) if a != b)


def first_tile(store: Store, pack: str, place: int) -> tuple[set[str], set[int]]:
    """Return the tensors that contain a pack's byte and the ranks that saved it; nothing for a byte of no tile."""
    tensors, ranks = set(), set()
    for name in store.list("saves/"):
        manifest = decode_manifest(store.get(name), name)
        for tile in manifest.tiles:
            if tile.pack == pack and tile.offset <= place < tile.offset + tile.length:
                tensors.add(tile.spec.key)
                ranks.add(manifest.rank)
    return tensors, ranks


@pytest.fixture(scope="module")
def store() -> Store:
    """Two full saves of one state, by two ranks and by three."""
    store = open_store(f"memory://corruption-{next(_numbers)}")
    state = make_state({**SMALL, **SHAPES})
    save_and_commit(store, state, step=1)
    save_and_commit(store, state, step=2, world=3)
    return store


@pytest.fixture(scope="module")
def encoded() -> Store:
    """A save of encoded tiles, and one of differences to it."""
    store = open_store(f"memory://corruption-{next(_numbers)}")
    first = smooth(SHAPES)
    bases = save_encoded(store, first, lambda spec: Codec.RAW if spec.key == "b" else Codec.PLANES)
    save_encoded(store, smooth(SHAPES, 1), lambda _: Codec.XOR_PLANES, step=2, bases=bases, older=first)
    return store


def campaign(store: Store, tmp_path: Path, seed: int, count: int) -> dict[str, int]:
    """Damage one object after another, restoring it each time; return how often each outcome occurred."""
    chance = random.Random(seed)
    objects = sorted(store.list(""))
    newest = open_checkpoint(store)
    state = restore(newest)[0]
    warm = tmp_path / "warm"
    DiskTier(warm, 1 << 20, behind=newest.source()).prefetch(list(newest.offers()))
    # Packs of the newest checkpoint are hit most: they are what a restore depends on.
    weights = [8 if names.parse_pack(name) in newest.packs else 2 for name in objects]
    outcomes = {"document": 0, "elsewhere in a pack": 0, "tile": 0, "unneeded tile": 0, "spares": 0}
    for _ in range(count):
        (name,) = chance.choices(objects, weights)
        data = store.get(name)
        changed, place = damage(data, chance)
        store.put(name, changed)
        findings = list(verify(store))
        assert name in {finding.object for finding in findings}, (name, place)
        pack = names.parse_pack(name)
        if pack is None:
            outcomes["document"] += 1
            _document(store, name, findings, newest, state)
        else:
            store.put(name, data)
            tensors, ranks = first_tile(store, pack, place)
            store.put(name, changed)
            assert all(finding.pack == pack for finding in findings if finding.object == name)
            if tensors:
                (hit,) = [f for f in findings if f.box is not None and f.tensor in tensors][:1]
                assert hit.rank in ranks
            outcomes[_pack(store, state, warm, needed=bool(tensors))] += 1
            _mended(store, name, data, newest, state, warm)
        store.put(name, data)
    assert list(verify(store)) == []
    return outcomes


def attempt(checkpoint: Checkpoint, *more: TileSource) -> tuple[State, Resolved] | str:
    """Return the restored state, or the error."""
    try:
        return restore(checkpoint, *more)
    except MissingTile as error:
        return str(error)


def _document(store: Store, name: str, findings: list[Finding], newest: Checkpoint, state: State) -> None:
    parsed = names.parse_manifest(name)
    assert parsed is None or parsed[1] in {finding.rank for finding in findings}
    try:
        opened = open_checkpoint(store)
    except CheckpointError:
        pass
    else:
        assert restore(opened)[0] == state
    # The newest checkpoint was open already: its tiles are as they were.
    assert restore(newest)[0] == state


def _pack(store: Store, state: State, warm: Path, *, needed: bool) -> str:
    """Restore with no other source, then with others; return what was damaged."""
    opened = open_checkpoint(store)
    alone = attempt(opened)
    if isinstance(alone, str):
        assert "no source has a good copy" in alone
        assert "digest" in alone
    else:
        assert alone[0] == state
        if not alone[1].failures:
            return "unneeded tile" if needed else "elsewhere in a pack"
    restored, resolved = restore(opened, DiskTier(warm, 1 << 20))
    assert restored == state
    assert resolved.failures
    other = attempt(opened, Spares(opened))
    if isinstance(other, str):
        return "tile"
    assert other[0] == state
    return "spares"


def _mended(store: Store, name: str, data: bytes, newest: Checkpoint, state: State, warm: Path) -> None:
    """With permission to repair, healed tiles are repaired in the store or nothing is written."""
    before = store.get(name)
    restored, resolved = restore(newest, DiskTier(warm, 1 << 20), repair=True)
    assert restored == state
    assert store.get(name) in (data, before)
    if resolved.repaired:
        assert store.get(name) == data


def run(store: Store, encoded: Store, tmp_path: Path, count: int) -> dict[str, int]:
    total: dict[str, int] = {}
    for seed, which in enumerate((store, encoded)):
        path = tmp_path / str(seed)
        for outcome, times in campaign(which, path, seed, count // 2).items():
            total[outcome] = total.get(outcome, 0) + times
        shutil.rmtree(path)
    return total


def test_random_damage_is_found_and_healed(store: Store, encoded: Store, tmp_path: Path) -> None:
    """60 times: tensor, rank and pack are named, another tier heals it, and it is never restored."""
    outcomes = run(store, encoded, tmp_path, 60)
    assert outcomes["tile"] + outcomes["spares"] > 5
    assert outcomes["document"] > 5


@pytest.mark.slow
def test_random_damage_is_found_and_healed_a_thousand_times(store: Store, encoded: Store, tmp_path: Path) -> None:
    """The same 1,000 times, with every outcome among them."""
    outcomes = run(store, encoded, tmp_path, 1000)
    assert sum(outcomes.values()) == 1000
    assert all(outcomes[kind] for kind in ("document", "elsewhere in a pack", "tile", "spares"))
