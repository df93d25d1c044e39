"""What `health=` may say about audits."""

from __future__ import annotations

import pytest

from elastic3d.errors import UsageError
from elastic3d.health.options import Health, watching


@pytest.mark.parametrize(
    ("given", "share"), [("off", 0.0), ("1%", 0.01), ("0.5 %", 0.005), (0.02, 0.02), (0, 0.0), ("100%", 1.0)]
)
def test_a_budget_is_a_share_of_the_computing(given: float | str, share: float) -> None:
    """In percent or as a number."""
    read = watching(Health(audit=given))
    assert read is not None
    assert read.audit == pytest.approx(share)


@pytest.mark.parametrize("given", ["often", "1", "101%", 1.5, -0.1, True, "-1%", None])
def test_what_is_no_share_is_refused(given: object) -> None:
    """Where it enters, and by its name."""
    with pytest.raises(UsageError, match="audit="):
        Health(audit=given)  # type: ignore[arg-type]


def test_nothing_is_audited_unless_it_is_asked_for() -> None:
    """Audits cost computing."""
    read = watching("on")
    assert read is not None
    assert read.audit == 0.0
