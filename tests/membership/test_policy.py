"""The numbers a job's owner chooses: which are refused, and what they allow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.errors import ConfigurationError
from elastic3d.membership.policy import Policy


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"minimum": 3, "maximum": 2}, "--nnodes=3:2"),
        ({"minimum": 0, "maximum": 2}, "--nnodes=0:2"),
        ({"minimum": 5, "maximum": 7, "multiple_of": 4}, "only multiples of 4.*widen --nnodes"),
        ({"minimum": 2, "maximum": 8, "counts": (2, 9)}, "counts=2/9: 9 not within --nnodes=2:8"),
        ({"minimum": 2, "maximum": 8, "counts": (3, 5), "multiple_of": 2}, "the numbers allowed are 3, 5 and only"),
        ({"multiple_of": 0}, "--rdzv-conf=multiple_of=0: at least 1"),
        ({"budget": -1}, "neither can be negative"),
        ({"flaps": -1}, "neither can be negative"),
        ({"damping": -0.5}, "damping=-0.5: a time cannot be negative"),
        ({"confirm": -0.5}, "confirm=-0.5: a time cannot be negative"),
        ({"quarantine": 0.0}, "a quarantine must last some time"),
        ({"quarantine": 100.0, "flap_memory": 50.0}, "raise flap_memory"),
        ({"lease": 1.0}, "--rdzv-conf=lease=1: .* below 2 s"),
    ],
)
def test_contradictory_policies_are_refused(numbers: dict[str, Any], message: str) -> None:
    """A policy that could never work, or not as intended, is refused with what to change."""
    with pytest.raises(ConfigurationError, match=message):
        Policy(**numbers)


def test_quarantine_times_are_not_checked_without_flaps() -> None:
    """Nobody has to choose times for what is turned off."""
    assert Policy(flaps=0, quarantine=0.0).flaps == 0


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 4),
    st.lists(st.integers(1, 9), max_size=3),
    st.integers(0, 12),
)
def test_allowed_gives_the_largest_number_all_rules_allow(
    minimum: int, more: int, multiple: int, counts: list[int], nodes: int
) -> None:
    """Or 0 if there is none."""
    try:
        policy = Policy(minimum=minimum, maximum=minimum + more, multiple_of=multiple, counts=tuple(counts))
    except ConfigurationError:
        return
    fits = [
        n for n in range(minimum, min(nodes, minimum + more) + 1) if n % multiple == 0 and (not counts or n in counts)
    ]
    assert policy.allowed(nodes) == max(fits, default=0)


def test_quarantine_doubles_with_each_loss() -> None:
    """Beyond the first that led to it, up to the end of the memory."""
    policy = Policy(flaps=3, quarantine=60.0, flap_memory=3600.0)
    assert [policy.kept_out(losses) for losses in (3, 4, 5, 9, 999)] == [60.0, 120.0, 240.0, 3600.0, 3600.0]
