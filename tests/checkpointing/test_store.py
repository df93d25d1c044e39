"""Stores, and places that cannot be one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkpointing import Store, open_store
from checkpointing.errors import StoreError, StoreNotFound, StoreUnfit

_numbers = itertools.count()


@pytest.fixture(params=["local", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    urls = {
        "local": str(tmp_path / "a" / "b"),
        "file": f"file://{tmp_path}/c",
        "memory": f"memory://store-{next(_numbers)}/x",
    }
    return open_store(urls[request.param])


def test_objects_come_back(store: Store) -> None:
    """Whole, by ranges, by size and by listing; absent ones raise."""
    store.put("packs/ab/x.pack", [b"hello", memoryview(b" wor"), b"ld"])
    store.put("packs/cd/y.pack", b"")
    assert store.get("packs/ab/x.pack") == b"hello world"
    assert store.get("packs/ab/x.pack", 3, 8) == b"lo wo"
    assert store.get("packs/ab/x.pack", 9, 99) == b"ld"
    assert store.get("packs/ab/x.pack", 4, 4) == b""
    assert (store.size("packs/ab/x.pack"), store.size("packs/cd/y.pack")) == (11, 0)
    assert list(store.list("")) == ["packs/ab/x.pack", "packs/cd/y.pack"]
    assert list(store.list("packs/a")) == ["packs/ab/x.pack"]
    assert list(store.list("nothing/")) == []
    store.put("packs/ab/x.pack", b"other")
    assert store.get("packs/ab/x.pack") == b"other"
    store.delete("packs/ab/x.pack")
    store.delete("packs/ab/x.pack")
    assert store.read("packs/ab/x.pack") is None
    for ask in (store.get, store.size):
        with pytest.raises(StoreNotFound):
            ask("packs/ab/x.pack")


def test_conditional_writes(store: Store) -> None:
    """Created once; swapped only by who knows the present token."""
    assert store.put_if_absent("a", b"1")
    assert not store.put_if_absent("a", b"2")
    first = store.read("a")
    assert first is not None
    assert not store.compare_and_swap("a", None, b"2")
    assert store.compare_and_swap("a", first.token, b"2")
    assert not store.compare_and_swap("a", first.token, b"3")
    assert not store.compare_and_swap("b", first.token, b"3")
    assert store.get("a") == b"2"
    assert store.compare_and_swap("b", None, b"4")


def test_swaps_from_many_threads_lose_none(store: Store) -> None:
    """A counter that is only swapped counts every success; of those who try at once, one succeeds."""
    store.put("n", b"0")

    def add(_: int) -> int:
        won = 0
        for _ in range(20):
            found = store.read("n")
            assert found is not None
            won += store.compare_and_swap("n", found.token, str(int(found.data) + 1).encode())
        return won

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(add, range(4))) == int(store.get("n")) >= 20


@pytest.mark.parametrize("name", ["../x", "a/../b", "/etc/passwd", "", "a//b", "a/", ".", "a\0b", "a b"])
def test_names_cannot_leave_the_store(store: Store, name: str) -> None:
    """Only plain relative names are objects."""
    with pytest.raises(ValueError, match="not the name"):
        store.put(name, b"x")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "give a directory"),
        (" /tmp/x", "give a directory"),
        ("s3:/bucket/x", "'://'"),
        ("file://relative", "absolute path"),
        ("nonsense://x", "nonsense"),
        ("/dev/null/x", "cannot be written"),
        ("/proc/x", "cannot be written"),
    ],
)
def test_unfit_places_say_what_to_change(url: str, message: str) -> None:
    """A wrong URL or an unwritable place is refused when it is opened."""
    with pytest.raises(StoreUnfit, match=message) as raised:
        open_store(url)
    assert raised.value.exit_code == 2


def test_reading_does_not_make_a_directory(tmp_path: Path) -> None:
    """A mistyped path is an error, not an empty store."""
    with pytest.raises(StoreUnfit, match="no such directory"):
        open_store(str(tmp_path / "typo"), write=False)
    assert not (tmp_path / "typo").exists()


def test_a_place_without_conditional_writes_is_refused(tmp_path: Path) -> None:
    """A protocol that could not fence an old leader is named as such."""
    with pytest.raises(StoreUnfit, match="no create-only writes"):
        open_store(f"local://{tmp_path}/x")


def limited(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )


def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    """A user who may not write is told so."""
    (tmp_path / "theirs").mkdir(mode=0o555)
    code = """
import os, sys
from checkpointing import open_store
import checkpointing.stores.local, checkpointing.stores.fsspec
from checkpointing.errors import StoreUnfit
if os.geteuid() == 0:
    os.setuid(65534)
try:
    open_store(sys.argv[1])
except StoreUnfit as error:
    print(error)
"""
    done = limited(code, str(tmp_path / "theirs"))
    assert "Permission denied" in done.stdout, done.stderr


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """A write that does not fit raises StoreError; neither the object nor a scratch file is there after it."""
    code = """
import resource, signal, sys
from checkpointing import open_store
from checkpointing.errors import StoreError
store = open_store(sys.argv[1])
store.put("small", b"x")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    store.put("large", [bytes(1 << 15)] * 4)
except StoreError as error:
    print(error)
"""
    done = limited(code, str(tmp_path))
    assert "cannot write large" in done.stdout, done.stderr
    store = open_store(str(tmp_path))
    assert list(store.list("")) == ["small"]
    assert not list((tmp_path / "tmp").iterdir())
    with pytest.raises(StoreError):
        store.get("large")
