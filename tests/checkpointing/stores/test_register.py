"""A register decides for a store that cannot: whoever dies, a decision can be read."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from checkpointing import Retention, Store, collect, commit, fence, open_checkpoint, open_store, read_latest, verify
from checkpointing.errors import StoreError, StoreUnfit
from checkpointing.format import names
from checkpointing.stores import register as stores_register
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
