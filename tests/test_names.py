"""One name, one class: a search for a name finds one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.paths import ROOT


@pytest.mark.parametrize("package", ["elastic3d", "checkpointing"])
def test_public_class_names_are_unique_within_a_package(package: str) -> None:
    """Whatever module they are in; names that begin with an underscore are private to a module."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
