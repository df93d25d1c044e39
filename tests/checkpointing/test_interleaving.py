"""Concurrent writers, leaders, collectors and readers: store operations in every order that a seed draws.

Packs are as commits and collections see them: objects with an id and a size. Only a few contents are written, so
that condemned packs return under their ids.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from chaos.commits.production import alone
from checkpointing import (
    Retention,
    TensorSpec,
    collect,
    commit,
    fence,
    mark_verified,
    open_checkpoint,
    pin,
    plan_collection,
    read_ref,
    tag,
)
from checkpointing.errors import (
    CheckpointError,
    Collecting,
    CommitRefused,
    Incomplete,
    KeepRefused,
    NoCheckpoint,
    StoreError,
)
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest
from checkpointing.format.history import decode_history
from checkpointing.format.manifest import RankManifest, StoredTile, decode_manifest, encode_manifest, facts_digest
from checkpointing.format.pack import HEAD, TAIL
from checkpointing.format.record import decode_record
from checkpointing.format.refs import Ref, decode_ref
from checkpointing.reading.naming import committed
from tests.checkpointing.interleaving import Actor, View, World

GRACE = 60.0
SETTLING = -1
"""The seed of the names that a last collection draws, which are no others'."""
FACTS = {"loss": 1}
SPEC = TensorSpec(key="w", dtype="uint8", shape=(2,))
FROZEN = TensorSpec(key="frozen", dtype="uint8", shape=(2,))


def contents(number: int) -> bytes:
    return HEAD + bytes([number % 256, number // 256]) + b"index of it" + b"\0" * (TAIL - 5)


def tile(spec: TensorSpec, pack: str) -> StoredTile:
    return StoredTile(spec=spec, box=spec.box, digest=pack, pack=pack, offset=len(HEAD), length=2)


class Oracle:
    """Inspects the store directly after every operation that may matter."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.faults: list[str] = []
        self.seen: set[str] = set()
        world.after = self.check

    def check(self, verb: str, name: str) -> None:
        if verb not in ("delete", "swap", "put"):
            return
        for checkpoint in self.committed():
            self.seen.add(checkpoint)
            for missing in self.needs(checkpoint) - set(self.world.objects):
                self.faults.append(f"{self.world.now:.1f}: {checkpoint} has lost {missing} by {verb} {name}")

    def ref(self) -> Ref | None:
        stored = self.world.objects.get(names.LATEST)
        return decode_ref(stored.data, names.LATEST) if stored else None

    def committed(self) -> list[str]:
        ref = self.ref()
        checkpoints = list(ref.committed) if ref else []
        older = ref.older if ref else None
        while older is not None:
            part = decode_history(self.world.objects[older.name].data, older.name)
            checkpoints += part.checkpoints
            older = part.older
        return checkpoints

    def needs(self, checkpoint: str) -> set[str]:
        name = names.record(checkpoint)
        if name not in self.world.objects:
            return {name}
        objects = {name}
        for entry in decode_record(self.world.objects[name].data, name).manifests:
            objects.add(entry.name)
            if entry.name in self.world.objects:
                packs = decode_manifest(self.world.objects[entry.name].data, entry.name).packs
                objects |= {names.pack(pack) for pack in packs}
        return objects


def write(store: View, chance: random.Random, step: int, made_in: int, *, calm: bool) -> None:
    """Save like a rank: existing packs are used, a parent's are referenced; if calm, all else is new."""
    try:
        parent = open_checkpoint(store)
    except NoCheckpoint:
        parent = None
    packs, tiles = {}, []
    for spec, number in ((SPEC, 100 * made_in + step if calm else chance.randrange(3)), (FROZEN, 7)):
        old = [t for t in parent.tiles if t.spec == spec] if parent else []
        if old and spec == FROZEN:
            tiles.append(old[0])
            packs[old[0].pack] = parent.packs[old[0].pack]  # type: ignore[union-attr]
            continue
        data = contents(number + 10 * (spec == FROZEN and not calm and chance.random() < 0.5))
        pack = hexdigest(data)
        try:
            there = store.get(names.pack(pack)) == data
        except StoreError:
            there = False
        if not there:
            store.put(names.pack(pack), data)
        packs[pack] = len(data)
        tiles.append(tile(spec, pack))
    manifest = RankManifest(
        save=names.Save(step=step, made_in=made_in, attempt=0),
        rank=0,
        world=1,
        parent=None,
        facts_digest=facts_digest(FACTS),
        facts=FACTS,
        packs=packs,
        specs=(SPEC, FROZEN),
        tiles=tuple(tiles),
    )
    store.put_if_absent(manifest.name, encode_manifest(manifest))


def trainer(generation: int, steps: int, oracle: Oracle, *, calm: bool) -> Callable[[Actor], None]:
    """Fence, then save and commit steps; refused and lost saves are dropped, as in training.

    If calm, no save that took less than the grace may lose anything.
    """

    def work(actor: Actor) -> None:
        store, chance = View(actor), random.Random(f"{actor.name}{actor.world.random.random()}")
        actor.sleep(150.0 * (generation - 1) * chance.random())
        for attempt in range(4):
            try:
                fence(store, generation)
                break
            except CommitRefused:
                return
            except StoreError:
                assert attempt < 3 or actor.loses
        for step in range(1, steps + 1):
            actor.sleep(chance.choice((0.0, 1.0, 20.0, 70.0)))
            for _ in range(3):
                began = actor.world.now
                try:
                    write(store, chance, step, generation, calm=calm)
                    commit(store, step=step, made_in=generation, attempt=0, committed_in=generation, world=1)
                    break
                except CheckpointError as error:
                    if calm and isinstance(error, Collecting | Incomplete) and actor.world.now - began < GRACE:
                        oracle.faults.append(f"{actor.world.now:.1f}: {actor.name} has lost a fresh save: {error}")
                    actor.sleep(chance.choice((0.0, 10.0, 100.0)))

    return work


def collector(rounds: int, retention: Retention, *, calm: bool) -> Callable[[Actor], None]:
    def work(actor: Actor) -> None:
        store, chance = View(actor), random.Random(f"{actor.name}{actor.world.random.random()}")
        for _ in range(rounds):
            actor.sleep(chance.choice((0.0, 5.0, 61.0)))
            # A grace that is too short for the writers may cost saves, but never a checkpoint.
            grace = GRACE if calm else chance.choice((0.0, 1.0, GRACE))
            try:
                collect(store, retention, grace=grace, wait=chance.random() < 0.5, sleep=actor.sleep, clock=actor.clock)
            except (StoreError, KeepRefused):
                pass

    return work


def keeper(actor: Actor) -> None:
    """Tag, pin and verify the newest checkpoint."""
    store, chance = View(actor), random.Random(f"{actor.name}{actor.world.random.random()}")
    for number in range(6):
        actor.sleep(chance.choice((0.0, 10.0, 50.0)))
        try:
            name = open_checkpoint(store).name
            actor.sleep(chance.choice((0.0, 5.0)))
            kept = chance.choice(("tag", "pin", "verified"))
            if kept == "tag":
                tag(store, f"t{number}", name)
            elif kept == "pin":
                pin(store, name, "kept")
            else:
                mark_verified(store, name)
        except CheckpointError:
            continue


def reader(oracle: Oracle) -> Callable[[Actor], None]:
    """Read checkpoints whole; a reader faster than the grace must find all of it."""

    def work(actor: Actor) -> None:
        store, chance = View(actor), random.Random(f"{actor.name}{actor.world.random.random()}")
        for _ in range(10):
            actor.sleep(chance.choice((0.0, 10.0, 40.0)))
            began = actor.world.now
            try:
                held = committed(store, read_ref(store))
                if not held:
                    continue
                # Its name is known: that it may be dropped from now on must not matter for the grace.
                checkpoint = open_checkpoint(store, Ref(generation=0, checkpoint=chance.choice(held)))
                for pack, size in checkpoint.packs.items():
                    assert hexdigest(store.get(names.pack(pack))) == pack
                    assert store.size(names.pack(pack)) == size
            except CheckpointError as error:
                if actor.world.now - began < GRACE:
                    oracle.faults.append(f"{actor.world.now:.1f}: {actor.name} could not read: {error}")

    return work


def run(seed: int, *, dies: float = 0.004, loses: float = 0.02, late: float = 0.03) -> Oracle:
    world = World(seed)
    oracle = Oracle(world)
    calm = seed % 4 == 0
    faults = {} if calm else {"dies": dies, "loses": loses}
    world.start("one", trainer(1, 8, oracle, calm=calm), **faults)
    world.start("two", trainer(2, 8, oracle, calm=calm), **faults)
    if not calm:  # two leaders of a generation would write different contents into one save
        world.start("zombie", trainer(1, 8, oracle, calm=calm), **faults)
    late = 0.0 if calm else late
    world.start("sweeper", collector(8, Retention(keep_last=1), calm=calm), late=late, **faults)
    world.start("other", collector(8, Retention(keep_last=2, keep_every=3), calm=calm), late=late, **faults)
    world.start("keeper", keeper, **faults)
    if calm:
        world.start("reader", reader(oracle))
    with alone(seed):
        world.run()
    for actor in world.actors:
        if actor.error is not None:
            raise actor.error
    return oracle


def settle(oracle: Oracle) -> None:
    """Collect undisturbed until nothing more is deleted; each dry run announces what its real run frees."""
    world = oracle.world
    world.now += 200_000.0
    world._late()

    def work(actor: Actor) -> None:
        store = View(actor)
        for _ in range(4):
            actor.sleep(100_000.0)
            plan = plan_collection(store, Retention(keep_last=1), grace=GRACE)
            before = set(world.objects)
            dry = collect(store, Retention(keep_last=1), grace=GRACE, dry_run=True)
            assert set(world.objects) == before
            done = collect(store, Retention(keep_last=1), grace=GRACE, sleep=actor.sleep, clock=actor.clock)
            assert plan.objects == dry.objects == done.objects
            assert plan.dropped == dry.dropped == done.dropped
            # Tombstones of this and of sweeps whose quarantine is over go too.
            gone = {name for name in before - set(world.objects) if not names.is_tombstone(name)}
            assert gone == {doomed.name for doomed in done.objects if not names.is_tombstone(doomed.name)}

    world.actors = []
    last = world.start("settle", work)
    with alone(SETTLING):
        world.run()
    if last.error is not None:
        raise last.error


def check(seed: int) -> Oracle:
    oracle = run(seed)
    assert not oracle.faults, "\n".join([*oracle.world.log, *oracle.faults])
    settle(oracle)
    assert not oracle.faults, "\n".join([*oracle.world.log, *oracle.faults])
    ref = oracle.ref()
    if ref is None:
        return oracle
    needed = {name for checkpoint in oracle.committed() for name in oracle.needs(checkpoint)}
    for name in oracle.world.objects:
        parsed = names.parse_checkpoint(names.parse_record(name)) or names.parse_manifest(name)
        if parsed and (ref.made_in or 0, ref.step or 0) < (parsed[0].made_in, parsed[0].step):
            needed.add(name)  # the last save, which nobody has committed
            if names.parse_manifest(name):
                packs = decode_manifest(oracle.world.objects[name].data, name).packs
                needed |= {names.pack(pack) for pack in packs}
    assert set(oracle.world.objects) - needed <= {names.LATEST, names.SHADOW}
    assert {target.checkpoint for target in ref.tags.values()} | set(ref.pins) <= set(oracle.committed())
    return oracle


@pytest.mark.parametrize("seed", range(24))
def test_no_order_of_operations_loses_a_commit(seed: int) -> None:
    """Whoever dies, waits or repeats: listed checkpoints stay whole, and garbage goes in the end."""
    check(seed)


@pytest.mark.slow
def test_no_order_of_operations_loses_a_commit_in_many_seeds() -> None:
    """The same for many more seeds."""
    for seed in range(1000, 2500):
        check(seed)


@pytest.mark.parametrize("seed", range(1, 4))
def test_a_seed_is_one_history(seed: int) -> None:
    """The same seed gives the same operations, deaths and answers again."""
    assert run(seed).world.log == run(seed).world.log


def test_drawn_orders_cover_every_outcome() -> None:
    """Among the seeds are commits of both generations, drops, takeovers, refusals and late deletions."""
    oracles = [run(seed) for seed in range(1, 8)]
    seen = {name for oracle in oracles for name in oracle.seen}
    assert {names.parse_checkpoint(name)[1] for name in seen} == {1, 2}  # type: ignore[index]
    log = "\n".join(line for oracle in oracles for line in oracle.world.log)
    assert "(late) delete" in log
    assert " dies before " in log
    assert any(oracle.seen - set(oracle.committed()) for oracle in oracles)
