"""One name, one class: who searches for a name finds what it means."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.paths import ROOT


@pytest.mark.parametrize("package", ["elastic3d", "checkpointing"])
def test_no_two_public_classes_of_a_package_have_one_name(package: str) -> None:
    """Whatever module they are in; names that begin with an underscore are a module's own."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
