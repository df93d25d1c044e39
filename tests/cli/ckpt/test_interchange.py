"""Import and export from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from elastic3d.cli.ckpt import app
from elastic3d.cli.ckpt.interchange import CheckpointFormat, guess
from elastic3d.errors import UsageError
from tests.cli.ckpt.conftest import History

run = CliRunner()


def answer(*arguments: str, code: int = 0) -> Any:
    result = run.invoke(app, [*arguments, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(("name", "kind"), [("x.pt", "torch"), ("x.safetensors", "safetensors"), ("x", "dcp")])
def test_an_exported_checkpoint_can_be_imported(name: str, kind: str, history: History, tmp_path: Path) -> None:
    """After the round trip the tensors are the same, in every format."""
    target, store = tmp_path / name, tmp_path / "store"
    done = answer("export", history.url, str(target), "--as", kind, "--of", "300")
    assert (done["kind"], done["tensors"], done["bytes"]) == (kind, 43, 69_304)
    back = answer("import", str(store), str(target), "--step", "7", "--facts", '{"a": 1}')
    assert back["totals"]["bytes"] >= 69_304, "the structure of nested state dicts is kept beside them"
    assert answer("show", str(store), "7")["summary"]["facts"] == {"a": 1}
    for part in ("model/*", "optimizer/*"):
        same = ["diff", str(store), "300", "7", "--other", history.url, "--values", "--match", part, "--quiet"]
        assert run.invoke(app, same).exit_code == 0


def test_export_selects_tensors_and_overwrites_nothing(history: History, tmp_path: Path) -> None:
    """The model alone, under names without a prefix; an existing file stays as it is."""
    target = tmp_path / "model.pt"
    assert run.invoke(app, ["export", history.url, str(target), "--prefix", "model/"]).exit_code == 0
    assert set(torch.load(target, weights_only=True)) >= {"head.weight", "blocks.0.mlp.weight"}
    again = run.invoke(app, ["export", history.url, str(target)])
    assert (again.exit_code, again.stderr.count("\n")) == (2, 1)


def test_the_format_is_recognised_by_name_or_contents(tmp_path: Path) -> None:
    """Otherwise it has to be given."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UsageError, match="--as"):
        guess(folder)
    (folder / "model-00001-of-00002.safetensors").touch()
    assert guess(folder) is CheckpointFormat.SAFETENSORS
    (folder / ".metadata").touch()
    assert guess(folder) is CheckpointFormat.DCP
    assert guess(tmp_path / "x.pth") is CheckpointFormat.TORCH
    with pytest.raises(UsageError, match="--as"):
        guess(tmp_path / "x")


def test_a_failed_import_is_reported_in_one_line(history: History, tmp_path: Path) -> None:
    """Garbage, a name that cannot be kept, facts that are no object or no JSON: nothing is committed."""
    (tmp_path / "garbage.pt").write_bytes(b"garbage")
    torch.save({"a\nb": torch.ones(1)}, tmp_path / "named.pt")
    torch.save({"w": torch.ones(1)}, tmp_path / "good.pt")
    facts = ("[1]", "{", '{"a": NaN}', '{"a": Infinity}', '{"a": 1e999}', r'{"a": "\ud800"}', "[" * 10_000)
    calls = [("garbage.pt", (), 1), ("named.pt", (), 1), *(("good.pt", ("--facts", text), 2) for text in facts)]
    for name, arguments, code in calls:
        result = run.invoke(app, ["import", str(tmp_path / "store"), str(tmp_path / name), *arguments])
        assert (result.exit_code, result.stderr.count("\n")) == (code, 1), (arguments, result.output)
        assert "Traceback" not in result.output
    assert answer("ls", str(tmp_path / "store"))["checkpoints"] == []
