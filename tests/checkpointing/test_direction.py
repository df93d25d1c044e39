"""checkpointing is a library of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import checkpointing


def test_checkpointing_imports_nothing_of_elastic3d_and_prints_nothing() -> None:
    """No module names elastic3d, chaos, etcd or collectives, none prints, and only one package uses pickle."""
    for path in Path(checkpointing.__file__).parent.rglob("*.py"):
        strange = {"elastic3d", "chaos", "grpc"} | (set() if path.parent.name == "interchange" else {"pickle"})
        for node in ast.walk(ast.parse(path.read_text())):
            imported: list[str] = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", path
            for name in imported:
                assert name.split(".")[0] not in strange, path
                assert not name.startswith("torch.distributed") or name.startswith("torch.distributed.checkpoint"), path
