"""A register decides for a store that cannot: whoever dies, a decision can be read."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from checkpointing import Retention, Store, collect, commit, fence, open_checkpoint, open_store, read_latest, verify
from checkpointing.errors import Fenced, StoreError, StoreUnfit
from checkpointing.format import names
from checkpointing.retention.protection import pin, pins, tag, tags, untag
from checkpointing.retention.ref_repair import repair_latest
from checkpointing.stores import register as stores_register
from checkpointing.stores.encrypted import EncryptedStore
from checkpointing.stores.keys import Key
from checkpointing.stores.register import RegisteredStore, StoreRegister
from tests.checkpointing.states import SMALL, load, make_state, save, save_and_commit
from tests.checkpointing.stores.flaky import Flaky

_numbers = itertools.count()


@pytest.fixture
def inner() -> Store:
    return open_store(f"memory://registered-{next(_numbers)}/x")


@pytest.fixture
def register() -> StoreRegister:
    return StoreRegister(open_store(f"memory://registered-{next(_numbers)}/register"))


def test_checkpoints_are_decided_by_the_register(inner: Store, register: StoreRegister) -> None:
    """It fences and commits; a reader without it sees the same."""
    store = RegisteredStore(inner, register)
    state = make_state(SMALL)
    fence(store, 1)
    save_and_commit(store, state)
    assert load(open_checkpoint(store))[0] == state
    assert load(open_checkpoint(inner))[0] == state
    assert list(verify(inner)) == []
    assert not list(inner.list("claims/"))


def test_a_place_without_conditional_writes_is_read_without_the_register(
    tmp_path: Path, register: StoreRegister
) -> None:
    """As trainers and the inspection commands read it; it still cannot be swapped there."""
    url = f"local://{tmp_path}"  # fsspec's own name for local files: it has no conditional writes
    state = make_state(SMALL)
    fence(open_store(url, register=register), 1)
    save_and_commit(open_store(url, register=register), state)
    reader = open_store(url, write=False)
    assert load(open_checkpoint(reader))[0] == state
    ref = reader.read(names.LATEST)
    assert ref is not None
    with pytest.raises(StoreUnfit, match="no create-only writes"):
        reader.compare_and_swap(names.LATEST, ref.token, b"swapped")


class OldStore(RegisteredStore):
    """A store as an older version wrote it: every creation is decided in the register."""

    decides_creations = True

    def put_if_absent(self, name: str, data: bytes) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stores_register, "_is_unique", lambda name: False)
            return super().put_if_absent(name, data)


def test_a_register_grows_with_checkpoints_and_not_with_ranks_and_saves(inner: Store) -> None:
    """It holds refs and a record for each kept checkpoint; manifests have unique names."""
    values = open_store(f"memory://registered-{next(_numbers)}/register", write=False)
    store = RegisteredStore(inner, StoreRegister(values))
    for step in range(1, 5):
        save_and_commit(store, make_state(SMALL, seed=step), step=step)
    assert list(values.list("")) == [*inner.list(names.CHECKPOINTS), names.LATEST]
    assert collect(store, Retention(keep_last=2), grace=0, wait=False).dropped
    assert list(values.list("")) == [*inner.list(names.CHECKPOINTS), names.LATEST]
    assert len(list(values.list(""))) == 3


def test_a_store_with_manifests_in_the_register_opens_and_is_collected(inner: Store) -> None:
    """An older version left it so: its checkpoints can be read and used as parents, and in the end all of it goes."""
    values = open_store(f"memory://registered-{next(_numbers)}/register", write=False)
    old, store = (made(inner, StoreRegister(values)) for made in (OldStore, RegisteredStore))
    state = make_state(SMALL, seed=1)
    save_and_commit(old, state, step=1)
    assert list(values.list(names.SAVES))
    opened = open_checkpoint(store)
    assert load(opened)[0] == load(open_checkpoint(inner))[0] == state
    save(store, state, step=2, parent=opened)
    commit(store, step=2, made_in=1, attempt=0, committed_in=1, world=2)
    assert load(open_checkpoint(store))[0] == state
    collect(store, Retention(keep_last=1), grace=0, wait=False)
    assert not list(values.list(names.SAVES))
    assert list(values.list("")) == [*inner.list(names.CHECKPOINTS), names.LATEST]
    assert load(open_checkpoint(store))[0] == state
    assert list(verify(inner)) == []


def test_a_decided_record_is_readable_once_it_is_committed(inner: Store, register: StoreRegister) -> None:
    """Its writer got an error between the two; the commit goes on, and a trainer has no register."""
    store = RegisteredStore(inner, register)
    save(store, make_state(SMALL), step=1)

    class Failing:
        """Refuses to take a record, once."""

        failed = False

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def put(self, name: str, data: Any, *, check: bool = False) -> None:
            if name.startswith(names.CHECKPOINTS) and not self.failed:
                self.failed = True
                raise StoreError("503")
            inner.put(name, data)

    failing: Any = Failing()
    commit(RegisteredStore(failing, register), step=1, made_in=1, attempt=0, committed_in=1, world=2)
    assert failing.failed
    assert load(open_checkpoint(inner))[0] == make_state(SMALL)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_creator_that_dies_leaves_all_or_nothing(inner: Store, register: StoreRegister, done: int) -> None:
    """Until the register is asked the name is free; afterwards it is taken, and the bytes can be read."""
    flaky: Any = Flaky(inner, [*["ok"] * done, "before"], ("put", "delete"))
    with pytest.raises(StoreError):
        RegisteredStore(flaky, register).put_if_absent("refs/x", b"first")
    next_one = RegisteredStore(inner, register)
    assert next_one.put_if_absent("refs/x", b"second") == (done == 0)
    ref = next_one.read("refs/x")
    assert ref is not None
    assert ref.data == next_one.get("refs/x") == (b"second" if done == 0 else b"first")
    assert next_one.size("refs/x") == len(ref.data)


def test_a_repeated_creation_completes_the_first(inner: Store, register: StoreRegister) -> None:
    """The same bytes are put in their place, and nothing is left over."""
    flaky: Any = Flaky(inner, ["ok", "before"], ("put",))
    with pytest.raises(StoreError):
        RegisteredStore(flaky, register).put_if_absent("checkpoints/x", b"first")
    assert list(inner.list("claims/"))
    assert not RegisteredStore(inner, register).put_if_absent("checkpoints/x", b"first")
    assert inner.get("checkpoints/x") == b"first"
    assert not list(inner.list("claims/"))


def test_a_ref_that_another_register_has_decided_is_refused(inner: Store, register: StoreRegister) -> None:
    """As after the loss of an etcd, or where a store has had none: no swap could ever succeed there."""
    fence(RegisteredStore(inner, register), 1)
    empty = StoreRegister(open_store(f"memory://registered-{next(_numbers)}/register"))
    for attempt in (fence, lambda store, _: read_latest(store)):
        with pytest.raises(StoreUnfit, match="the register does not know it"):
            attempt(RegisteredStore(inner, empty), 2)
    ref = read_latest(RegisteredStore(inner, register))
    assert ref is not None
    assert ref.generation == 1


def test_a_first_ref_decided_while_it_is_read_is_no_other_registers(inner: Store, register: StoreRegister) -> None:
    """The register has it by the time the store has."""

    class Early:
        """Another writer decides and publishes between the register's answer and the store's."""

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            RegisteredStore(inner, register).compare_and_swap(name, None, b"1")
            return inner.get(name, start, stop)

    early: Any = Early()
    ref = RegisteredStore(early, register).read(names.LATEST)
    assert ref is not None
    assert RegisteredStore(inner, register).compare_and_swap(names.LATEST, ref.token, b"2")


def restore(values: Store, backup: dict[str, bytes]) -> None:
    """Give a register the values that a backup of it has."""
    for name in list(values.list("")):
        values.delete(name)
    for name, data in backup.items():
        values.put(name, data)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_register_restored_from_a_backup_takes_nothing_back(inner: Store, encrypted: bool) -> None:
    """The published ref is newer then: it goes on from that one, and the generation in it keeps older leaders out."""
    values = open_store(f"memory://registered-{next(_numbers)}/register", write=False)
    decided = RegisteredStore(inner, StoreRegister(values))
    store: Store = EncryptedStore(decided, Key(bytes(32))) if encrypted else decided
    fence(store, 1)
    save_and_commit(store, make_state(SMALL, seed=1), step=1)
    backup = {name: values.get(name) for name in values.list("")}
    fence(store, 2)
    save_and_commit(store, make_state(SMALL, seed=2), step=2, made_in=2)
    restore(values, backup)
    latest = read_latest(store)
    assert latest is not None
    assert (latest.generation, latest.step) == (2, 2)
    with pytest.raises(Fenced, match="generation 2 owns"):
        fence(store, 1)
    assert repair_latest(store) == latest
    fence(store, 3)
    save_and_commit(store, make_state(SMALL, seed=3), step=3, made_in=3)
    latest = read_latest(store)
    assert latest is not None
    assert [name[:12].lstrip("0") for name in latest.committed] == ["3", "2", "1"]
    assert decided.get(names.LATEST) == values.get(names.LATEST).removeprefix(b"whole ")
    assert load(open_checkpoint(store, "2"))[0] == make_state(SMALL, seed=2)


def test_a_register_restored_from_a_backup_takes_back_no_tag_and_no_pin(inner: Store) -> None:
    """Where nothing but these has changed since the backup: what they keep would be collected."""
    values = open_store(f"memory://registered-{next(_numbers)}/register", write=False)
    store = RegisteredStore(inner, StoreRegister(values))
    save_and_commit(store, make_state(SMALL, seed=1), step=1)
    save_and_commit(store, make_state(SMALL, seed=2), step=2)
    tag(store, "first", "1")
    backup = {name: values.get(name) for name in values.list("")}
    tag(store, "best", "1")
    untag(store, "first")
    pin(store, "2", "evaluation")
    latest = read_latest(store)
    restore(values, backup)
    assert read_latest(store) == latest
    assert not collect(store, Retention(keep_last=1), grace=0).dropped
    assert tags(store).keys() == {"best"}
    assert list(pins(store).values()) == ["evaluation"]


def test_a_commit_asked_for_again_leaves_the_record_that_the_register_forgot(inner: Store) -> None:
    """The ref has the digest of the first one; another in its place could not be read any more."""
    values = open_store(f"memory://registered-{next(_numbers)}/register", write=False)
    store = RegisteredStore(inner, StoreRegister(values))
    fence(store, 1)
    backup = {name: values.get(name) for name in values.list("")}
    save_and_commit(store, make_state(SMALL), step=1)
    restore(values, backup)
    assert not commit(store, step=1, made_in=1, attempt=0, committed_in=1, world=2).moved
    assert load(open_checkpoint(inner))[0] == make_state(SMALL)


def test_a_published_copy_that_is_late_or_damaged_does_not_count(inner: Store, register: StoreRegister) -> None:
    """The register is right where it has gone on, or where the copy says nothing."""
    store = RegisteredStore(inner, register)
    fence(store, 1)
    older = inner.get(names.LATEST)
    fence(store, 2)
    for copy in (older, older[:-1], b""):
        inner.put(names.LATEST, copy)
        latest = read_latest(store)
        assert latest is not None
        assert latest.generation == 2
    inner.delete(names.LATEST)
    assert read_latest(store) == latest


def test_a_record_is_there_while_its_creator_tidies_up(inner: Store, register: StoreRegister) -> None:
    """The creator puts the bytes under their name and removes the claim between two looks of a reader."""

    class Between:
        """Lets the creation be finished before the claim is looked for."""

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            if name.startswith(names.CLAIMS):
                RegisteredStore(inner, register).put_if_absent("checkpoints/x", b"first")
            return inner.get(name, start, stop)

    flaky: Any = Flaky(inner, ["ok", "before"], ("put",))
    with pytest.raises(StoreError):
        RegisteredStore(flaky, register).put_if_absent("checkpoints/x", b"first")
    between: Any = Between()
    there = RegisteredStore(between, register).read("checkpoints/x")
    assert there is not None
    assert there.data == b"first"


def test_a_deletion_that_is_cut_short_leaves_no_claim_without_bytes(inner: Store, register: StoreRegister) -> None:
    """The name could neither be read nor created again."""
    store = RegisteredStore(inner, register)
    assert store.put_if_absent("checkpoints/x", b"first")

    class Cut:
        """A register that is away when something is to be deleted."""

        def __getattr__(self, name: str) -> Any:
            return getattr(register, name)

        def delete(self, name: str) -> None:
            raise StoreError("away")

    cut: Any = Cut()
    with pytest.raises(StoreError, match="away"):
        RegisteredStore(inner, cut).delete("checkpoints/x")
    there = store.read("checkpoints/x")
    assert there is not None
    store.delete("checkpoints/x")
    assert store.read("checkpoints/x") is None
    assert store.put_if_absent("checkpoints/x", b"second")


def test_claims_of_dead_creators_are_collected_after_a_day(tmp_path: Path, register: StoreRegister) -> None:
    """Decided or not; younger ones may be all that there is of a record, and other names are somebody else's."""
    inner = open_store(str(tmp_path))
    store = RegisteredStore(inner, register)
    save_and_commit(store, make_state(SMALL), step=1)
    for done, name in ((1, "checkpoints/decided"), (0, "checkpoints/undecided")):
        flaky: Any = Flaky(inner, [*["ok"] * done, "after"], ("put",))
        with pytest.raises(StoreError):
            RegisteredStore(flaky, register).put_if_absent(name, b"x")
    inner.put("claims/notes", b"mine")
    assert len(list(inner.list(names.CLAIMS))) == 3
    collect(store, Retention(), grace=0.0)
    assert len(list(inner.list(names.CLAIMS))) == 3
    for path in (tmp_path / "claims").iterdir():
        os.utime(path, (0, 0))
    collect(store, Retention(), grace=0.0)
    assert list(inner.list(names.CLAIMS)) == ["claims/notes"]
    assert load(open_checkpoint(store))[0] == make_state(SMALL)


def test_a_swap_counts_once_the_register_has_it(inner: Store, register: StoreRegister) -> None:
    """Even if the store did not take it; the next swap brings the store up to date."""
    store = RegisteredStore(inner, register)
    assert store.compare_and_swap("refs/latest", None, b"1")
    ref = store.read("refs/latest")
    assert ref is not None
    flaky: Any = Flaky(inner, ["before"], ("put",))
    assert RegisteredStore(flaky, register).compare_and_swap("refs/latest", ref.token, b"2")
    ref = store.read("refs/latest")
    assert ref is not None
    assert (ref.data, inner.get("refs/latest")) == (b"2", b"1")
    assert store.compare_and_swap("refs/latest", ref.token, b"3")
    assert inner.get("refs/latest") == b"3"


class Busy(LocalFileSystem):  # type: ignore[misc]
    """Local files; the newest ref is refused as often as was said."""

    protocol = "busy"
    refusals = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("busy://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if path.endswith(names.LATEST) and Busy.refusals:
            Busy.refusals -= 1
            raise ConnectionResetError("busy")
        super().pipe_file(path, value, mode, **options)


def test_a_copy_that_a_busy_place_refuses_is_put_again(
    tmp_path: Path, register: StoreRegister, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: it may be of the last commit of a job, and whoever has no register would never see that."""
    fsspec.register_implementation("busy", Busy)
    store = open_store(f"busy://{tmp_path}", register=register)
    save_and_commit(store, make_state(SMALL, seed=1), step=1)
    monkeypatch.setattr(Busy, "refusals", 2)
    save_and_commit(store, make_state(SMALL, seed=2), step=2)
    assert Busy.refusals == 0
    assert read_latest(open_store(f"busy://{tmp_path}", write=False)) == read_latest(store)


def test_a_late_publisher_does_not_leave_an_old_ref(inner: Store, register: StoreRegister) -> None:
    """It reads the register again after writing, and writes what that says."""
    store = RegisteredStore(inner, register)
    assert store.compare_and_swap("refs/latest", None, b"1")

    class Late:
        """Lets another swap pass between the register's answer and the publication of the first."""

        passed = False

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def put(self, name: str, data: Any, *, check: bool = False) -> None:
            if not self.passed:
                self.passed = True
                ref = store.read("refs/latest")
                assert ref is not None
                assert store.compare_and_swap("refs/latest", ref.token, b"3")
            inner.put(name, data)

    late: Any = Late()
    ref = store.read("refs/latest")
    assert ref is not None
    assert RegisteredStore(late, register).compare_and_swap("refs/latest", ref.token, b"2")
    assert inner.get("refs/latest") == b"3"


def test_a_ref_too_large_for_a_register_is_refused(inner: Store, register: StoreRegister) -> None:
    """With a clear message, before etcd would refuse it in the middle of a commit."""
    with pytest.raises(StoreError, match="collect garbage"):
        RegisteredStore(inner, register).compare_and_swap("refs/latest", None, bytes((1 << 20) + 1))
