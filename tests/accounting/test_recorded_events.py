"""Lines of event files as they may be after a crash, or as nobody writes them."""

from __future__ import annotations

import pytest

from elastic3d.accounting.recorded_events import recorded

HUGE = "1" + "0" * 400


@pytest.mark.parametrize("at", [HUGE, f"-{HUGE}", "NaN", "Infinity", "-1", "true", "null", '"1"', "1e12"])
def test_a_line_whose_time_is_none_is_no_event(at: str) -> None:
    """It is passed over, however large the number is."""
    assert recorded(f'{{"event": "step.committed", "at": {at}}}') is None
    assert recorded('{"event": "step.committed", "at": 1.5}') is not None
