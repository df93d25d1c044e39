"""A directory as a store under bad conditions: strangers hold locks, locks do not hold, writers sleep."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from chaos.commits.contents import facts, pieces
from chaos.commits.invariants import misread
from checkpointing import (
    Key,
    Retention,
    Store,
    collect,
    commit,
    fence,
    open_checkpoint,
    open_store,
    read_latest,
    save_rank,
    verify,
)
from checkpointing.errors import NewerFormat, StoreDenied, StoreError, StoreNotFound
from checkpointing.format import names
from checkpointing.format.refs import decode_ref
from checkpointing.retention.protection import tags
from checkpointing.stores import local
from checkpointing.stores.numbered import KEPT, append, newest, swap
from tests.paths import DATA

OLD = DATA / "stores"
KEY = Key(bytes(range(32)))


def save_and_commit(store: Store, step: int) -> None:
    for rank in range(2):
        save_rank(
            store,
            step=step,
            made_in=1,
            attempt=0,
            rank=rank,
            world=2,
            pieces=pieces(1, step, rank, 2),
            facts=facts(1, step),
        )
    commit(store, step=step, made_in=1, attempt=0, committed_in=1, world=2)


class Numbers:
    """Versions in memory. before_link: what others do at the last moment."""

    def __init__(self, **before: Any) -> None:
        self.there: dict[int, bytes] = {0: b"first"}
        self.before_link = before.get("link", lambda: None)

    def numbers(self) -> Iterable[int]:
        return [number for number in self.there if number]

    def open(self, number: int) -> bytes | None:
        return self.there.get(number)

    def link(self, number: int, data: bytes) -> bool:
        act, self.before_link = self.before_link, lambda: None
        act()
        return self.there.setdefault(number, data) is data

    def remove(self, number: int) -> None:
        self.there.pop(number, None)


def token(versions: Numbers) -> str:
    current = newest(versions, "x")
    assert current is not None
    return current[1].token


def test_one_of_two_swaps_wins() -> None:
    """The one that took the number first."""
    versions = Numbers()
    seen = token(versions)
    assert swap(versions, seen, b"mine", "x")
    assert not swap(versions, seen, b"late", "x")
    seen = token(versions)
    versions.before_link = lambda: append(versions, 2, b"theirs", "x")
    assert not swap(versions, seen, b"later", "x")
    assert versions.there[2] == b"theirs"


@pytest.mark.parametrize("others", [1, KEPT - 1, KEPT, KEPT + 1, 3 * KEPT])
def test_a_writer_that_slept_never_claims_to_have_won(others: int) -> None:
    """Its number may be free again after others came and went; their swap counts."""
    versions = Numbers()

    def overtake() -> None:
        for number in range(1, others + 1):
            assert append(versions, number, b"theirs %d" % number, "x")

    seen, versions.before_link = token(versions), overtake
    if others <= KEPT:
        assert not swap(versions, seen, b"mine", "x")  # its number is still taken
    else:
        with pytest.raises(StoreError, match="Read it and decide anew"):
            swap(versions, seen, b"mine", "x")
    current = newest(versions, "x")
    assert current is not None
    assert current[1].data == b"theirs %d" % others
    assert len(versions.there) <= KEPT + 2


def test_a_winner_that_is_overtaken_at_once_knows_that_it_won() -> None:
    """As long as its number can still be seen among the last ones."""

    class Slow(Numbers):
        def numbers(self) -> Iterable[int]:
            if 1 in self.there and len(self.there) < KEPT:
                self.there.update((number, b"later") for number in range(2, KEPT))
            return super().numbers()

    versions = Slow()
    assert swap(versions, token(versions), b"mine", "x")


def test_a_lock_held_by_a_stranger_delays_nobody(tmp_path: Path) -> None:
    """Anybody who can read a file can lock it for ever: here every file there is."""
    save_and_commit(open_store(str(tmp_path)), 1)
    (tmp_path / "lock").touch()
    code = """
import fcntl, pathlib, sys
held = [open(path) for path in pathlib.Path(sys.argv[1]).rglob("*") if path.is_file()]
for file in held:
    fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "held\n"
        store = open_store(str(tmp_path))
        fence(store, 1)
        save_and_commit(store, 2)
        stranger.communicate()
    assert open_checkpoint(store).step == 2


@pytest.mark.parametrize("error", [None, OSError(95, "Operation not supported")])
def test_swaps_are_safe_without_working_locks(
    error: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a mount that grants every lock, or has none, the second of two leaders is refused."""

    def flock(descriptor: int, operation: int) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(fcntl, "flock", flock)
    old, new = open_store(str(tmp_path)), open_store(str(tmp_path))
    fence(old, 1)
    current = old.read("refs/latest")
    assert current is not None

    honest = os.link

    def link(source: str, target: Any) -> None:
        monkeypatch.setattr(os, "link", honest)
        fence(new, 2)  # between the old leader's read and its write
        honest(source, target)

    monkeypatch.setattr(os, "link", link)
    assert not old.compare_and_swap("refs/latest", current.token, b"the old leader's")
    ref = read_latest(new)
    assert ref is not None
    assert ref.generation == 2


@pytest.mark.parametrize(("name", "key"), [("plain-v1", None), ("encrypted-v1", KEY)])
def test_a_store_of_an_older_version_can_be_read_and_written(name: str, key: Key | None, tmp_path: Path) -> None:
    """With all its contents; afterwards older software is kept out, since it would read an old ref."""
    shutil.copytree(OLD / name, tmp_path / "store")
    url = str(tmp_path / "store")
    reader = open_store(url, write=False, key=key)
    assert misread(open_checkpoint(reader)) == ""
    store = open_store(url, key=key)
    assert not list(verify(store))
    assert (open_checkpoint(store).step, list(tags(store))) == (2, ["good"])
    save_and_commit(store, 3)
    for name in ("1", "2", "3"):
        assert misread(open_checkpoint(store, name)) == ""
    assert not list(verify(store))
    assert [entry.name for entry in store.entries("refs/")] == ["refs/latest"]
    with pytest.raises(NewerFormat, match="upgrade"):
        decode_ref((tmp_path / "store" / "refs" / "latest").read_bytes(), "refs/latest")
    assert open_checkpoint(reader).step == 3


def test_a_swapped_object_behaves_like_any_other(tmp_path: Path) -> None:
    """It is read, listed, replaced and deleted under its name, and only some of its versions stay."""
    store = open_store(str(tmp_path))
    assert store.put_if_absent("a/b", b"0")
    for number in range(1, 3 * KEPT):
        stored = store.read("a/b")
        assert stored is not None
        assert store.compare_and_swap("a/b", stored.token, b"%d" % number)
    last = b"%d" % (3 * KEPT - 1)
    assert (store.get("a/b"), store.size("a/b"), store.get("a/b", 0, 1)) == (last, len(last), last[:1])
    assert [(entry.name, entry.size) for entry in store.entries("")] == [("a/b", len(last))]
    assert len(list((tmp_path / "versions" / "a" / "b").iterdir())) <= KEPT
    store.put("a/b", b"put")
    assert (store.get("a/b"), store.put_if_absent("a/b", b"x")) == (b"put", False)
    store.delete("a/b")
    assert store.read("a/b") is None
    assert list(store.list("")) == []
    assert store.put_if_absent("a/b", b"again")


def test_a_listing_walks_only_its_folder(tmp_path: Path) -> None:
    """Thousands of packs cost a listing of refs nothing, as an unreadable folder shows."""
    store = open_store(str(tmp_path))
    store.put("refs/latest", b"1")
    store.put("packs/ab/x", b"1")
    walked = []
    sys.addaudithook(lambda event, given: walked.append(str(given[0])) if event == "os.scandir" else None)
    assert list(store.list("refs/l")) == ["refs/latest"]
    assert list(store.list("nothing/here")) == []
    assert list(store.list("../x")) == []
    assert not [path for path in walked if path.startswith(str(tmp_path)) and "packs" in path]


def test_a_group_can_share_a_directory(tmp_path: Path) -> None:
    """Files have the modes that the user's umask leaves, and no file has to be written by two users."""
    before = os.umask(0o002)
    try:
        store = open_store(str(tmp_path / "x"))
        fence(store, 1)
        fence(store, 2)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "x").rglob("*")}
    assert modes == {0o775, 0o664}


def test_a_scratch_file_of_another_machine_is_left_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of another machine mean nothing here; a writer whose file was removed is told to write again."""
    store = open_store(str(tmp_path))
    foreign = tmp_path / "tmp" / "0123456789ab-00"
    foreign.write_bytes(b"x")
    open_store(str(tmp_path))
    assert foreign.exists()
    os.utime(foreign, (0, 0))
    open_store(str(tmp_path))
    assert not foreign.exists()

    honest = os.link

    def link(source: str, target: Any) -> None:
        os.unlink(source)
        honest(source, target)

    monkeypatch.setattr(local.os, "link", link)
    with pytest.raises(StoreError, match="write it again"):
        store.put_if_absent("x", b"1")


def test_files_with_names_of_no_object_are_left_alone(tmp_path: Path) -> None:
    """A folder that only root may enter, and a copy that a person made, stop neither checks nor collections."""
    store = open_store(str(tmp_path))
    fence(store, 1)
    save_and_commit(store, 1)
    sealed = tmp_path / "lost+found"
    sealed.mkdir(mode=0o000)
    (tmp_path / "packs" / "notes (copy).txt").write_bytes(b"mine")
    (tmp_path / "my notes").mkdir()
    (tmp_path / "my notes" / "x").write_bytes(b"mine")
    try:
        assert list(verify(store)) == []
        assert collect(store, Retention(), grace=0.0).dropped == ()
    finally:
        sealed.chmod(0o700)
    assert (tmp_path / "packs" / "notes (copy).txt").exists()


def test_a_folder_beside_the_store_that_may_not_be_entered_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another user who keeps notes there. One of the store's own must not look empty."""
    store = open_store(str(tmp_path))
    fence(store, 1)
    save_and_commit(store, 1)
    (tmp_path / "private").mkdir()
    sealed = [tmp_path / "private"]
    honest = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path) in sealed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return honest(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert list(verify(store)) == []
    assert collect(store, Retention(), grace=0.0).dropped == ()
    with pytest.raises(StoreDenied, match="check its permissions"):
        list(store.list("private/"))
    for own in ("packs", "packs/ab"):
        (tmp_path / own).mkdir(exist_ok=True)
        sealed[:] = [tmp_path / own]
        with pytest.raises(StoreDenied, match="check its permissions"):
            list(verify(store))


def test_a_link_beside_the_store_to_where_nobody_may_look_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is somebody else's; a pack that may not even be looked at is not taken for none."""
    store = open_store(str(tmp_path))
    fence(store, 1)
    save_and_commit(store, 1)
    (tmp_path / "data").write_bytes(b"theirs")
    sealed = [tmp_path / "data"]
    honest = os.stat

    def stat_(path: Any, *given: Any, **named: Any) -> os.stat_result:
        if isinstance(path, Path) and path in sealed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return honest(path, *given, **named)

    monkeypatch.setattr(os, "stat", stat_)
    deny(monkeypatch, *sealed)
    assert list(verify(store)) == []
    assert collect(store, Retention(), grace=0.0).dropped == ()
    sealed[:] = [tmp_path / next(store.list("packs/"))]
    deny(monkeypatch, *sealed)
    with pytest.raises(StoreDenied, match="check its permissions"):
        list(store.entries(""))


def test_folders_of_a_store_may_be_links(tmp_path: Path) -> None:
    """As of packs that were moved to a larger disk: what is read through a link must be listed through it."""
    store = open_store(str(tmp_path / "store"))
    fence(store, 1)
    save_and_commit(store, 1)
    before = list(store.entries(""))
    shutil.move(tmp_path / "store" / "packs", tmp_path / "moved")
    (tmp_path / "store" / "packs").symlink_to(tmp_path / "moved")
    first = next((tmp_path / "moved").iterdir())
    shutil.move(first, tmp_path / "apart")
    first.symlink_to(tmp_path / "apart")
    (tmp_path / "moved" / "above").symlink_to(tmp_path)
    (tmp_path / "moved" / "again").symlink_to(tmp_path / "moved")
    (tmp_path / "store" / "data").symlink_to(tmp_path / "store" / "saves")
    assert list(store.entries("")) == before
    assert list(verify(store)) == []


def deny(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let nobody read these files, as their modes would for anybody but root."""
    honest = os.open

    def open_(path: Any, *given: Any, **named: Any) -> int:
        if Path(path) in paths:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return honest(path, *given, **named)

    monkeypatch.setattr(os, "open", open_)


def test_an_announcement_that_may_not_be_read_stops_collections_while_it_is_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is a dead process's, and goes like any other."""
    store = open_store(str(tmp_path))
    fence(store, 1)
    save_and_commit(store, 1)
    theirs = names.announcement("ab" * 16)
    store.put(theirs, b"of a reader with another umask")
    deny(monkeypatch, tmp_path / theirs)
    with pytest.raises(StoreDenied, match="check its permissions"):
        collect(store, Retention(), grace=0.0)
    os.utime(tmp_path / theirs, (0, 0))
    collect(store, Retention(), grace=0.0)
    assert list(store.list(names.ANNOUNCEMENTS)) == []


def test_a_file_that_may_not_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is listed, and collected like any other; whoever needs its bytes is told that they may not be read."""
    store = open_store(str(tmp_path))
    fence(store, 1)
    save_and_commit(store, 1)
    theirs = "packs/ab/" + "ab" * 32 + ".pack"
    store.put(theirs, b"theirs")
    os.mkfifo(tmp_path / "packs" / "pipe")
    deny(monkeypatch, tmp_path / theirs, tmp_path / "packs" / "pipe")
    assert {entry.name: entry.size for entry in store.entries("packs/")}[theirs] == len(b"theirs")
    assert "packs/pipe" not in {entry.name for entry in store.entries("")}
    with pytest.raises(StoreDenied, match="check its permissions"):
        store.get(theirs)
    assert [doomed.name for doomed in collect(store, Retention(), grace=0.0).objects] == [theirs]
    assert list(verify(store)) == []


def test_a_pipe_with_the_name_of_an_object_holds_up_nobody(tmp_path: Path) -> None:
    """Who opened it as a file would wait for somebody to write to it, for ever."""
    store = open_store(str(tmp_path))
    fence(store, 1)
    save_and_commit(store, 1)
    for folder in ("packs", "checkpoints", "refs", "tmp", "versions"):
        os.mkfifo(tmp_path / folder / "pipe")
    assert list(verify(store)) == []
    assert collect(open_store(str(tmp_path)), Retention(), grace=0.0).dropped == ()
    assert store.read("refs/pipe") is None
    assert not [entry for entry in store.entries("") if entry.name.endswith("pipe")]
    with pytest.raises(StoreNotFound):
        store.get("packs/pipe")


def test_a_mount_without_locks_opens_while_others_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process's scratch file, of which nobody can tell whether its writer lives, is left for a day."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    open_store(str(tmp_path))
    scratch = tmp_path / "tmp" / f"{local._machine()}-00"
    scratch.write_bytes(b"half a pack")
    open_store(str(tmp_path))
    assert scratch.exists()
    os.utime(scratch, (0, 0))
    open_store(str(tmp_path))
    assert not scratch.exists()
