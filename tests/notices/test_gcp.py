"""Notices from Compute Engine's metadata server, and how it is asked for them."""

from __future__ import annotations

import pytest

from chaos.servers.metadata import Gcp, Reply
from elastic3d.clock import SYSTEM
from elastic3d.notices import CloudNotice, NoticeKind, gcp
from elastic3d.notices.metadata import Unheard
from tests.notices.ear import listening


def entry(cloud: Gcp, number: int = 0, hang: int = 60) -> gcp.MetadataEntry:
    """Return the source for preemptions, or with number 1 the one for maintenance."""
    return gcp.sources(cloud.url, pause=0.02, hang=hang)[number]


def test_a_preemption_ends_the_hanging_request() -> None:
    """The first request returns at once; the second waits with the first one's ETag until the value changes."""
    with Gcp() as cloud, listening([entry(cloud)]) as (_, ear):
        assert cloud.asked(Gcp.PREEMPTED, 2)
        first, second = cloud.requests
        assert first.query == {}
        assert second.query == {"wait_for_change": "true", "timeout_sec": "60", "last_etag": "0a1b2c3d4e5f6071"}
        cloud.set(Gcp.PREEMPTED, "TRUE")
        assert ear.hears()
        assert ear.given == [CloudNotice(kind=NoticeKind.GCP, seconds=30.0, action="preempt", detail="preempted: TRUE")]


def test_a_change_between_two_requests_is_not_missed() -> None:
    """The server answers at once if the ETag is not the newest."""
    with Gcp() as cloud:
        source = entry(cloud)
        assert source.look().notices == {}
        cloud.set(Gcp.PREEMPTED, "TRUE")
        began = SYSTEM.monotonic()
        assert source.look().notices
        assert SYSTEM.monotonic() - began < 5


def test_a_hanging_request_that_times_out_is_repeated() -> None:
    """After timeout_sec the server answers with the present value, which is neither news nor an error."""
    with Gcp() as cloud, listening([entry(cloud, hang=0)]) as (_, ear):
        assert cloud.asked(Gcp.PREEMPTED, 4)
        assert ear.given == []
        assert cloud.refused == []
        cloud.set(Gcp.PREEMPTED, "TRUE")
        assert ear.hears()
        # The value stays TRUE, in every answer from now on.
        assert cloud.asked(Gcp.PREEMPTED, len(cloud.requests) + 3)
        assert len(ear.given) == 1


def test_without_an_etag_the_value_is_polled() -> None:
    """A hanging request could miss a change, so none is sent, and there is a pause between two requests."""
    with Gcp() as cloud:
        cloud.etagged = False
        source = gcp.sources(cloud.url)[0]
        look = source.look()
        source.look()
        assert [request.query for request in cloud.requests] == [{}, {}]
        assert 0 < look.pause <= 1


@pytest.mark.parametrize(
    ("value", "action", "seconds"),
    [
        ("TERMINATE_ON_HOST_MAINTENANCE", "terminate", 60.0),
        ("MIGRATE_ON_HOST_MAINTENANCE", "migrate", 60.0),
        ('{"state": "new"}', "maintenance", None),
    ],
)
def test_each_maintenance_value_has_its_action(value: str, action: str, seconds: float | None) -> None:
    """An unknown one is passed on by its name."""
    with Gcp() as cloud:
        source = entry(cloud, 1)
        assert source.look().notices == {}
        cloud.set(Gcp.MAINTENANCE, value)
        (notice,) = source.look().notices.values()
        assert (notice.action, notice.seconds) == (action, seconds)
        assert value in notice.detail


def test_only_a_termination_is_a_notice() -> None:
    """A live migration is only logged, and so is an unknown value."""
    with Gcp() as cloud, listening([entry(cloud, 1)]) as (_, ear):
        for value in ("MIGRATE_ON_HOST_MAINTENANCE", "NONE", "SOMETHING_NEW"):
            before = len(cloud.requests)
            cloud.set(Gcp.MAINTENANCE, value)
            assert cloud.asked(Gcp.MAINTENANCE, before + 1)
        cloud.set(Gcp.MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
        assert ear.hears()
        assert [notice.action for notice in ear.given] == ["terminate"]
        assert ear.withdrawn == []


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, b"TRUE"),  # A captive portal, a proxy: not Google's server.
        Reply(200, b"", {"Metadata-Flavor": "Google"}),
        Reply(403),
        Reply(404),
        Reply(503),
    ],
)
def test_an_answer_without_googles_header_is_no_notice(reply: Reply) -> None:
    """Neither is an error."""
    with Gcp() as cloud:
        cloud.faults = [reply]
        source = entry(cloud)
        with pytest.raises(Unheard, match="preempted"):
            source.look()
        assert source.look().notices == {}
