"""Where the demo's checkpoints go."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.commands.demo import store_url


def test_a_relative_folder_is_relative_to_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes run elsewhere and would not take a relative path for a URL; a URL is left unchanged."""
    monkeypatch.chdir(tmp_path)
    assert store_url("demo/store") == (tmp_path / "demo" / "store").as_uri()
    assert store_url("s3://bucket/run") == "s3://bucket/run"
