"""What real ranks measure of their steps, and who is found to be slow by it."""

from __future__ import annotations

import pytest

from elastic3d.health import noise, speeds
from elastic3d.health.slow_node import SlowKind, SlowNode
from elastic3d.health.speeds import Speeds
from elastic3d.values import Layout
from tests.parallel import measured_mains
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo

LAYOUT = Layout(pp=1, dp=2)
STAGES = Layout(pp=2, dp=1, cuts=(3,))
"""Three blocks, and one beside the head."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a test are short, and so is what is seen of them; and the machine may be busy with anything."""
    monkeypatch.setattr(speeds, "SPAN", 0.0)
    monkeypatch.setattr(speeds, "WINDOW", 0.0)
    monkeypatch.setattr(speeds, "SLACK", 100.0)
    monkeypatch.setattr(noise, "student", lambda chance, freedom: 0.0)


def slow_by(report: Report, layout: Layout) -> dict[str, SlowNode]:
    seen = Speeds(1.15)
    seen.begin("1.0", layout, ["node0", "node1"])
    for record in report.records:
        seen.heard(record.step, record.sheets)
    return dict(seen.slow)


@pytest.mark.long
def test_the_slow_rank_is_found_from_what_all_have_measured() -> None:
    """Every rank hears the same rows in its votes, and whoever looks at them finds the same."""
    reports = run_world(measured_mains.train, Orders(layout=LAYOUT))
    assert [report.ended for report in reports] == ["done"] * 2, [report.error for report in reports]
    heard = [[record.sheets for record in report.records] for report in reports]
    assert heard[0] == heard[1]
    slow = slow_by(reports[0], LAYOUT)
    assert slow == slow_by(reports[1], LAYOUT)
    assert list(slow) == ["node1"]
    assert slow["node1"].kind is SlowKind.COMPUTE
    assert slow["node1"].cost > measured_mains.LONGER / 2


@pytest.mark.long
def test_the_slow_stage_is_found_by_what_one_of_its_blocks_takes() -> None:
    """From the first step on, though it computes for no longer than the other one, which has three times as many."""
    reports = run_world(measured_mains.train_stages, Orders(layout=STAGES))
    assert [report.ended for report in reports] == ["done"] * 2, [report.error for report in reports]
    slow = slow_by(reports[0], STAGES)
    assert list(slow) == ["node1"]
    assert 2.0 < slow["node1"].rho < 4.0


@pytest.mark.long
def test_the_slow_device_is_found_though_its_calls_return_at_once() -> None:
    """By the time that it notes itself."""
    reports = run_world(measured_mains.train_on_devices, Orders(layout=LAYOUT))
    assert [report.ended for report in reports] == ["done"] * 2, [report.error for report in reports]
    slow = slow_by(reports[0], LAYOUT)
    assert list(slow) == ["node1"]
    assert slow["node1"].kind is SlowKind.COMPUTE
