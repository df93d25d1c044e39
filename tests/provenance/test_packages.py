"""Versions of what a process has imported, by the distribution that it is from."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from elastic3d.provenance import packages

ASK = """
import sys
{imports}
from elastic3d.provenance import packages
print(*sorted(set(packages.distributions().values())))
"""


def asked(imports: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(imports=imports)], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_distributions_are_found_by_their_modules() -> None:
    """Also where they have another name; what was not imported is not named."""
    assert {"grpcio", "attrs"} <= asked("import grpc, attr")
    assert not {"grpcio", "attrs", "torch"} & asked("")


def test_nothing_is_looked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of no distribution is remembered as such: looking through all of them takes longer than all else."""
    first = packages.distributions()
    monkeypatch.setattr(metadata, "distributions", lambda: pytest.fail("looked through all distributions again"))
    assert packages.distributions(first) == first


def test_a_folder_of_pip_target_counts_as_installed(tmp_path: Path) -> None:
    """Machines without a package index have all in such a folder: none of that is the user's code."""
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "__init__.py").write_text("")
    info = tmp_path / "a_thing-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-thing\nVersion: 1.5\n")
    (info / "RECORD").write_text("thing/__init__.py,,\n")
    assert "a-thing" in asked(f"sys.path.insert(0, {str(tmp_path)!r}); import thing")


def test_versions_are_bounded() -> None:
    """Python, torch and elastic3d are always there, and how many others are not is said."""
    found, left_out = packages.versions(["numpy", "torch", *(f"x{number}" for number in range(packages.MOST))])
    assert list(found)[:3] == ["python", "elastic3d", "torch"]
    assert found["numpy"] == metadata.version("numpy")
    assert (len(found), left_out) == (3 + packages.MOST, 1)
