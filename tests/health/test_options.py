"""What a script says about its ranks' health, checked where it enters."""

from __future__ import annotations

from typing import Any

import pytest

from elastic3d.errors import UsageError
from elastic3d.health.options import RESTORE, Health, Watching, watching


def test_the_short_words_mean_what_they_say() -> None:
    """On by default, without a verdict's consequences, or not at all; a store that does not answer is waited for."""
    assert watching("on") == watching(Health()) == Watching(stuck=3.0, act=True, evidence=500_000_000)
    assert watching("log") == Watching(act=False)
    assert watching("off") is None
    assert watching(Health(stuck="10s", evidence="1GB"), patience=120.0) == Watching(
        stuck=10.0, evidence=10**9, restore=RESTORE + 120.0
    )


@pytest.mark.parametrize(
    "wrong",
    [{"stuck": "0.5s"}, {"stuck": "soon"}, {"stuck": -1}, {"act": "kill"}, {"evidence": 0}, {"evidence": "some"}],
)
def test_values_that_make_no_sense_are_refused_by_name(wrong: dict[str, Any]) -> None:
    """Before anything is started."""
    with pytest.raises(UsageError, match=f"elastic3d.Health.*{next(iter(wrong))}"):
        Health(**wrong)


@pytest.mark.parametrize("wrong", ["yes", True, None, 3])
def test_other_words_are_refused(wrong: Any) -> None:
    """They name what there is."""
    with pytest.raises(UsageError, match="'on', 'log' or 'off'"):
        watching(wrong)
