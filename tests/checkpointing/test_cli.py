"""`ckpt ls` and `ckpt verify`."""

from __future__ import annotations

import json
from pathlib import Path

from states import SMALL, make_state, save_and_commit
from typer.testing import CliRunner

from checkpointing import fence, open_store
from elastic3d.cli.ckpt import app

run = CliRunner()


def test_ls_lists_committed_checkpoints_newest_first(tmp_path: Path) -> None:
    """As a table, and as JSON with the same contents."""
    store = open_store(str(tmp_path))
    names = [save_and_commit(store, make_state(SMALL, seed=step), step=step).checkpoint for step in (1, 2)]
    fence(store, 3)
    result = run.invoke(app, ["ls", str(tmp_path), "--json"])
    assert result.exit_code == 0
    listed = json.loads(result.stdout)
    assert listed["generation"] == 3
    assert [row["checkpoint"] for row in listed["checkpoints"]] == names[::-1]
    assert [row["latest"] for row in listed["checkpoints"]] == [True, False]
    assert listed["checkpoints"][0]["bytes"] == 120 + 14 + 4 + 96
    table = run.invoke(app, ["ls", str(tmp_path)])
    assert table.exit_code == 0
    assert "latest" in table.stdout


def test_verify_exits_1_with_findings(tmp_path: Path) -> None:
    """A healthy store is ok; a flipped byte is named, and the exit code says so."""
    store = open_store(str(tmp_path))
    save_and_commit(store, make_state(SMALL))
    assert run.invoke(app, ["verify", str(tmp_path)]).exit_code == 0
    path = next(tmp_path.glob("packs/*/*.pack"))
    data = bytearray(path.read_bytes())
    data[9] ^= 4
    path.write_bytes(data)
    result = run.invoke(app, ["verify", str(tmp_path), "--json"])
    assert result.exit_code == 1
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["pack"] == path.stem
    assert finding["tensor"].startswith("model/")
    table = run.invoke(app, ["verify", str(tmp_path)])
    assert table.exit_code == 1
    assert "corrupt" in table.stdout


def test_bad_input_exits_2_and_help_has_examples(tmp_path: Path) -> None:
    """A wrong place is the user's to change; help shows how to call."""
    for command in ("ls", "verify"):
        assert run.invoke(app, [command, str(tmp_path / "none")]).exit_code == 2
        assert run.invoke(app, [command, "nonsense://x"]).exit_code == 2
        assert run.invoke(app, [command]).exit_code == 2
        help_text = run.invoke(app, [command, "--help"])
        assert help_text.exit_code == 0
        assert f"elastic3d ckpt {command}" in help_text.stdout
    assert run.invoke(app, ["ls", str(tmp_path)]).exit_code == 0
