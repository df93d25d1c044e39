"""What a user may request of a layout, in code and as text."""

from __future__ import annotations

import pytest

from elastic3d.errors import LayoutError
from elastic3d.values import Layout, Schedule


def test_a_request_fixes_some_axes() -> None:
    """The others are free, or as in `Layout()`."""
    assert Layout.parse("pp=2") == Layout(pp=2)
    assert Layout.parse("pp=2, zero=2") == Layout(pp=2, zero=2)
    folded = Layout(pp=2, zero=2, schedule=Schedule.ZBV, virtual=2, cuts=(1, 3, 4))
    assert Layout.parse("pp=2,zero=2,schedule=zbv,virtual=2,cuts=1/3/4") == folded


@pytest.mark.parametrize("wrong", ["pp", "pp=two", "xx=2", "pp=2,pp=4", "zero=4", "", "schedule=fast", "cuts=1/x"])
def test_a_malformed_layout_is_refused(wrong: str) -> None:
    """The message quotes the input and says what is accepted."""
    with pytest.raises(LayoutError, match="layout"):
        Layout.parse(wrong)


def test_a_request_reads_back_from_its_text() -> None:
    """A layout is passed to a script as text."""
    for layout in (
        Layout(),
        Layout(pp=2),
        Layout(zero=2, pp=1, dp=3),
        Layout(pp=2, cuts=(3,), schedule=Schedule.GPIPE),
    ):
        assert Layout.parse(layout.request()) == layout
