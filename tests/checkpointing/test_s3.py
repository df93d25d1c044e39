"""Checkpoints on a real S3 server, spoken to over HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from states import SMALL, load, make_state, save, save_and_commit

import checkpointing.stores.fsspec
from checkpointing import Store, commit, fence, open_checkpoint, open_store, verify
from checkpointing.errors import Fenced, StoreUnfit

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        given = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"}
        import s3fs

        s3fs.S3FileSystem(**given).mkdir("bucket")
        yield given
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def store(options: dict[str, Any], request: pytest.FixtureRequest) -> Store:
    return open_store(f"s3://bucket/{request.node.name}", options=options)


def test_checkpoints_on_s3(store: Store) -> None:
    """Save, commit, restore, fence and verify, as on a disk."""
    state = make_state(SMALL)
    fence(store, 1)
    first = save_and_commit(store, state)
    assert load(open_checkpoint(store))[0] == state
    save(store, make_state(SMALL, seed=1), step=2)
    assert fence(store, 2).checkpoint == first.checkpoint
    with pytest.raises(Fenced):
        commit(store, step=2, made_in=1, attempt=0, committed_in=1, world=2)
    commit(store, step=2, made_in=1, attempt=0, committed_in=2, world=2)
    assert load(open_checkpoint(store))[0] == make_state(SMALL, seed=1)
    assert list(verify(store)) == []


def test_conditions_are_kept_on_s3(store: Store) -> None:
    """Created once; swapped only by who knows the present token."""
    assert store.put_if_absent("a", b"1")
    assert not store.put_if_absent("a", b"2")
    first = store.read("a")
    assert first is not None
    assert store.compare_and_swap("a", first.token, b"2")
    assert not store.compare_and_swap("a", first.token, b"3")
    assert not store.compare_and_swap("b", first.token, b"3")
    assert store.get("a") == b"2"
    assert store.read("b") is None


def test_a_pack_larger_than_a_part_is_uploaded_in_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks become parts of one object, which is not there before it is whole."""
    monkeypatch.setattr(checkpointing.stores.fsspec, "_BLOCK", 5 << 20)
    blocks = [os.urandom(4 << 20) for _ in range(4)]
    store.put("packs/large", iter(blocks))
    assert store.size("packs/large") == 16 << 20
    assert store.get("packs/large", (4 << 20) - 3, (4 << 20) + 3) == blocks[0][-3:] + blocks[1][:3]


def test_a_bucket_that_is_not_there_is_named(options: dict[str, Any]) -> None:
    """The message names the store and what S3 said."""
    with pytest.raises(StoreUnfit, match="s3://nowhere"):
        open_store("s3://nowhere/x", options=options)
