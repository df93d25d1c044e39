"""What a script says about its ranks' health, checked where it enters."""

from __future__ import annotations

from typing import Any

import pytest

from elastic3d.errors import UsageError
from elastic3d.health.options import RESTORE, Exhaustion, Health, Watching, watching


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
    [
        {"stuck": "0.5s"},
        {"stuck": "soon"},
        {"stuck": -1},
        {"act": "kill"},
        {"evidence": 0},
        {"evidence": "some"},
        {"numerics": "nan"},
        {"numerics": True},
        {"spike": "skip"},
        {"rollback_steps": 2},
        {"rollback_steps": "100"},
    ],
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


@pytest.mark.parametrize(
    ("given", "share"), [("off", 0.0), ("1%", 0.01), ("0.5 %", 0.005), (0.02, 0.02), (0, 0.0), ("100%", 1.0)]
)
def test_a_budget_is_a_share_of_the_computing(given: float | str, share: float) -> None:
    """In percent or as a number."""
    read = watching(Health(audit=given))
    assert read is not None
    assert read.audit == pytest.approx(share)


@pytest.mark.parametrize(("given", "factor"), [(1.15, 1.15), (1.3, 1.3), (2, 2.0), ("off", 0.0)])
def test_a_slow_node_is_so_many_times_as_slow(given: float | str, factor: float) -> None:
    """Or nobody measures it; on devices it is measured, and what would be done is only reported."""
    read, on_a_device = watching(Health(slow=given)), watching(Health(slow=given), device="cuda")
    assert read is not None
    assert on_a_device is not None
    assert (read.slow, on_a_device.slow) == (factor, factor)
    assert (read.balance, on_a_device.balance) == (True, False)


@pytest.mark.parametrize("given", [1.0, 0.5, 1000, "1.15", "slow", True, None])
def test_what_is_no_factor_is_refused(given: object) -> None:
    """Where it enters, and by its name."""
    with pytest.raises(UsageError, match="slow="):
        Health(slow=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["often", "1", "101%", 1.5, -0.1, True, "-1%", None])
def test_what_is_no_share_is_refused(given: object) -> None:
    """Where it enters, and by its name."""
    with pytest.raises(UsageError, match="audit="):
        Health(audit=given)  # type: ignore[arg-type]


def test_one_percent_is_audited_unless_it_is_said_otherwise() -> None:
    """A device that lies tells nobody, so that nobody would ask for it in time."""
    read = watching("on")
    assert read is not None
    assert read.audit == 0.01
    assert Watching().audit == 0.01
    off = watching(Health(audit="off"))
    assert off is not None
    assert off.audit == 0.0


@pytest.mark.parametrize(("given", "share"), [("off", 0.0), ("0.5%", 0.005), (0.02, 0.02)])
def test_looking_at_state_has_its_share_of_the_time(given: float | str, share: float) -> None:
    """Half a percent by default, and what is no share is refused."""
    read = watching(Health(at_rest=given))
    assert read is not None
    assert read.at_rest == pytest.approx(share)
    assert Watching().at_rest == 0.005
    with pytest.raises(UsageError, match="at_rest="):
        Health(at_rest="often")


def test_memory_that_runs_out_is_acted_upon_unless_it_is_said_otherwise() -> None:
    """A smaller micro-batch is refused by its own words: it would change bits."""
    read = watching("on")
    assert read is not None
    assert read.oom is Exhaustion.RECOMPUTE
    log = watching(Health(oom="log"))
    assert log is not None
    assert log.oom is Exhaustion.LOG
    with pytest.raises(UsageError, match="gives other bits"):
        Health(oom="micro_batch")
    with pytest.raises(UsageError, match="give one of off, log, recompute"):
        Health(oom="on")


def test_what_is_done_about_slow_nodes_is_one_of_two_words() -> None:
    """Changed or only reported."""
    log = watching(Health(balance="log"))
    assert log is not None
    assert not log.balance
    with pytest.raises(UsageError, match="give one of on, log"):
        Health(balance="evict")
