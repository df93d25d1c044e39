"""Real stores: directories, one without conditional writes, and S3; nothing is left in any of them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

import chaos.servers.s3
from chaos.servers.s3_proxy import ALWAYS, Do, Harm, s3_proxy
from checkpointing import open_store
from checkpointing.errors import StoreDenied, StoreFull, StoreUnfit, StoreUnreachable
from elastic3d.doctor import store
from elastic3d.doctor.findings import FindingStatus
from elastic3d.doctor.running import CheckRun, Stopped
from elastic3d.doctor.store import StoreFacts
from tests.doctor.looks import named, statuses, under_way


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth is measured for a moment only."""
    monkeypatch.setattr(store, "SECONDS", 0.05)
    monkeypatch.setattr(store, "PATIENCE", 0.5)


def look(url: str, run: CheckRun | None = None) -> StoreFacts:
    facts = StoreFacts(url=url)
    run = run or under_way()
    store.measure(facts, run)
    assert run.made == ()
    return facts


def test_a_directory(tmp_path: Path) -> None:
    """It is as it was; what was measured is all there."""
    (tmp_path / "packs").mkdir()
    facts = look(str(tmp_path))
    assert (facts.stopped, facts.whole, facts.creates, facts.swaps, facts.unfit) == (None, True, True, True, "")
    assert facts.writes is not None
    assert facts.reads is not None
    assert facts.clock is not None
    assert abs(facts.clock.offset) <= facts.clock.within + 1
    assert [path.name for path in tmp_path.rglob("*")] == ["packs"]


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """Where it would be is tried out."""
    facts = look(f"file://{tmp_path}/a/b")
    assert facts.directory is not None
    assert (facts.directory.there, facts.directory.inside) == (False, str(tmp_path))
    assert facts.stopped is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    """Also where it is a dangling link."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/below", "link"):
        facts = look(str(tmp_path / name))
        assert isinstance(facts.stopped, StoreUnfit)
        assert "is no directory" in str(facts.stopped)


def test_a_directory_that_nobody_may_write_to() -> None:
    """Not even root makes folders in /proc."""
    facts = look("/proc/checkpoints")
    finding = named(store.judge(facts, register=False), "reach")
    assert finding.status is FindingStatus.FAILURE
    assert "/proc" in finding.seen
    assert "doctor" not in finding.seen


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """What was begun is removed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, before[1]))
    try:
        facts = look(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(facts.stopped, StoreFull)
    assert facts.small is not None
    assert list(tmp_path.iterdir()) == []


def test_who_gives_up_leaves_nothing(tmp_path: Path) -> None:
    """In the middle of the bandwidth."""

    class Impatient(CheckRun):
        def go_on(self, doing: str = "") -> None:
            if doing.startswith("reading"):
                assert any(path.is_file() for path in tmp_path.rglob("*"))
                self.stop()
            super().go_on(doing)

    own = under_way()
    run = Impatient(own.check, own.limit, own._clock)
    with pytest.raises(Stopped):
        store.measure(StoreFacts(url=str(tmp_path)), run)
    assert run.made == ()
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_write_on_conditions(tmp_path: Path) -> None:
    """It keeps checkpoints only where etcd decides."""
    facts = look(f"local://{tmp_path}/store")
    assert (facts.stopped, facts.whole) == (None, True)
    assert statuses(store.judge(facts, register=False))["conditional writes"] is FindingStatus.FAILURE
    assert FindingStatus.FAILURE not in statuses(store.judge(facts, register=True)).values()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_garbage_for_a_url() -> None:
    """Is told, not tried."""
    for url in ("s3:bucket", "nonsense://x", "file://relative", " "):
        assert isinstance(look(url).stopped, StoreUnfit)


@pytest.fixture(scope="module")
def server() -> Iterator[chaos.servers.s3.S3Server]:
    with chaos.servers.s3.s3_server() as server:
        yield server


def at(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn everything to a server as users do."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.mark.s3
def test_s3(server: chaos.servers.s3.S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a bucket can do is seen, and it is empty afterwards."""
    at(server.port, monkeypatch)
    facts = look(server.url("whole"))
    assert (facts.stopped, facts.whole, facts.creates, facts.swaps, facts.unfit) == (None, True, True, True, "")
    assert facts.writes is not None
    assert facts.clock is not None
    assert list(open_store(server.url("whole"), options=server.options).entries("")) == []

    class Impatient(CheckRun):
        def go_on(self, doing: str = "") -> None:
            if doing.startswith("reading"):
                self.stop()
            super().go_on(doing)

    own = under_way()
    run = Impatient(own.check, own.limit, own._clock)
    with pytest.raises(Stopped):
        store.measure(StoreFacts(url=server.url("given-up")), run)
    assert run.made == ()
    assert list(open_store(server.url("given-up"), options=server.options).entries("")) == []


@pytest.mark.s3
def test_s3_that_ignores_conditions_or_refuses(
    server: chaos.servers.s3.S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is told for what it is."""
    with s3_proxy(server.port) as wire:
        at(wire.port, monkeypatch)
        wire.harms.append(Harm(do=Do.STRIP, method="PUT", times=ALWAYS))
        facts = look(server.url("ignores"))
        assert (facts.stopped, facts.creates) == (None, False)
        wire.harms[:] = [Harm(do=Do.DENY, times=ALWAYS)]
        assert isinstance(look(server.url("refuses")).stopped, StoreDenied)
        wire.harms.clear()
    assert list(open_store(server.url("ignores"), options=server.options).entries("")) == []


@pytest.mark.s3
def test_s3_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was written, so that nothing is said to be left."""
    at(1, monkeypatch)
    facts = look("s3://bucket/away")
    assert isinstance(facts.stopped, StoreUnreachable)
