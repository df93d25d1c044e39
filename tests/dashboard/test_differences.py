"""What changed from one document to the next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic3d.dashboard.differences import apply, difference

VALUES = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers() | st.none(), max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(st.text(max_size=2), VALUES, max_size=5)


@given(DOCUMENTS, DOCUMENTS)
def test_a_patch_makes_the_new_document_of_the_old(old: dict[str, object], new: dict[str, object]) -> None:
    """And is empty only if they are equal."""
    patch = difference(old, new)
    assert apply(patch, old) == new
    assert not difference(new, new)
    assert bool(patch) or old == new


def test_only_what_changed_is_sent() -> None:
    """One row of a table, not the table; null for a row that is gone."""
    old = {"nodes": {"rows": {"a": "1", "b": "2", "c": "3"}, "order": ["a", "b", "c"]}, "title": "x"}
    new = {"nodes": {"rows": {"a": "1", "b": "9"}, "order": ["a", "b"]}, "title": "x"}
    assert difference(old, new) == {"nodes": {"rows": {"b": "9", "c": None}, "order": ["a", "b"]}}
