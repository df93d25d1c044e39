"""Saving, committing and restoring through a proxy that disturbs the traffic between client and S3 server."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from chaos.commits.contents import facts, pieces
from chaos.commits.invariants import misread
from chaos.servers.s3 import S3Server, options
from chaos.servers.s3_proxy import ALWAYS, Do, Harm, S3Proxy, s3_proxy
from checkpointing import Store, commit, fence, open_checkpoint, open_store, read_latest, save_rank, verify
from checkpointing.errors import CheckpointError, FormatError, MissingTile, StoreError

pytestmark = [pytest.mark.s3, pytest.mark.long]

T = TypeVar("T")

WORLD = 2
_numbers = itertools.count()


def again(call: Callable[[], T], tries: int = 5) -> T:
    """Call like a patient caller: again after StoreError."""
    for number in range(tries):
        try:
            return call()
        except StoreError:
            if number == tries - 1:
                raise
    raise AssertionError


def save_and_commit(store: Store, step: int) -> None:
    for rank in range(WORLD):
        again(
            lambda rank=rank: save_rank(  # type: ignore[misc]
                store,
                step=step,
                made_in=1,
                attempt=0,
                rank=rank,
                world=WORLD,
                pieces=pieces(1, step, rank, WORLD),
                facts=facts(1, step),
            )
        )
    done = again(lambda: commit(store, step=step, made_in=1, attempt=0, committed_in=1, world=WORLD))
    assert read_latest(store) == done.ref


def opened(server: S3Server, proxy: S3Proxy) -> tuple[Store, Store]:
    """Return a place of its own, opened twice: through the proxy, with its harms removed, and directly."""
    proxy.harms.clear()
    proxy.done.clear()
    url = server.url(f"faults-{next(_numbers)}")
    direct = open_store(url, options=server.options)
    return open_store(url, write=False, options=options(proxy.port)), direct


@pytest.fixture(scope="module")
def proxy(server: S3Server) -> Iterator[S3Proxy]:
    with s3_proxy(server.port, seed=1) as running:
        yield running


WRITES = ["/packs/", "/saves/", "/checkpoints/", "/refs/latest"]


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize("do", [Do.UNANSWERED, Do.REPEAT, Do.ERROR_AFTER, Do.BUSY, Do.REFUSE])
def test_a_disturbed_write_ends_in_one_commit(do: Do, path: str, server: S3Server, proxy: S3Proxy) -> None:
    """Lost answers, repeated requests and 5xx on each kind of object: the checkpoint is committed once, and whole."""
    store, direct = opened(server, proxy)
    fence(store, 1)
    proxy.harms.append(Harm(do=do, method="PUT", path=path))
    save_and_commit(store, 1)
    assert [done.do for done in proxy.done] == [do]
    assert misread(open_checkpoint(direct)) == ""
    assert len(list(direct.list("checkpoints/"))) == 1
    assert not list(verify(direct))


@pytest.mark.parametrize("do", [Do.TRUNCATE, Do.UNANSWERED, Do.BUSY, Do.ERROR, Do.DELAY])
def test_a_disturbed_read_restores_the_same_bits_or_fails(do: Do, server: S3Server, proxy: S3Proxy) -> None:
    """Truncated answers, 5xx and delays while restoring: the bits are right, or an error says why there are none."""
    store, direct = opened(server, proxy)
    fence(direct, 1)
    save_and_commit(direct, 1)
    proxy.harms += [Harm(do=do, method="GET", path=path, times=2) for path in WRITES]
    assert again(lambda: misread(open_checkpoint(store))) == ""
    assert proxy.done


@pytest.mark.parametrize("path", WRITES)
def test_a_bit_flipped_in_a_download_is_never_restored(path: str, server: S3Server, proxy: S3Proxy) -> None:
    """One of the digests between the ref and the tile shows it; read again, the bits are right."""
    store, direct = opened(server, proxy)
    fence(direct, 1)
    save_and_commit(direct, 1)
    proxy.harms.append(Harm(do=Do.FLIP_ANSWER, method="GET", path=path))
    with contextlib.suppress(FormatError, MissingTile, StoreError):
        assert misread(open_checkpoint(store)) == ""
    assert [done.do for done in proxy.done] == [Do.FLIP_ANSWER]
    assert misread(open_checkpoint(store)) == ""


@pytest.mark.parametrize("path", WRITES)
def test_a_bit_flipped_in_an_upload_is_detected(path: str, server: S3Server, proxy: S3Proxy) -> None:
    """Moto checks no checksum. A damaged write is refused or found by the digests, and never restored as good."""
    store, direct = opened(server, proxy)
    fence(direct, 1)
    proxy.harms.append(Harm(do=Do.FLIP_REQUEST, method="PUT", path=path))
    with contextlib.suppress(CheckpointError):
        save_and_commit(store, 1)
        findings = list(verify(direct))
        assert findings or misread(open_checkpoint(direct)) == "", "the damage was not reported"


def test_a_busy_server_is_waited_for(server: S3Server, proxy: S3Proxy) -> None:
    """A save, its commit and a restore complete once the server recovers, and nobody has to call them again."""
    store, direct = opened(server, proxy)
    fence(store, 1)
    for rank in range(WORLD):
        with busy(proxy, 2.0):
            save_rank(
                store,
                step=1,
                made_in=1,
                attempt=0,
                rank=rank,
                world=WORLD,
                pieces=pieces(1, 1, rank, WORLD),
                facts=facts(1, 1),
            )
    with busy(proxy, 2.0):
        commit(store, step=1, made_in=1, attempt=0, committed_in=1, world=WORLD)
    with busy(proxy, 2.0):
        assert misread(open_checkpoint(store)) == ""
    assert len(proxy.done) >= 4
    assert not list(verify(direct))


@contextlib.contextmanager
def busy(proxy: S3Proxy, seconds: float) -> Iterator[None]:
    """Answer 503 to everything for so long during the block."""
    proxy.harms.append(Harm(do=Do.BUSY, times=ALWAYS))
    timer = threading.Timer(seconds, proxy.harms.clear)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_faults_of_every_kind_in_a_row_lose_nothing(server: S3Server, proxy: S3Proxy) -> None:
    """With one fault after another, of every kind, three steps are committed whole."""
    kinds = [Do.UNANSWERED, Do.REPEAT, Do.ERROR, Do.BUSY, Do.ERROR_AFTER, Do.TRUNCATE, Do.REFUSE, Do.DELAY]
    store, direct = opened(server, proxy)
    proxy.harms += [Harm(do=do, skip=skip) for skip, do in enumerate(kinds, 3)]
    again(lambda: fence(store, 1))
    for step in (1, 2, 3):
        save_and_commit(store, step)
    assert len(proxy.done) == len(kinds)
    assert open_checkpoint(direct).step == 3
    assert misread(open_checkpoint(direct)) == ""
    assert not list(verify(direct))
