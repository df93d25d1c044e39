"""The wheel has all that is needed, and nothing that is only in a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.paths import ROOT

BUILD = """\
import sys
from setuptools import build_meta
build_meta.build_wheel(sys.argv[1])
"""

IMPORT = """\
import sys
from pathlib import Path
import chaos.commands.demo, checkpointing, elastic3d
assert callable(elastic3d.run)
for package in (chaos, checkpointing, elastic3d):
    home = Path(package.__file__).parent
    assert home.is_relative_to(sys.prefix), home
    assert (home / "py.typed").exists(), home
assert (Path(checkpointing.__file__).parent / "format.md").exists()
assert (Path(elastic3d.__file__).parent / "dashboard" / "page.html").exists()
from elastic3d.scaffold import files, places
for place in places.Place:
    for one in places.templates(place, with_etcd=True):
        assert (files.HOME / one.source).is_file() and not (files.HOME / one.source).parent.is_symlink(), one
"""


def run(*command: object, folder: Path) -> str:
    """Run a command to its end, with nothing of this checkout on its path, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_wheel_works_with_only_its_dependencies_installed(tmp_path: Path) -> None:
    """Built and installed without a network; the dependencies are those of the environment that runs the tests."""
    source, bare = tmp_path / "source", tmp_path / "bare"
    # A copy: a build leaves folders beside the sources, and reuses those of older builds.
    # With its links: what `elastic3d init` writes lies in deploy/.
    for name in ("elastic3d", "checkpointing", "chaos", "deploy"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-c", BUILD, tmp_path, folder=source)
    (wheel,) = tmp_path.glob("*.whl")

    venv.create(bare, with_pip=False)
    python = bare / "bin" / "python"
    install = [sys.executable, "-m", "uv", "pip", "install", "--offline", "--no-deps", "--no-index"]
    run(*install, "--python", python, wheel, folder=tmp_path)
    # Behind its own packages, and without the .pth files there, one of which leads back to this checkout.
    own = Path(sysconfig.get_path("purelib", vars={"base": str(bare)}))
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    version = run(python, "-c", "from importlib.metadata import version; print(version('elastic3d'))", folder=tmp_path)
    assert run(bare / "bin" / "elastic3d", "--version", folder=tmp_path) == f"elastic3d {version}"
    run(python, "-c", IMPORT, folder=tmp_path)
