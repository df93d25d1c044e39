"""Tags, pins, `verified`, names, retention, history, collection and repair, one actor at a time."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from checkpointing import (
    Distrust,
    Ref,
    Retention,
    SaveOptions,
    collect,
    commit,
    fence,
    mark_distrusted,
    mark_verified,
    mark_vetted,
    open_checkpoint,
    open_store,
    pin,
    pins,
    plan_collection,
    read_ref,
    repair_latest,
    resolve_name,
    save_rank,
    tag,
    tags,
    unpin,
    untag,
    verify,
)
from checkpointing.errors import (
    Collecting,
    Corrupt,
    Fenced,
    FormatError,
    Incomplete,
    KeepRefused,
    NoCheckpoint,
    StoreError,
    Superseded,
)
from checkpointing.format import names, refs
from checkpointing.format.announcement import (
    EXPIRES,
    Announcement,
    AtWork,
    Role,
    at_work,
    decode_announcement,
    encode_announcement,
)
from checkpointing.format.encoding import document
from checkpointing.format.refs import decode_ref, encode_ref, spill
from checkpointing.format.tombstone import Doomed
from checkpointing.reading import announcing, naming
from checkpointing.reading.announcing import announced, reading
from checkpointing.reading.naming import committed
from checkpointing.retention.policy import bounded, retained
from checkpointing.stores.encrypted import EncryptedStore
from checkpointing.stores.keys import Key
from checkpointing.stores.local import LocalStore
from checkpointing.stores.protocol import Entry
from tests.checkpointing.interleaving import Free, View
from tests.checkpointing.states import SMALL, load, make_state, piece, save, save_and_commit

DAY = 86400.0


def fresh() -> tuple[View, Free]:
    actor = Free()
    return View(actor), actor


def name(step: int, made_in: int = 1) -> str:
    return names.checkpoint(names.Save(step=step, made_in=made_in, attempt=0), made_in)


def history(store: View, steps: range, made_in: int = 1) -> None:
    for step in steps:
        save_and_commit(store, make_state(SMALL, seed=step), step=step, made_in=made_in)


def spoil(store: View, item: str, how: str) -> None:
    if how == "missing":
        store.delete(item)
    else:
        store.put(item, b"damaged")


class Hooked:
    """A store that calls a hook before one of its operations, once."""

    def __init__(self, store: View, **hooks: Callable[..., Any]) -> None:
        self._store, self._hooks = store, hooks

    def __getattr__(self, verb: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            hook = self._hooks.get(verb)
            if hook is not None and hook(*arguments):
                del self._hooks[verb]
            return getattr(self._store, verb)(*arguments, **options)

        return self._store.url if verb == "url" else call


class Hidden(Hooked):
    """A store with stale listings: they do not show some names yet."""

    def __init__(self, store: View, prefix: str) -> None:
        super().__init__(store)
        self._prefix = prefix

    def entries(self, prefix: str) -> Any:
        return (entry for entry in self._store.entries(prefix) if not entry.name.startswith(self._prefix))


def test_retention_keeps_the_newest_the_spaced_and_the_protected() -> None:
    """The last n, the first of each window in its latest history, and protected ones, in order."""
    all_names = [name(step) for step in range(12, 0, -1)]
    steps = lambda kept: [int(item.partition(".")[0]) for item in kept]  # noqa: E731
    assert retained(all_names, Retention(), ()) == tuple(all_names)
    assert steps(retained(all_names, Retention(keep_last=2), ())) == [12, 11]
    assert steps(retained(all_names, Retention(keep_last=2), {name(5)})) == [12, 11, 5]
    assert steps(retained(all_names, Retention(keep_last=1, keep_every=5), ())) == [12, 10, 5, 1]
    redone = [name(12, 2), name(11, 2), *all_names[:3]]
    assert retained(redone, Retention(keep_last=1, keep_every=10), ()) == (name(12, 2), name(11, 2))
    for wrong in ({"keep_last": 0}, {"keep_every": -1}, {"keep_last": True}):
        with pytest.raises(ValueError, match="whole number from 1"):
            Retention(**wrong)  # type: ignore[arg-type]


def test_a_checkpoint_is_found_by_ref_tag_name_step_and_prefix() -> None:
    """Each kind of name means one checkpoint; an error says if it means none, or two."""
    store, _ = fresh()
    with pytest.raises(NoCheckpoint, match="nothing was ever committed"):
        resolve_name(store, "latest")
    history(store, range(1, 13))
    with pytest.raises(NoCheckpoint, match="verified yet"):
        resolve_name(store, "verified")
    mark_verified(store, "3")
    tag(store, "best", "000000000004")
    for text, step in {"latest": 12, "verified": 3, "best": 4, "7": 7, "000000000011": 11, name(9): 9}.items():
        assert resolve_name(store, text) == name(step)
        assert open_checkpoint(store, text).step == step
    with pytest.raises(NoCheckpoint, match="begins the names of 9 checkpoints"):
        resolve_name(store, "00000000000")
    for text in ("", "13", "nothing", "../refs"):
        with pytest.raises(NoCheckpoint, match="no tag, step or committed checkpoint"):
            resolve_name(store, text)
    save(store, make_state(SMALL), step=13)
    with pytest.raises(NoCheckpoint):
        open_checkpoint(store, name(13))


def test_tags_and_pins_are_set_and_removed() -> None:
    """A tag moves only on request; `verified` never moves back; bad tags are refused."""
    store, _ = fresh()
    history(store, range(1, 4))
    assert tag(store, "best", "1") == tag(store, "best", "1") == name(1)
    with pytest.raises(KeepRefused, match="points to"):
        tag(store, "best", "2")
    assert tag(store, "best", "2", move=True) == name(2)
    assert tags(store) == {"best": name(2)}
    assert read_ref(store, "best").checkpoint == name(2)  # type: ignore[union-attr]
    assert pin(store, "1", "paper") == name(1)
    assert pins(store) == {name(1): "paper"}
    assert mark_verified(store, "2") == name(2) == mark_verified(store, "1")
    assert (untag(store, "best"), untag(store, "best")) == (True, False)
    assert (unpin(store, "1"), unpin(store, "1")) == (True, False)
    for wrong in ("", "latest", "verified", "12", "1.2", "a/b", "-x", "x" * 101, name(1)):
        with pytest.raises(ValueError, match="cannot be a tag"):
            tag(store, wrong, "1")
    ref = read_ref(store)
    assert ref is not None
    assert decode_ref(encode_ref(ref), "refs/latest") == ref


def test_protected_checkpoints_survive_a_collection() -> None:
    """latest, verified, vetted, tags and pins stay whole and all else goes; the dry run announced exactly that."""
    store, actor = fresh()
    history(store, range(1, 8))
    save(store, make_state(SMALL, seed=50), step=5, attempt=1)  # superseded, never committed
    save(store, make_state(SMALL, seed=51), step=9)  # under way
    mark_verified(store, "2")
    mark_vetted(store, "4")
    tag(store, "best", "3")
    pin(store, "5", "paper")
    actor.sleep(100.0)
    store.put("notes/by-somebody-else", b"x")
    before = set(actor.world.objects)
    dry = collect(store, Retention(keep_last=1), grace=60, dry_run=True)
    assert set(actor.world.objects) == before
    done = collect(store, Retention(keep_last=1), grace=60, sleep=actor.sleep)
    assert done.objects == dry.objects
    assert done.dropped == dry.dropped == (name(6), name(1))
    assert before - set(actor.world.objects) == {doomed.name for doomed in done.objects}
    assert not collect(store, Retention(keep_last=1), grace=60, sleep=actor.sleep).objects
    for step in (2, 3, 4, 5, 7):
        assert load(open_checkpoint(store, str(step)))[0] == make_state(SMALL, seed=step)
    assert commit(store, step=9, made_in=1, attempt=0, committed_in=1, world=2).moved
    assert not [finding for finding in verify(store) if "notes/" not in finding.object]


def test_vetted_moves_on_and_never_to_what_a_rule_refuses() -> None:
    """A rule takes it away from what it refuses; nothing puts it back, and the ref says all of it when read again."""
    store, _ = fresh()
    with pytest.raises(NoCheckpoint, match="nothing was ever written"):
        mark_distrusted(store, [Distrust(before=2, step=3)])
    history(store, range(1, 7))
    with pytest.raises(NoCheckpoint, match="no checkpoint is vetted"):
        resolve_name(store, "vetted")
    assert [mark_vetted(store, text) for text in ("4", "2", "5")] == [name(4), name(4), name(5)]
    assert resolve_name(store, "vetted") == name(5)
    mark_distrusted(store, [Distrust(before=2, step=5)])
    assert mark_vetted(store, "6") == name(5)
    mark_distrusted(store, [Distrust(before=2, step=3), Distrust(before=2, step=4)])
    ref = read_ref(store)
    assert ref is not None
    assert (ref.vetted, ref.distrusted) == (None, (Distrust(before=2, step=3),))
    assert [text for text in ref.committed if ref.distrusts(text)] == [name(6), name(5), name(4)]
    assert mark_vetted(store, "4") is None
    assert mark_vetted(store, "3") == name(3)
    ref = read_ref(store)
    assert ref is not None
    assert decode_ref(encode_ref(ref), names.LATEST) == ref


def test_a_tag_of_before_that_is_called_vetted_still_counts() -> None:
    """It cannot be given any more, and yields to what is really vetted."""
    store, _ = fresh()
    history(store, range(1, 4))
    with pytest.raises(ValueError, match="cannot be a tag"):
        tag(store, "vetted", "2")
    ref, token = naming.read_versioned(store)
    assert ref is not None
    target = refs.Target(checkpoint=name(2), record_digest=open_checkpoint(store, "2").root)
    old = dataclasses.replace(ref, tags={"vetted": target})
    assert store.compare_and_swap(names.LATEST, token, encode_ref(old))
    assert resolve_name(store, "vetted") == name(2)
    mark_vetted(store, "1")
    assert resolve_name(store, "vetted") == name(1)


def test_verify_follows_vetted_as_it_does_other_names() -> None:
    """A ref that promises another record than is there is reported."""
    store, _ = fresh()
    history(store, range(1, 3))
    mark_vetted(store, "1")
    assert not list(verify(store))
    ref, token = naming.read_versioned(store)
    assert ref is not None
    target = refs.Target(checkpoint=name(1), record_digest="0" * 64)
    assert store.compare_and_swap(names.LATEST, token, encode_ref(dataclasses.replace(ref, vetted=target)))
    (finding,) = verify(store)
    assert (finding.object, finding.checkpoints) == (names.record(name(1)), (name(1),))


def test_dropped_checkpoints_stay_readable_for_the_grace() -> None:
    """Another collector continues the work of a dead one."""
    store, actor = fresh()
    history(store, range(1, 4))
    actor.sleep(1000.0)
    held = open_checkpoint(store, "1")
    begun = collect(store, Retention(keep_last=1), grace=600, wait=False)
    assert begun.dropped == (name(2), name(1))
    assert not begun.objects
    assert begun.waiting == pytest.approx(600)
    with pytest.raises(NoCheckpoint):
        tag(store, "late", "1")
    actor.sleep(599.0)
    assert collect(store, Retention(), grace=0, wait=False).waiting == pytest.approx(1)
    assert load(held)[0] == make_state(SMALL, seed=1)
    actor.sleep(1.0)
    plan = plan_collection(store, Retention(), grace=600)
    assert plan.begun == plan.objects == collect(store, Retention(), grace=600, wait=False).objects
    assert not list(store.list(names.record(name(1))))


def test_an_announced_reader_outlasts_the_grace() -> None:
    """Its checkpoint is not dropped, or none of it deleted if it was dropped before; it goes when it has been read."""
    store, actor = fresh()
    history(store, range(1, 4))
    actor.sleep(1000.0)
    keep = Retention(keep_last=1)
    with reading(store, "1", after=0.0) as held:
        assert collect(store, keep, grace=0, wait=False).dropped == (name(2),)
        assert load(held)[0] == make_state(SMALL, seed=1)
    assert not list(store.list(names.ANNOUNCEMENTS))
    begun = collect(store, keep, grace=100, wait=False)
    assert begun.dropped == (name(1),)
    with announced(store, Role.READER, name(1), after=0.0):  # read since before that, for a long time
        actor.sleep(100.0)
        done = collect(store, keep, grace=0, wait=False)
        assert (done.objects, done.spared > 2) == ((), True)
        assert load(held)[0] == make_state(SMALL, seed=1)
    assert collect(store, keep, grace=0, wait=False).objects
    assert not list(store.list(names.record(name(1))))


def test_a_reader_that_announces_too_late_takes_another_checkpoint() -> None:
    """A collection between its read of the ref and its announcement did not see it."""
    store, actor = fresh()
    history(store, range(1, 3))
    actor.sleep(1000.0)
    new: Any = []

    def pass_on(name: str, data: bytes) -> bool:
        if name.startswith(names.ANNOUNCEMENTS) and not new:
            new.append(save_and_commit(store, make_state(SMALL, seed=3), step=3))
            collect(store, Retention(keep_last=1), grace=0, wait=False)
        return bool(new)

    hooked: Any = Hooked(store, put=pass_on)
    with reading(hooked, after=0.0) as opened:
        assert opened.step == 3


def test_a_save_that_takes_longer_than_the_grace_loses_nothing() -> None:
    """Packs without a manifest are kept from the start of the first announced writer, unless it died."""
    store, actor = fresh()
    history(store, range(1, 3))
    actor.sleep(1000.0)
    before = set(actor.world.objects)
    with announced(store, Role.WRITER, name(1), after=0.0) as own:
        save(store, make_state(SMALL, seed=9), step=9)
        packs = {item for item in actor.world.objects if item.startswith(names.PACKS)} - before
        for manifest in [item for item in store.list(names.SAVES) if item not in before]:
            store.delete(manifest)  # they come last
        actor.sleep(EXPIRES - 1)
        assert own.renew()
        actor.sleep(EXPIRES - 1)
        # Its parent stays too, although nothing else keeps it.
        assert not collect(store, Retention(keep_last=1), grace=10, wait=False).dropped
        assert packs <= set(actor.world.objects)
        left = dict(actor.world.objects)
    actor.world.objects.update(left)  # as of a process that was killed
    actor.sleep(EXPIRES)
    assert collect(store, Retention(keep_last=1), grace=10, sleep=actor.sleep).dropped == (name(1),)
    assert not packs & set(actor.world.objects)
    actor.sleep(3600.0)
    collect(store, Retention(), grace=10, wait=False)
    assert not list(store.list(names.ANNOUNCEMENTS))


def test_a_save_announces_itself_for_as_long_as_it_writes() -> None:
    """With its parent, from before its first pack until its manifest is there."""
    store, _ = fresh()
    history(store, range(1, 2))
    seen: list[Announcement] = []

    def look(pack: str, *_: Any) -> bool:
        if pack.startswith(names.PACKS):
            seen.extend(decode_announcement(store.get(one), one) for one in store.list(names.ANNOUNCEMENTS))
        return False

    def end(manifest: str, *_: Any) -> bool:
        assert manifest.startswith(names.SAVES)
        assert list(store.list(names.ANNOUNCEMENTS))
        return False

    hooked: Any = Hooked(store, put=look, put_if_absent=end)
    chosen = SaveOptions(announce_after=0.0)
    save_rank(
        hooked,
        step=2,
        made_in=1,
        attempt=0,
        rank=0,
        world=1,
        pieces=[piece(spec, data, spec.box) for spec, data in make_state(SMALL, seed=2).items()],
        facts={},
        parent=open_checkpoint(store),
        options=chosen,
    )
    assert {(announcement.role, announcement.checkpoint) for announcement in seen} == {(Role.WRITER, name(1))}
    assert not list(store.list(names.ANNOUNCEMENTS))


def test_long_work_renews_its_announcement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread; work that is soon over leaves nothing in the store."""
    store = open_store(str(tmp_path))
    written: list[str] = []
    put = store.put
    monkeypatch.setattr(store, "put", lambda one, *rest, **more: (put(one, *rest, **more), written.append(one)))
    monkeypatch.setattr(announcing, "RENEWED_EVERY", 0.01)
    with announced(store, Role.READER, name(1), after=3600.0):
        pass
    assert not written
    until = time.monotonic() + 60
    with announced(store, Role.READER, name(1), after=0.01):
        while len(written) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert list(store.list(names.ANNOUNCEMENTS)) == written[:1]
    assert not list(store.list(names.ANNOUNCEMENTS))


def test_a_reader_without_write_permission_can_read() -> None:
    """Unannounced, and protected only by the grace."""
    store, _ = fresh()
    history(store, range(1, 2))

    def refuse(*_: Any) -> bool:
        raise StoreError("403 Forbidden")

    readonly: Any = Hooked(store, put=refuse, delete=refuse)
    with reading(readonly, after=0.0) as opened:
        assert opened.step == 1


def test_announcements_are_timed_by_durations_alone() -> None:
    """From the start of the work, or rather earlier, until they expire; an unreadable one may be any writer's."""
    reader = Announcement(role=Role.READER, checkpoint=name(1), began=500.0)
    writer = Announcement(role=Role.WRITER, checkpoint=name(2), began=90.0)
    both = [(1000.0, reader), (1100.0, writer)]
    assert at_work([*both], 1299.0) == AtWork(checkpoints=frozenset({name(1), name(2)}), writing_since=1010.0)
    assert at_work([*both], 1300.0) == AtWork(checkpoints=frozenset({name(2)}), writing_since=1010.0)
    assert at_work([*both], 1400.0) == AtWork()
    assert at_work([(1100.0, FormatError("newer")), *both], 1300.0).writing_since == 0.0
    assert decode_announcement(encode_announcement(writer), "x") == writer
    for field, wrong in {"role": "king", "checkpoint": "latest", "began": -1.0, "expires": True}.items():
        data = document("announcement", {**dataclasses.asdict(writer), field: wrong})
        with pytest.raises(FormatError):
            decode_announcement(data, "x")


def test_a_size_limit_drops_the_oldest_and_counts_shared_packs_once() -> None:
    """Protected checkpoints stay even above the limit, and that is reported."""
    needs = {name(4): {"a": 5, "d": 10}, name(3): {"a": 5, "c": 10}, name(2): {"a": 5, "b": 10}, name(1): {"a": 5}}
    kept = tuple(needs)
    assert bounded(kept, 35, (), needs.__getitem__) == (kept, 35)
    assert bounded(kept, 34, (), needs.__getitem__) == ((name(4), name(3)), 25)
    assert bounded(kept, 15, {name(4), name(2)}, needs.__getitem__) == ((name(4), name(2)), 25)
    assert bounded((), 1, (), needs.__getitem__) == ((), 0)


def test_a_collection_keeps_the_size_limit() -> None:
    """Counting the packs of all kept checkpoints; `latest` stays, whatever its size."""
    store, actor = fresh()
    history(store, range(1, 6))
    actor.sleep(1000.0)
    everything = sum(entry.size for entry in store.entries(names.PACKS))
    done = collect(store, Retention(keep_bytes=everything), grace=0, wait=False)
    assert (len(done.dropped), done.over) == (3, 0)  # manifests count as well
    taken = sum(entry.size for prefix in (names.PACKS, names.SAVES) for entry in store.entries(prefix))
    assert taken <= everything
    plan = plan_collection(store, Retention(keep_bytes=1), grace=0)
    assert (plan.kept, plan.over > 0) == ((name(5),), True)
    done = collect(store, Retention(keep_bytes=1), grace=0, wait=False)
    assert done.over == plan.over == taken - done.bytes + _records(done.objects) - 1
    assert load(open_checkpoint(store))[0] == make_state(SMALL, seed=5)


def _records(objects: Iterable[Doomed]) -> int:
    return sum(doomed.size for doomed in objects if not doomed.name.startswith((names.PACKS, names.SAVES)))


def test_a_commit_refuses_condemned_packs() -> None:
    """A pack written long before its manifest is condemned; the commit says so, and the next save is whole."""
    store, actor = fresh()
    history(store, range(1, 3))
    save(store, make_state(SMALL, seed=3), step=3)
    actor.sleep(100.0)
    # A listing so stale that it misses the manifests: nothing then shows that the packs are needed.
    stale = Hidden(store, names.SAVES)
    begun = collect(stale, Retention(keep_last=1), grace=60, wait=False)  # type: ignore[arg-type]
    assert begun.waiting
    with pytest.raises(Collecting, match="Save again"):
        commit(store, step=3, made_in=1, attempt=0, committed_in=1, world=2)
    actor.sleep(100.0)
    collect(stale, Retention(keep_last=1), grace=60)  # type: ignore[arg-type]
    with pytest.raises(Incomplete, match="not in the store"):
        commit(store, step=3, made_in=1, attempt=0, committed_in=1, world=2)
    save_and_commit(store, make_state(SMALL, seed=4), step=4)
    assert load(open_checkpoint(store))[0] == make_state(SMALL, seed=4)


def test_a_commit_notices_a_sweep_between_its_check_and_its_swap() -> None:
    """The packs were there at the check and are gone at the swap: it checks again."""
    store, actor = fresh()
    history(store, range(1, 3))
    save(store, make_state(SMALL, seed=3), step=3)
    actor.sleep(100.0)

    def run(object_name: str, *_: object) -> bool:
        if not object_name.startswith(names.CHECKPOINTS):
            return False
        assert collect(Hidden(store, names.SAVES), Retention(keep_last=1), grace=0).objects  # type: ignore[arg-type]
        return True

    with pytest.raises(Incomplete, match="not in the store"):
        commit(
            Hooked(store, put_if_absent=run),  # type: ignore[arg-type]
            step=3, made_in=1, attempt=0, committed_in=1, world=2,
        )  # fmt: skip
    assert open_checkpoint(store).step == 2
    assert not [finding for finding in verify(store) if finding.checkpoints]


def test_a_commit_before_the_sweep_begins_is_marked() -> None:
    """A commit between mark and begin makes the collector mark again: it drops by the new list."""
    store, actor = fresh()
    history(store, range(1, 4))
    actor.sleep(100.0)

    def run(object_name: str, *_: object) -> bool:
        if not object_name.startswith(names.SWEEPS):
            return False
        save(store, make_state(SMALL, seed=4), step=4, parent=open_checkpoint(store, "2"))
        commit(store, step=4, made_in=1, attempt=0, committed_in=1, world=2)
        return True

    done = collect(Hooked(store, put_if_absent=run), Retention(keep_last=2), grace=0)  # type: ignore[arg-type]
    assert done.dropped == (name(2), name(1))
    assert committed(store, read_ref(store)) == (name(4), name(3))
    assert not list(verify(store))


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_collection_deletes_nothing_if_a_kept_checkpoint_is_unreadable(how: str) -> None:
    """What such a manifest needs is unknown; once that checkpoint may go, all is collected."""
    store, actor = fresh()
    history(store, range(1, 4))
    spoil(store, names.manifest(names.Save(step=2, made_in=1, attempt=0), 1), how)
    actor.sleep(100.0)
    before = set(actor.world.objects)
    with pytest.raises(KeepRefused, match="nothing is collected"):
        collect(store, Retention(keep_last=2), grace=0)
    assert set(actor.world.objects) == before
    assert collect(store, Retention(keep_last=1), grace=0).dropped == (name(2), name(1))
    assert not list(verify(store))


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_sweep_ends_if_a_kept_checkpoint_became_unreadable(how: str) -> None:
    """It deletes nothing, and stands in nobody's way: the next collection may keep less."""
    store, actor = fresh()
    history(store, range(1, 5))
    actor.sleep(100.0)
    assert collect(store, Retention(keep_last=2), grace=60, wait=False).waiting > 0
    spoil(store, names.manifest(names.Save(step=3, made_in=1, attempt=0), 1), how)
    actor.sleep(100.0)
    before = set(actor.world.objects)
    with pytest.raises(KeepRefused, match="was ended"):
        collect(store, Retention(keep_last=2), grace=60, wait=False)
    assert set(store.list(names.PACKS)) == {key for key in before if key.startswith(names.PACKS)}
    assert collect(store, Retention(keep_last=1), grace=0).dropped == (name(3),)


def test_the_tombstone_of_a_dead_collector_is_kept_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deletions may still arrive, so what it condemned stays refused until they cannot."""
    store, actor = fresh()
    history(store, range(1, 4))
    actor.sleep(100.0)

    class Dead(BaseException):
        pass

    def die(object_name: str) -> bool:
        if object_name.startswith(names.PROBE):
            return False
        raise Dead

    with pytest.raises(Dead):
        collect(Hooked(store, delete=die), Retention(keep_last=1), grace=0)  # type: ignore[arg-type]
    assert collect(store, Retention(), grace=0, wait=False).waiting > 3000
    actor.sleep(4000.0)
    assert collect(store, Retention(), grace=0, wait=False).objects
    ref = read_ref(store)
    assert ref is not None
    assert len(ref.quarantined) == 1
    save(store, make_state(SMALL, seed=1), step=8)  # the same bits as step 1 had: the same packs
    with pytest.raises(Collecting):
        commit(store, step=8, made_in=1, attempt=0, committed_in=1, world=2)
    actor.sleep(DAY + 1)
    collect(store, Retention(), grace=DAY, wait=False)
    assert commit(store, step=8, made_in=1, attempt=0, committed_in=1, world=2).moved


@pytest.mark.parametrize("lost", ["the answer to the take", "a look at the owner"])
def test_a_sweep_in_which_the_store_fails_is_nobodys(lost: str) -> None:
    """The next collection deletes after its own grace, not after an hour."""
    store, actor = fresh()
    history(store, range(1, 4))
    actor.sleep(100.0)
    faults: list[str] = []

    class Failing(Hooked):
        """Fails once, when a sweep has just been taken."""

        taken = False

        def compare_and_swap(self, object_name: str, expected: str | None, data: bytes) -> bool:
            swapped = store.compare_and_swap(object_name, expected, data)
            on = decode_ref(data, names.LATEST).sweeping
            if on is not None and on.owner and not faults:
                self.taken = True
                if lost == "the answer to the take":
                    raise StoreError("response lost")
            return swapped

        def read(self, object_name: str) -> Any:
            if self.taken and not faults:
                faults.append(object_name)
                raise StoreError("connection refused")
            return store.read(object_name)

    with pytest.raises(StoreError, match="refused"):
        collect(Failing(store), Retention(keep_last=1), grace=0)  # type: ignore[arg-type]
    assert faults == [names.LATEST]
    ref = read_ref(store)
    assert ref is not None
    assert ref.sweeping is None
    assert len(ref.quarantined) == 1
    assert collect(store, Retention(keep_last=1), grace=0, wait=False).objects
    assert not list(verify(store))


def test_a_long_history_moves_out_of_the_ref(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ref stays small after any number of commits, every name is found, and a collection rewrites the list."""
    assert spill(Ref(generation=1, earlier=tuple(map(name, range(1024, 0, -1)))))[1] == ()
    ref, old = spill(Ref(generation=1, earlier=tuple(map(name, range(1025, 0, -1)))))
    assert (len(ref.earlier), old) == (513, tuple(map(name, range(512, 0, -1))))
    for module in (refs, __import__("checkpointing.saving.ref_update", fromlist=["x"])):
        monkeypatch.setattr(module, "SPILLED", 4)
    monkeypatch.setattr(refs, "LONGEST", 6)
    store, actor = fresh()
    history(store, range(1, 20))
    ref_now = read_ref(store)
    assert ref_now is not None
    assert len(ref_now.earlier) <= 6
    everything = committed(store, ref_now)
    assert everything == tuple(map(name, range(19, 0, -1)))
    assert resolve_name(store, "1") == name(1)
    assert not commit(store, step=1, made_in=1, attempt=0, committed_in=1, world=2).moved  # still told that it is done
    tag(store, "first", "1")
    actor.sleep(100.0)
    done = collect(store, Retention(keep_last=9), grace=0)
    assert len(done.dropped) == 9
    assert committed(store, read_ref(store)) == (*everything[:9], name(1))
    assert len(list(store.list(names.HISTORY))) == 2
    with pytest.raises(Superseded):
        commit(store, step=2, made_in=1, attempt=0, committed_in=1, world=2)


def test_the_ref_stays_small_over_many_commits() -> None:
    """What each commit writes does not grow with the run."""
    ref = Ref(generation=1)
    sizes = []
    for step in range(1, 20_001):
        moved = refs.committed_ref(ref, names.Save(step=step, made_in=1, attempt=0), 1, "0" * 64, "0" * 32)
        ref, _ = spill(moved)
        if step % 2_500 == 0:
            sizes.append(len(encode_ref(ref)))
    assert max(sizes) < 20_000


def damage(store: View, how: str) -> None:
    data = store.get(names.LATEST)
    if how == "gone":
        store.delete(names.LATEST)
    elif how == "empty":
        store.put(names.LATEST, b"")
    else:
        at = 2 if how == "head" else 40
        store.put(names.LATEST, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("how", ["gone", "empty", "flipped", "head"])
def test_a_damaged_ref_is_refused_and_repaired(how: str, sealed: bool) -> None:
    """Nothing is committed over it; repair finds the newest checkpoint, tags, pins, and a fence that holds."""
    below, _ = fresh()
    store: Any = EncryptedStore(below, Key(bytes(32))) if sealed else below
    fence(store, 3)
    history(store, range(1, 5), made_in=3)
    mark_verified(store, "2")
    mark_vetted(store, "3")
    mark_distrusted(store, [Distrust(before=4, step=3)])
    tag(store, "best", "3")
    pin(store, "1", "paper")
    fence(store, 7)
    good = read_ref(store)
    assert good is not None
    assert repair_latest(store) == good
    damage(below, how)
    with pytest.raises(Corrupt, match="ckpt repair"):
        open_checkpoint(store)
    for refused in (lambda: save_and_commit(store, make_state(SMALL), step=9, made_in=7), lambda: fence(store, 8)):
        with pytest.raises(Corrupt, match="ckpt repair"):
            refused()
    ref = repair_latest(store)
    same = ("generation", "checkpoint", "record_digest", "step", "made_in", "earlier", "tags", "pins")
    same = (*same, "verified", "vetted", "distrusted")
    assert {field: getattr(ref, field) for field in same} == {field: getattr(good, field) for field in same}
    with pytest.raises(Fenced):
        fence(store, 6)
    assert not [finding for finding in verify(store) if finding.checkpoints]
    damage(below, how)
    store.delete(names.SHADOW)
    assert repair_latest(store, generation=8).generation == 8


def test_repair_skips_incomplete_and_condemned_checkpoints() -> None:
    """Records whose pack is missing or being swept are skipped; the sweep's names stay refused."""
    store, actor = fresh()
    history(store, range(1, 6))
    actor.sleep(100.0)
    collect(store, Retention(keep_last=3), grace=60, wait=False)
    store.delete(names.pack(next(iter(open_checkpoint(store).packs))))
    damage(store, "flipped")
    ref = repair_latest(store)
    assert committed(store, ref) == (name(4), name(3))
    assert len(ref.quarantined) == 1
    assert dataclasses.replace(ref, write_id="") == dataclasses.replace(read_ref(store), write_id="")  # type: ignore[type-var]
    with pytest.raises(KeepRefused, match="nothing was changed"):
        repair_latest(fresh()[0])


def test_repair_commits_nothing_that_the_ref_does_not_list() -> None:
    """Where only a tombstone is damaged, neither a refused commit nor what a collection dropped comes back."""
    store, actor = fresh()
    history(store, range(1, 6))
    tag(store, "best", "5")
    save(store, make_state(SMALL, seed=6), step=6, made_in=1)
    rival: Any = Hooked(store, compare_and_swap=lambda *_: fence(store, 2))
    with pytest.raises(Fenced):
        commit(rival, step=6, made_in=1, attempt=0, committed_in=1, world=2)
    assert names.record(name(6)) in store.list(names.CHECKPOINTS)
    actor.sleep(100.0)
    collect(store, Retention(keep_last=2), grace=60, wait=False)
    (tombstone,) = store.list(names.SWEEPS)
    store.put(tombstone, b"damaged")
    ref = repair_latest(store)
    assert (committed(store, ref), ref.tags["best"].checkpoint) == ((name(5), name(4)), name(5))
    damage(store, "flipped")
    assert committed(store, repair_latest(store)) == (name(6), name(5), name(4))  # the shadow may be older than 6


def test_repair_rebuilds_a_lost_history_from_older_records_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a damaged part of the history listed is found again; the newest checkpoint stays the one of the ref."""
    for module in (refs, __import__("checkpointing.saving.ref_update", fromlist=["x"])):
        monkeypatch.setattr(module, "SPILLED", 4)
    monkeypatch.setattr(refs, "LONGEST", 6)
    store, _ = fresh()
    history(store, range(1, 9))
    save(store, make_state(SMALL, seed=9), step=9, made_in=1)
    rival: Any = Hooked(store, compare_and_swap=lambda *_: fence(store, 2))
    with pytest.raises(Fenced):
        commit(rival, step=9, made_in=1, attempt=0, committed_in=1, world=2)
    (part,) = store.list(names.HISTORY)
    store.delete(part)
    assert committed(store, repair_latest(store)) == tuple(map(name, range(8, 0, -1)))


def test_repair_asks_for_no_pack_by_itself() -> None:
    """A large store has millions of packs: their sizes are taken from the listing."""
    store, _ = fresh()
    history(store, range(1, 6))
    damage(store, "flipped")
    asked: list[str] = []
    repair_latest(cast(Any, Hooked(store, size=asked.append)))
    assert not [item for item in asked if item.startswith(names.PACKS)]
    assert committed(store, read_ref(store)) == tuple(map(name, range(5, 0, -1)))


class Foreign(LocalStore):
    """A store that lists what somebody else put beside the probes, as a bucket does, and refuses such names."""

    def entries(self, prefix: str) -> Iterator[Entry]:
        yield from super().entries(prefix)
        yield from (one for one in (Entry(name="probe/a b", size=3, modified=1.0),) if one.name.startswith(prefix))


def test_what_others_put_beside_probes_does_not_keep_a_collection_from_its_end(tmp_path: Path) -> None:
    """Nobody can delete an object of such a name: a sweep that wanted to never ended, and neither did any later one."""
    store = Foreign(tmp_path)
    history(store, range(1, 4))  # type: ignore[arg-type]
    left = tmp_path / "probe" / "0123456789abcdef"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"?")
    os.utime(left, (time.time() - 7200, time.time() - 7200))
    swept = collect(store, Retention(keep_last=1), grace=0)
    assert "probe/0123456789abcdef" in {doomed.name for doomed in swept.objects}
    assert not left.exists()
    assert not list(store.list(names.SWEEPS))


def test_a_collection_in_a_directory_uses_file_times(tmp_path: Path) -> None:
    """Young files stay; old ones that are not needed go."""
    store = open_store(str(tmp_path))
    history(store, range(1, 4))  # type: ignore[arg-type]
    assert not collect(store, Retention(), grace=60).objects
    for path in tmp_path.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - 100, time.time() - 100))
    save(store, make_state(SMALL, seed=9), step=9)  # type: ignore[arg-type]
    before = time.time()
    begun = collect(store, Retention(keep_last=1), grace=60, wait=False)
    # A file's time is that of the kernel's last tick.
    assert 60 - (time.time() - before) - 0.1 < begun.waiting <= 60
    for path in (tmp_path / "sweeps").iterdir():
        os.utime(path, (time.time() - 100, time.time() - 100))
    assert collect(store, Retention(keep_last=1), grace=60, wait=False).objects
    assert commit(store, step=9, made_in=1, attempt=0, committed_in=1, world=2).moved
    assert not list(verify(store))
    assert not list(store.list(names.SWEEPS))


@pytest.mark.parametrize("read", ["record", "manifest"])
def test_a_checkpoint_collected_during_open_is_not_reported_as_damaged(tmp_path: Path, read: str) -> None:
    """If `latest` moved on meanwhile it is followed again; a name that is gone is reported as gone."""
    store = LocalStore(tmp_path)
    states = [make_state({"w": ("float32", (8,))}, seed=seed) for seed in (1, 2)]
    save(store, states[0], step=1)
    first = commit(store, step=1, made_in=1, attempt=0, committed_in=1, world=2).checkpoint
    manifest = names.manifest(names.Save(step=1, made_in=1, attempt=0), 0)
    before = manifest if read == "manifest" else names.record(first)

    class Late(LocalStore):
        """Everything else happens before the record is read, or before the first manifest is."""

        def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            if name == before and not self.over:
                self.over = True
                save(store, states[1], step=2)
                commit(store, step=2, made_in=1, attempt=0, committed_in=1, world=2)
                for gone in (names.record(first), manifest):
                    store.delete(gone)
            return super().get(name, start, stop)

        over = False

    assert open_checkpoint(Late(tmp_path)).step == 2
    with pytest.raises(NoCheckpoint):
        open_checkpoint(Late(tmp_path), first)
