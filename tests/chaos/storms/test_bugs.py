"""The table of bugs that real jobs have shown."""

from __future__ import annotations

import re

import pytest

from chaos.storms.bugs import FOUND, RealBug
from tests.paths import ROOT


@pytest.mark.parametrize("bug", FOUND, ids=[bug.met for bug in FOUND])
def test_each_is_played_again_by_a_test_that_is_there(bug: RealBug) -> None:
    """A story by its file, all others by their function."""
    file, _, function = bug.test.partition("::")
    text = (ROOT / "tests" / file).read_text()
    assert not function or re.search(rf"^def {function}\(", text, re.MULTILINE)
