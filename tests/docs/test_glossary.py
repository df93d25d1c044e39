"""The glossary lists each term once, with the module that defines it."""

from __future__ import annotations

import importlib.util
import re

from tests.paths import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"


def terms() -> list[tuple[str, str]]:
    """Return each term and its module."""
    return re.findall(r"^\| ([^|]+) \| `([\w.]+)` \|", GLOSSARY.read_text(), re.MULTILINE)


def test_each_term_has_one_row() -> None:
    """One word, one meaning."""
    names = [name for row, _ in terms() for name in row.split(", ")]
    assert len(names) > 50
    assert sorted(names) == sorted(set(names))


def test_each_module_of_the_glossary_exists() -> None:
    """A module that is renamed is renamed in the glossary too."""
    gone = [(term, module) for term, module in terms() if not importlib.util.find_spec(module)]
    assert gone == []
