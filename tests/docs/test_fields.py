"""Every field has a docstring: people read these classes as settings, results and JSON."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import checkpointing
import elastic3d

MODULES = (
    "chaos.report.random_documents",
    "elastic3d.accounting.clock_offsets",
    "elastic3d.accounting.goodput",
    "elastic3d.cli.ckpt.documents",
    "elastic3d.cli.islands_documents",
    "elastic3d.cli.plan.documents",
    "elastic3d.cli.samples_documents",
    "elastic3d.doctor.findings",
    "elastic3d.health.explanation",
    "elastic3d.membership.inspection.status",
    "elastic3d.membership.policy",
    "elastic3d.rendezvous.settings",
)
"""Modules whose dataclasses users see, beside those that the packages export."""


def shown() -> list[type]:
    """Return the dataclasses that users see."""
    public = [getattr(package, name) for package in (checkpointing, elastic3d) for name in package.__all__]
    for name in MODULES:
        public += [one for one in vars(importlib.import_module(name)).values() if _of(one, name)]
    return [one for one in public if isinstance(one, type) and dataclasses.is_dataclass(one)]


def _of(one: object, module: str) -> bool:
    return isinstance(one, type) and one.__module__ == module


@pytest.mark.parametrize("one", shown(), ids=lambda one: one.__name__)
def test_each_field_has_a_docstring(one: type) -> None:
    """Right below it, where editors and the reference find it."""
    source = Path(inspect.getfile(one)).read_text()
    body = next(
        node.body
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == one.__name__
    )
    silent = [
        field.target.id
        for field, below in zip(body, [*body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and not field.target.id.startswith("_")
        and not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant))
    ]
    assert silent == []


@pytest.mark.parametrize("call", [elastic3d.run, elastic3d.Run.shard], ids=["run", "shard"])
def test_each_parameter_has_a_line_of_its_own(call: Callable[..., object]) -> None:
    """In the order of the signature, with its default unless it is required."""
    lines = re.findall(r"^    (\w+): ", inspect.cleandoc(call.__doc__ or ""), re.MULTILINE)
    names = [name for name in inspect.signature(call).parameters if name != "self"]
    assert [line for line in lines if line in names] == names
