"""The supported versions of torch, and the private names of it that are imported."""

from __future__ import annotations

import ast
import tomllib

import pytest

from elastic3d import torch_support
from elastic3d.torch_support import UnsupportedTorch, check_names, check_version
from tests.paths import ROOT


def test_an_unsupported_torch_is_refused_with_what_to_install() -> None:
    """Supported versions pass, whatever build they are."""
    for version in ("2.10.0", "2.13.0+cpu", "2.15.1", "2.14.0a0+git1234", "own"):
        check_version(version)
    check_version()
    for version in ("2.9.1", "1.13.1", "2.16.0", "3.0"):
        with pytest.raises(UnsupportedTorch, match=rf'torch {version} is installed.*pip install "torch>=2\.10,<2\.16"'):
            check_version(version)


def test_the_package_metadata_has_the_same_bounds() -> None:
    """pip refuses what the import would refuse."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    low, high = (f"{major}.{minor}" for major, minor in (torch_support.OLDEST, torch_support.BEYOND))
    assert f"torch>={low},<{high}" in needed


def test_every_imported_private_name_is_listed_and_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without one then causes one error that names it, not an ImportError somewhere."""
    used: dict[str, set[str]] = {}
    for file in [*(ROOT / "elastic3d").rglob("*.py"), *(ROOT / "checkpointing").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                private = any(part.startswith("_") for part in str(node.module).split("."))
                names = {alias.name for alias in node.names if private or alias.name.startswith("_")}
                if names:
                    used.setdefault(str(node.module), set()).update(names)
    listed = torch_support.PRIVATE | torch_support.PRIVATE_TO_INTERCHANGE
    assert used == {module: set(names) for module, names in listed.items()}
    check_names()
    monkeypatch.setitem(torch_support.PRIVATE, "torch.utils._pytree", ("tree_map", "tree_gone"))
    monkeypatch.setitem(torch_support.PRIVATE, "torch._gone", ("x",))
    with pytest.raises(UnsupportedTorch, match=r"torch\.utils\._pytree\.tree_gone, torch\._gone\. Trying again"):
        check_names()
