"""Audits change no bit, and find the rank that computes wrongly before its numbers get into the weights."""

from __future__ import annotations

from functools import partial

import pytest

from elastic3d.port import Audited
from elastic3d.values import Layout, Schedule
from tests.parallel import audited_mains as mains
from tests.parallel.audited_mains import Flip
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo

ALWAYS = 9
"""Passes of a fault that stays: more than there are."""


def finished(reports: list[Report]) -> Report:
    for report in reports:
        assert report.ended == "done", report.error
    assert len({report.result for report in reports}) == 1
    return reports[0]


@pytest.fixture(scope="module")
def quiet() -> str:
    """The digest of a run without faults and without audits."""
    digest: str = finished(run_world(mains.train, Orders(layout=Layout(pp=1, dp=1)))).result
    return digest


def test_it_is_audited(quiet: str) -> None:
    reports = run_world(mains.train, Orders(layout=Layout(pp=1, dp=3, zero=3), audit=1.0))
    assert finished(reports).result == quiet
    assert finished(reports).audits == []
