"""Where the demo's checkpoints go."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.cli import store_url


def test_a_folder_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes run elsewhere, and took a relative path for no URL at all; a URL stays what it is."""
    monkeypatch.chdir(tmp_path)
    assert store_url("demo/store") == (tmp_path / "demo" / "store").as_uri()
    assert store_url("s3://bucket/run") == "s3://bucket/run"
