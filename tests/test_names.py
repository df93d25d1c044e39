"""One name, one class: a search for a name finds one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.paths import ROOT

VAGUE = ("found", "told")


@pytest.mark.parametrize("package", ["elastic3d", "checkpointing"])
def test_public_class_names_are_unique_within_a_package(package: str) -> None:
    """Whatever module they are in; names that begin with an underscore are private to a module."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("package", ["elastic3d", "checkpointing", "chaos", "tools"])
def test_locals_say_what_they_hold(package: str) -> None:
    """ "found" and "told" say how a value came, and not what it is."""
    vague = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Name) and node.id in VAGUE)
        or (isinstance(node, ast.arg) and node.arg in VAGUE)
        or (isinstance(node, ast.ExceptHandler) and node.name in VAGUE)
    }
    assert vague == set()
