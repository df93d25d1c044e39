"""What the commands do about a store whose refs a register decides."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpointing import open_store, read_latest
from checkpointing.retention.protection import tag
from checkpointing.stores.register import StoreRegister
from elastic3d.cli.ckpt import app
from elastic3d.planner.shares import MeshSizes
from tests.cli.ckpt import scenes

run = CliRunner()


@pytest.fixture
def registered(tmp_path: Path) -> tuple[str, StoreRegister]:
    """A store with two checkpoints, and its register."""
    register = StoreRegister(open_store(str(tmp_path / "register")))
    store = open_store(str(tmp_path / "run"), register=register)
    for step in (100, 200):
        scenes.save(store, step, MeshSizes())
    return str(tmp_path / "run"), register


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("words", [["tag", "best", "100"], ["pin", "100"], ["gc", "--keep-last", "1"], ["repair"]])
def test_nothing_is_written_beside_a_register(
    words: list[str], damaged: bool, registered: tuple[str, StoreRegister]
) -> None:
    """The job would not see it, and write over it: a tag would be lost, and what it keeps be collected."""
    url, register = registered
    if damaged:
        open_store(url).put("refs/latest", b"damaged")
    before = read_latest(open_store(url, register=register))
    result = run.invoke(app, [words[0], url, *words[1:]])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "give the job's etcd, --register etcd://HOST:PORT" in result.stderr
    assert read_latest(open_store(url, register=register)) == before


def test_an_import_is_not_written_beside_a_register(registered: tuple[str, StoreRegister], tmp_path: Path) -> None:
    """It is a commit as any other."""
    exported = str(tmp_path / "x.safetensors")
    assert run.invoke(app, ["export", registered[0], exported]).exit_code == 0
    result = run.invoke(app, ["import", registered[0], exported, "--step", "300"])
    assert (result.exit_code, "--register" in result.stderr) == (2, True), result.output


def test_what_no_register_decides_any_more_is_written_to(registered: tuple[str, StoreRegister]) -> None:
    """A copy of such a store, or one whose jobs are over; and it is read without a word."""
    url, register = registered
    tag(open_store(url, register=register), "first", "100")
    assert "first" in run.invoke(app, ["tag", url]).stdout
    assert run.invoke(app, ["tag", url, "best", "200", "--register", "none"]).exit_code == 0
    ref = read_latest(open_store(url))
    assert ref is not None
    assert ref.tags.keys() == {"first", "best"}


@pytest.mark.parametrize(
    "text", ["etcd", "e1:2379", "etcd://", "etcd://e1:2379?users=x", "etcd://e1:2379?x", "http://e1"]
)
def test_text_that_names_no_register_is_refused(text: str, tmp_path: Path) -> None:
    """With the form that is wanted, before anything is asked."""
    result = run.invoke(app, ["ls", str(tmp_path), "--register", text])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "give etcd://HOST:PORT" in result.stderr


@pytest.mark.parametrize("text", ["etcd://e1:2379?user=x", "etcd://e1:2379/a b", "etcd://e1:23x9"])
def test_a_register_that_cannot_be_is_refused(text: str, tmp_path: Path) -> None:
    """In one line that says what is wrong with it."""
    result = run.invoke(app, ["ls", str(tmp_path), "--register", text])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"--register {text!r}: --" in result.stderr
