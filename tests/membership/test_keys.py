"""The etcd keys of a run: built and parsed in one place, and stable over versions."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d import etcd_keys as keys

ROOT = Path(__file__).parents[2]
NAMES = st.from_regex(r"[A-Za-z0-9._:@-]{1,20}", fullmatch=True)
MANY: dict[str, Callable[[str], str]] = {
    keys.MEMBERS: keys.member,
    keys.REPORTS: keys.report,
    keys.DRAINS: keys.drain,
    keys.QUARANTINE: keys.quarantine,
    keys.FLAPS: keys.flap,
    keys.TOMBS: keys.tomb,
    keys.DOUBTS: keys.doubt,
}


@pytest.mark.parametrize("kind", MANY)
@given(name=NAMES, run=NAMES)
def test_keys_parse_back_to_their_parts(kind: str, name: str, run: str) -> None:
    """Below any root."""
    root = f"/elastic3d/{run}/"
    assert keys.split(root, root + MANY[kind](name)) == (kind, name)


def test_a_single_record_is_not_one_of_many() -> None:
    """It has no name, although its key begins like theirs."""
    for key in (keys.LEADER, keys.GENERATION, keys.PROPOSAL, keys.END, keys.SECRET):
        assert keys.split("/r/", "/r/" + key) == (key, "")
    assert keys.split("/r/", "/r/roll/members") != (keys.MEMBERS, "")


def test_keys_are_stable() -> None:
    """Nodes of two versions share them."""
    assert [build("x") for build in MANY.values()] == [
        *("roll/members/x", "roll/reports/x", "roll/drains/x", "roll/quarantine/x", "roll/flaps/x"),
        *("board/tombs/x", "board/doubts/x"),
    ]
    assert (keys.pulse("a@1"), keys.refused("a")) == ("pulses/a@1", "refused/a")
    assert (keys.history(7, 2), keys.history_of(7)) == ("history/0000000007.2", "history/0000000007.")
    assert keys.whole("/board/r/board/generation") == "/board/r/board.whole/generation"
    assert (keys.LEADER, keys.END, keys.SECRET) == ("board/leader", "board/end", "board/secret")


def test_no_other_module_spells_a_key() -> None:
    """In the runtime or the simulators; documentation may."""
    spelled = re.compile(r"(^|/)(board|roll)(\\.whole)?/")
    wrong = []
    for path in sorted([*(ROOT / "elastic3d").rglob("*.py"), *(ROOT / "chaos").rglob("*.py")]):
        if path.name == "etcd_keys.py":
            continue
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in prose else None
            if isinstance(text, str) and spelled.search(text):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {text}")
    assert wrong == []
