"""Notices from EC2's instance metadata, and how it is asked for them."""

from __future__ import annotations

import pytest

from chaos.servers.metadata import Aws, Reply
from elastic3d.notices import CloudNotice, NoticeKind, aws
from elastic3d.notices.metadata import Unheard
from tests.clocks import HandClock

NOW = 1_505_722_800.0  # 2017-09-18T08:20:00Z


def item(cloud: Aws, clock: HandClock, number: int = 0) -> aws.Item:
    """Return the source for interruptions, or with number 1 the one for recommendations; the cloud has its clock."""
    cloud.clock = clock
    return aws.sources(cloud.url, clock=clock)[number]


@pytest.mark.parametrize("off", [-3600.0, 3600.0])
def test_the_time_left_does_not_go_by_this_machines_clock(off: float) -> None:
    """An hour ahead, a node would go at once with two minutes left to do it well."""
    with Aws() as cloud:
        source = item(cloud, HandClock(NOW + off))
        cloud.clock = HandClock(NOW)
        cloud.interrupt("terminate", "2017-09-18T08:21:15Z")
        (notice,) = source.look().notices.values()
        assert notice.seconds is not None
        assert 74.0 <= notice.seconds <= 75.0


def test_there_is_no_notice_until_one_is_published() -> None:
    """404 is the usual answer; then a notice has its action and the time left."""
    with Aws() as cloud:
        source = item(cloud, HandClock(NOW))
        assert source.look().notices == {}
        assert source.look().pause == 5.0
        cloud.interrupt("terminate", "2017-09-18T08:22:00Z")
        assert list(source.look().notices.values()) == [
            CloudNotice(
                kind=NoticeKind.AWS,
                seconds=120.0,
                action="terminate",
                detail='spot/instance-action: {"action": "terminate", "time": "2017-09-18T08:22:00Z"}',
            )
        ]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("2017-09-18T08:21:15Z", 75.0),
        ("2017-09-18T08:19:00Z", 0.0),  # Over, or this machine's clock is ahead.
        ("2017-09-18T09:22:00Z", 120.0),  # This machine's clock is behind; there are never more than two minutes.
        ("2017-09-18T08:21:00", 60.0),
        ("2017-09-18T10:21:00+02:00", 60.0),
        ("soon", None),
        ("", None),
    ],
)
def test_the_time_left_is_at_most_two_minutes(time: str, seconds: float | None) -> None:
    """With a wrong clock or an unreadable time it is adjusted; the notice still counts."""
    with Aws() as cloud:
        cloud.interrupt("stop", time)
        (notice,) = item(cloud, HandClock(NOW)).look().notices.values()
        assert (notice.action, notice.seconds) == ("stop", seconds)


def test_a_recommendation_has_no_deadline() -> None:
    """Its noticeTime is when it was issued, and says nothing of an end."""
    with Aws() as cloud:
        cloud.recommend("2017-09-18T08:19:00Z")
        (notice,) = item(cloud, HandClock(NOW), 1).look().notices.values()
        assert (notice.action, notice.seconds) == ("rebalance", None)
        assert "08:19:00" in notice.detail


def test_a_token_is_reused_and_renewed_before_it_expires() -> None:
    """It is kept for its life of six hours, and the server never has to refuse it."""
    with Aws() as cloud:
        clock = HandClock(NOW)
        source = item(cloud, clock)
        source.look()
        clock.now += 19_000
        source.look()
        assert len(cloud.tokens) == 1
        clock.now += 1_000
        source.look()
        source.look()
        assert len(cloud.tokens) == 2
        assert 401 not in cloud.refused


def test_a_refused_token_is_replaced_at_once() -> None:
    """A server that forgot its tokens (401) costs one more request, but no poll."""
    with Aws() as cloud:
        source = item(cloud, HandClock(NOW))
        source.look()
        cloud.tokens.clear()
        cloud.interrupt("terminate", "2017-09-18T08:22:00Z")
        assert source.look().notices
        assert cloud.refused.count(401) == 1


def test_a_token_that_is_always_refused_is_an_outage() -> None:
    """After 401 twice in a row the watcher tries again later instead of looping."""
    with Aws() as cloud:
        source = item(cloud, HandClock(NOW))
        source.look()
        cloud.faults = [Reply(401), Reply(200, b"tok", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}), Reply(401)]
        with pytest.raises(Unheard, match="401"):
            source.look()
        assert not cloud.faults


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, b""),
        Reply(200, b"tok"),
        Reply(200, b"tok\r\nen", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}),
        Reply(200, "tök".encode(), {"X-aws-ec2-metadata-token-ttl-seconds": "60"}),
        Reply(200, b"tok", {"X-aws-ec2-metadata-token-ttl-seconds": "long"}),
        Reply(403),
    ],
)
def test_an_invalid_token_is_an_outage(reply: Reply) -> None:
    """Metadata that is turned off (403) or not AWS's gives no token, and nothing is sent with a wrong one."""
    with Aws() as cloud:
        cloud.faults = [reply]
        with pytest.raises(Unheard, match="token"):
            item(cloud, HandClock(NOW)).look()
        assert len(cloud.requests) == 1


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"{}", b'{"action": 3}', b'{"action": ""}', b"\xff\xfe\x00"]
)
def test_garbage_is_no_notice(body: bytes) -> None:
    """An answer without an action is an error to be retried, never a reason to leave."""
    with Aws() as cloud:
        source = item(cloud, HandClock(NOW))
        source.look()
        cloud.faults = [Reply(200, body)]
        with pytest.raises(Unheard, match="instance-action"):
            source.look()
        assert source.look().notices == {}
