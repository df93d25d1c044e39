"""Checkpoints in a store without conditional writes, decided in a real etcd."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos.servers.etcd import EtcdServer
from checkpointing import commit, fence, open_checkpoint, open_store, read_latest
from checkpointing.errors import Fenced, StoreError
from checkpointing.format import names
from checkpointing.retention.protection import tags
from checkpointing.stores.local import LocalStore
from checkpointing.stores.register import RegisteredStore
from elastic3d.cli import ckpt
from elastic3d.etcd import EtcdClient
from elastic3d.etcd_refs import EtcdRegister
from elastic3d.planner.shares import MeshSizes
from tests.cli.ckpt import scenes
from tests.worker.checkpoints.test_committer import write

pytestmark = pytest.mark.etcd


class Plain(LocalStore):
    """A store with unconditional writes only."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        raise AssertionError(name)

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        raise AssertionError(name)


@pytest.fixture
def registers(server: EtcdServer, request: pytest.FixtureRequest) -> Iterator[list[EtcdRegister]]:
    """Two registers of one store, as two leaders would have."""
    prefix = f"/{request.node.name}"
    made = [EtcdRegister(EtcdClient(server.endpoints), prefix, url) for url in ("dumb://x", "dumb://x/")]
    yield made
    for register in made:
        register.close()


def test_of_many_concurrent_creators_one_succeeds(registers: list[EtcdRegister]) -> None:
    """Whichever cluster member they ask."""
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: registers[n % 2].create("a", b"%d" % n), range(16)))
    assert sum(made) == 1
    stored = registers[0].read("a")
    assert stored is not None
    assert stored.data == b"%d" % made.index(True)


def test_a_swap_needs_the_newest_token(registers: list[EtcdRegister]) -> None:
    """An old one, or that of a value which was deleted and created again, changes nothing."""
    one, other = registers
    assert one.create("a", b"1")
    first = one.read("a")
    assert first is not None
    assert other.swap("a", first.token, b"2")
    assert not one.swap("a", first.token, b"3")
    assert not one.swap("a", "bytes 00", b"3")
    assert not one.swap("nothing", "0", b"3")
    one.delete("a")
    one.delete("a")
    assert other.read("a") is None
    assert one.create("a", b"1")
    assert not other.swap("a", first.token, b"4")


def test_an_older_leader_is_fenced_by_the_register(registers: list[EtcdRegister], tmp_path: Path) -> None:
    """Commits go to a store that could not decide, and readers without a register read them from it."""
    one, other = (RegisteredStore(Plain(tmp_path), register) for register in registers)
    fence(one, 1)
    write(one, 5)
    assert commit(one, step=5, made_in=1, attempt=0, committed_in=1, world=1).moved
    fence(other, 2)
    write(one, 6)
    with pytest.raises(Fenced):
        commit(one, step=6, made_in=1, attempt=0, committed_in=1, world=1)
    assert commit(other, step=6, made_in=1, attempt=0, committed_in=2, world=1).moved
    bystander = LocalStore(tmp_path, create=False)
    assert open_checkpoint(bystander).step == 6
    latest = read_latest(one)
    assert latest is not None
    assert latest.generation == 2


def test_the_command_line_decides_by_the_register(server: EtcdServer, tmp_path: Path) -> None:
    """It tags what the job then sees, and is refused where it names another register than the job's."""
    url, prefix = str(tmp_path / "run"), "/test/commands"
    with EtcdClient(server.endpoints) as client:
        store = open_store(url, register=EtcdRegister(client, prefix, url))
        scenes.save(store, 100, MeshSizes())
        command = ["--register", f"etcd://{server.endpoint}{prefix}"]
        done = CliRunner().invoke(ckpt.app, ["tag", url, "best", "100", *command])
        assert done.exit_code == 0, done.output
        assert tags(store).keys() == {"best"}
        LocalStore(Path(url), create=False).put(names.LATEST, b"damaged")
        assert "best" in CliRunner().invoke(ckpt.app, ["tag", url, *command]).stdout
        other = CliRunner().invoke(ckpt.app, ["tag", url, "worst", "100", *command[:1], f"{command[1]}/other"])
        assert (other.exit_code, "the register does not know it" in other.stderr) == (2, True), other.output
        assert tags(store).keys() == {"best"}


def test_an_unavailable_etcd_is_a_store_error(one_binary: Path, tmp_path: Path) -> None:
    """The error says so; code that waits for the store waits for etcd."""
    with EtcdServer(binary=one_binary) as server:
        register = EtcdRegister(EtcdClient(server.endpoints, timeout=0.2, budget=0.4), "/p", "dumb://x")
        assert register.create("a", b"1")
    with pytest.raises(StoreError, match="register in etcd: cannot read a"):
        register.read("a")
    register.close()
