"""Stores, and places that cannot be one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_contract import StoreContract

from checkpointing import Store, open_store
from checkpointing.errors import StoreError, StoreUnfit
from checkpointing.stores.keys import Key
from checkpointing.stores.register import StoreRegister

_numbers = itertools.count()


class TestStores(StoreContract):
    """The contract, where no server is needed."""

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
