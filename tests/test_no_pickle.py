"""Nothing from another process is unpickled: anybody who reaches a port could run code."""

from __future__ import annotations

import ast

import pytest

from tests.paths import ROOT
from tests.test_directions import files, imports

OBJECTS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
"""torch's collectives that pickle their input and unpickle what they receive."""

PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}


@pytest.mark.parametrize("package", ["checkpointing", "elastic3d"])
def test_no_collective_carries_objects(package: str) -> None:
    """Tensors and JSON are sent instead."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name}"
        for path in files(package)
        for node in ast.walk(ast.parse(path.read_text()))
        if (name := getattr(node, "attr", getattr(node, "id", getattr(node, "name", "")))) in OBJECTS
        and isinstance(node, ast.Attribute | ast.Name)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_runtime_imports_no_pickle() -> None:
    """What it exchanges with other processes is JSON or plain bytes."""
    wrong = [str(path.relative_to(ROOT)) for path in files("elastic3d") if imports(path) & PICKLES]
    assert not wrong, "\n".join(wrong)
