"""checkpointing is a library of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import checkpointing


def test_checkpointing_imports_nothing_of_elastic3d_and_prints_nothing() -> None:
    """No module names elastic3d, chaos, etcd, collectives or pickle, and none prints."""
    for path in Path(checkpointing.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported: list[str] = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", path
            for name in imported:
                assert name.split(".")[0] not in {"elastic3d", "chaos", "pickle", "grpc"}, path
                assert not name.startswith("torch.distributed"), path
