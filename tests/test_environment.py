"""Environment variables: one list, used by code and documentation alike."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from checkpointing.stores import keys
from elastic3d import environment
from elastic3d.environment import VARIABLES, SetBy
from elastic3d.rendezvous import guard
from elastic3d.worker.processes.process import TORCHRUN_VARIABLES

ROOT = Path(__file__).parent.parent
NAMES = {variable.name for variable in VARIABLES}
OWN = re.compile(r"ELASTIC3D_[A-Z_]*[A-Z]")
APART = {"elastic3d/environment.py", "elastic3d/rendezvous/guard.py"}
"""The list, and a script that runs without elastic3d, whose one variable is compared below."""


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / "elastic3d").rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def test_our_variables_are_named_only_in_the_list() -> None:
    """Other modules import them from there, so a misspelt name cannot be read unnoticed."""
    wrong = [
        f"{path}:{node.lineno} {node.value}"
        for path, tree in trees()
        if path not in APART
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and OWN.fullmatch(node.value)
    ]
    assert wrong == []


def test_variables_are_read_only_through_the_list() -> None:
    """`os.environ` is written, copied and passed on elsewhere, but only the list reads a name from it."""
    wrong = []
    for path, tree in trees():
        # Set for a moment, for gRPC to read.
        if path in (*APART, "elastic3d/etcd/transport.py"):
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get" | "pop")):
                    wrong.append(f"{path}:{node.lineno}")
                case ast.Subscript(value=ast.Attribute(attr="environ"), ctx=ast.Load()):
                    wrong.append(f"{path}:{node.lineno}")
                case ast.Call(func=ast.Attribute(attr="getenv")):
                    wrong.append(f"{path}:{node.lineno}")
                case _:
                    pass
    assert wrong == []


def test_every_listed_variable_is_used() -> None:
    """Ours by the name of its constant; variables of others are listed because we read them."""
    sources = "\n".join(
        path.read_text() for path in (ROOT / "elastic3d").rglob("*.py") if path.name != "environment.py"
    )
    constants = {name for name, value in vars(environment).items() if isinstance(value, environment.Variable)}
    unused = {name for name in constants if not re.search(rf"environment\.{name}\b", sources)}
    assert unused == {"AGENT"}  # the guard's
    assert len(constants) == len(VARIABLES) == len(NAMES)


def test_modules_that_cannot_import_the_list_agree_with_it() -> None:
    """The guard runs by itself, and checkpointing knows nothing of elastic3d."""
    assert environment.AGENT.name == guard.VARIABLE
    assert environment.STORE_KEY.name == keys.VARIABLE


def test_every_documented_variable_is_listed() -> None:
    """And every variable that users may set is in the documentation, or in the help of the command that takes it."""
    text = "\n".join(path.read_text() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
    chaos = {"ELASTIC3D_CHAOS_RUN", "ELASTIC3D_CLOCK_OFFSET", "ELASTIC3D_ENVIRONMENT_ROOM"}
    assert set(OWN.findall(text)) <= NAMES | chaos
    shown = text + "\n".join(path.read_text() for path in (ROOT / "elastic3d" / "cli").rglob("*.py"))
    for variable in VARIABLES:
        if variable.set_by is SetBy.USER and OWN.fullmatch(variable.name) and variable is not environment.PODINFO:
            constant = next(name for name, value in vars(environment).items() if value is variable)
            assert variable.name in shown or f"environment.{constant}" in shown, variable.name


def test_a_trainer_gets_torchruns_variables_under_listed_names() -> None:
    """Those of them that we read."""
    read = {variable.name for variable in VARIABLES if variable.set_by is SetBy.TORCHRUN}
    assert read - {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= set(TORCHRUN_VARIABLES)
