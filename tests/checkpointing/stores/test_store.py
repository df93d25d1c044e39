"""Stores, and places that cannot be one."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointing import Store, open_store
from checkpointing.errors import StoreError, StoreUnfit
from checkpointing.stores.keys import Key
from checkpointing.stores.probing import probe
from checkpointing.stores.register import StoreRegister
from tests.checkpointing.stores.store_contract import StoreContract

_numbers = itertools.count()


class TestStores(StoreContract):
    """The contract for stores that need no server."""

    @pytest.fixture(params=["local", "file", "memory", "encrypted", "registered"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Store:
        if request.param == "encrypted":
            return open_store(f"memory://store-{next(_numbers)}/x", key=Key.generate())
        if request.param == "registered":
            # fsspec's own name for local files: it has no conditional writes.
            register = StoreRegister(open_store(f"memory://store-{next(_numbers)}/register"))
            return open_store(f"local://{tmp_path}/d", register=register)
        urls = {
            "local": str(tmp_path / "a" / "b"),
            "file": f"file://{tmp_path}/c",
            "memory": f"memory://store-{next(_numbers)}/x",
        }
        return open_store(urls[request.param])


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
def test_unfit_places_are_refused_with_what_to_change(url: str, message: str) -> None:
    """A wrong URL or an unwritable place is refused when it is opened."""
    with pytest.raises(StoreUnfit, match=message) as raised:
        open_store(url)
    assert raised.value.exit_code == 2


def test_reading_does_not_create_a_directory(tmp_path: Path) -> None:
    """A mistyped path is an error, not an empty store."""
    with pytest.raises(StoreUnfit, match="no such directory"):
        open_store(str(tmp_path / "typo"), write=False)
    assert not (tmp_path / "typo").exists()


def test_a_place_without_conditional_writes_is_refused(tmp_path: Path) -> None:
    """By name: the protocol could not fence an old leader there."""
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
    """The message says so to a user who may not write."""
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
    """A write that does not fit raises StoreFull, and leaves neither the object nor a scratch file."""
    code = """
import resource, signal, sys
from checkpointing import open_store
from checkpointing.errors import StoreFull
store = open_store(sys.argv[1])
store.put("small", b"x")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    store.put("large", [bytes(1 << 15)] * 4)
except StoreFull as error:
    print(error)
"""
    done = limited(code, str(tmp_path))
    assert "cannot write large" in done.stdout, done.stderr
    store = open_store(str(tmp_path))
    assert list(store.list("")) == ["small"]
    assert not list((tmp_path / "tmp").iterdir())
    with pytest.raises(StoreError):
        store.get("large")


@pytest.mark.parametrize("before", [b"", b"old"])
def test_a_small_object_is_whole_where_files_are_written_in_place(tmp_path: Path, before: bytes) -> None:
    """Whoever reads has the old one, or none, if its writer ends in the middle; nothing else is left."""
    code = """
import os, resource, signal, sys
from checkpointing import open_store
from checkpointing.errors import StoreError
store = open_store(sys.argv[1], write=False, patience=0.0)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    store.put("refs/latest", os.urandom(1 << 17))
except StoreError as error:
    print(error)
"""
    url = f"local://{tmp_path}/x"  # fsspec's own name for local files: it writes them in place, as over SFTP
    store = open_store(url, write=False)
    if before:
        store.put("refs/latest", before)
    done = limited(code, url)
    assert "cannot write refs/latest" in done.stdout, done.stderr
    assert {name: store.get(name) for name in store.list("")} == ({"refs/latest": before} if before else {})


def test_a_large_object_is_renamed_within_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the protocol has its temporary files may be another file system, from which a rename fails over SFTP."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    store = open_store(f"local://{tmp_path}/x", write=False)
    block = bytes(1 << 20)

    def blocks(number: int) -> Iterator[memoryview]:
        for _ in range(number):
            yield memoryview(block)
        assert list(store.list("packs/")) == []
        yield memoryview(b"end")
        if number > 20:
            raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        store.put("packs/large", blocks(21))
    assert list(store.list("")) == []
    store.put("packs/large", blocks(20))
    assert (list(store.list("")), store.size("packs/large")) == (["packs/large"], (20 << 20) + 3)


class Lying:
    """A store that accepts a request and does something else."""

    def __init__(self, inner: Store, **lies: Any) -> None:
        self._inner, self._lies = inner, lies

    def __getattr__(self, name: str) -> Any:
        if name in self._lies:
            return functools.partial(self._lies[name], self._inner)
        return getattr(self._inner, name)


def _overwrite(inner: Store, name: str, data: bytes) -> bool:
    inner.put(name, data)
    return True


def _swap_anyhow(inner: Store, name: str, expected: str | None, data: bytes) -> bool:
    inner.put(name, data)
    return True


@pytest.mark.parametrize(
    ("lies", "promise"),
    [
        ({"put_if_absent": _overwrite}, "create-only writes"),
        ({"put_if_absent": lambda inner, name, data: True}, "create-only writes"),
        ({"compare_and_swap": _swap_anyhow}, "compare-and-swap"),
        ({"compare_and_swap": lambda inner, name, expected, data: True}, "compare-and-swap"),
        ({"get": lambda inner, name, start=0, stop=None: inner.get(name)}, "ranges"),
        ({"entries": lambda inner, prefix: iter(())}, "listings"),
        ({"delete": lambda inner, name: None}, "deletions"),
    ],
)
def test_a_misbehaving_store_is_detected(lies: dict[str, Any], promise: str) -> None:
    """By a probe: conditions it ignores, ranges it serves whole, late listings, failed deletes."""
    lying: Any = Lying(open_store(f"memory://lying-{next(_numbers)}/x"), **lies)
    with pytest.raises(StoreUnfit, match=f"does not honour.*{promise}"):
        probe(lying)


def test_a_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    """The place is as it was before."""
    assert list(open_store(str(tmp_path / "x")).list("")) == []


def test_secrets_in_a_url_are_not_repeated() -> None:
    """Neither in errors nor as the store's url."""
    for url in ("s3://AKID:hushhush@bucket/x", "nonsense://me:hushhush@host/x?sig=hushhush", "s3:/AKID:hushhush@b"):
        with pytest.raises(StoreUnfit) as raised:
            open_store(url)
        assert "hushhush" not in str(raised.value)


def test_a_key_encrypts_the_whole_store(tmp_path: Path) -> None:
    """open_store wraps whatever is at the URL in encryption."""
    store = open_store(str(tmp_path), key=Key.generate())
    store.put("packs/x", b"hello")
    assert store.get("packs/x") == b"hello"
    assert b"hello" not in (tmp_path / "packs" / "x").read_bytes()
