"""Notices from Azure's Scheduled Events, and how it is asked for them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from chaos.servers.metadata import Azure, Reply
from elastic3d.notices import NoticeKind, azure
from elastic3d.notices.metadata import Unheard
from tests.clocks import HandClock
from tests.notices.ear import listening

NOW = 1_474_309_757.0  # Mon, 19 Sep 2016 18:29:17 GMT
SOON = "Mon, 19 Sep 2016 18:29:47 GMT"


def events(cloud: Azure, vm: str = "") -> azure.Events:
    """Return the source of events, with a clock that shows 30 s before SOON, as the cloud's does."""
    cloud.clock = HandClock(NOW)
    return azure.sources(cloud.url, clock=HandClock(NOW), pause=0.02, vm=vm)[0]


def test_events_of_this_vm_are_notices() -> None:
    """The name of this VM is asked for once, and only events that name it count."""
    with Azure() as cloud:
        source = events(cloud)
        assert source.look().notices == {}
        cloud.schedule("A", "Preempt", SOON, ("worker_2",))
        assert source.look().notices == {}
        cloud.schedule("B", "Preempt", SOON, ("worker_2", "WORKER_3"))
        ((key, notice),) = source.look().notices.items()
        assert (key, notice.kind, notice.action, notice.seconds) == ("B", NoticeKind.AZURE, "preempt", 30.0)
        assert json.loads(notice.detail)["NotBefore"] == SOON
        assert sum(request.path == Azure.NAME for request in cloud.requests) == 1


def test_a_given_vm_name_is_not_requested() -> None:
    """A VM whose name the caller knows costs no request for it."""
    with Azure() as cloud:
        cloud.schedule("A", "Reboot", SOON, ("other",))
        assert set(events(cloud, vm="other").look().notices) == {"A"}
        assert [request.path for request in cloud.requests] == [Azure.EVENTS]


@pytest.mark.parametrize("off", [-3600.0, 3600.0])
def test_the_time_left_does_not_go_by_this_machines_clock(off: float) -> None:
    """An hour behind, the 30 s before a Spot VM goes would be taken for an hour to spare."""
    with Azure() as cloud:
        cloud.clock = HandClock(NOW)
        cloud.preempt()
        (source,) = azure.sources(cloud.url, clock=HandClock(NOW + off), vm="worker_3")
        ((_, notice),) = source.look().notices.items()
        assert notice.seconds is not None
        assert 29.0 <= notice.seconds <= 30.0


@pytest.mark.parametrize(
    ("not_before", "seconds"),
    [
        (SOON, 30.0),
        ("Mon, 19 Sep 2016 18:29:00 GMT", 0.0),
        ("Mon, 19 Sep 2016 18:44:17 GMT", 900.0),
        ("", None),
        ("soon", None),
    ],
)
def test_the_time_left_is_never_negative(not_before: str, seconds: float | None) -> None:
    """An unreadable time leaves the notice without one."""
    with Azure() as cloud:
        cloud.schedule("A", "Terminate", not_before)
        (notice,) = events(cloud).look().notices.values()
        assert notice.seconds == seconds


def test_a_started_event_leaves_no_time() -> None:
    """After a hardware failure an event is Started from the first, with a blank NotBefore: it may strike now."""
    with Azure() as cloud:
        cloud.schedule("A", "Reboot", "")
        cloud.begin("A")
        (notice,) = events(cloud).look().notices.values()
        assert (notice.action, notice.seconds) == ("reboot", 0.0)


def test_an_event_is_one_notice_through_all_its_states() -> None:
    """Scheduled, then Started, among other changes of the document."""
    with Azure() as cloud, listening([events(cloud)]) as (_, ear):
        cloud.schedule("A", "Redeploy", SOON)
        assert ear.hears()
        cloud.begin("A")
        cloud.schedule("B", "Preempt", SOON, ("worker_1",))
        assert cloud.asked(Azure.EVENTS, len(cloud.requests) + 3)
        assert [notice.action for notice in ear.given] == ["redeploy"]
        assert ear.withdrawn == []


def test_a_cancelled_event_is_withdrawn() -> None:
    """Azure removes it from the list; the same notice is withdrawn, and can be given again."""
    with Azure() as cloud, listening([events(cloud)]) as (_, ear):
        cloud.schedule("A", "Reboot", SOON)
        assert ear.hears()
        cloud.end("A")
        assert ear.hears(given=1, withdrawn=1)
        assert ear.withdrawn == ear.given
        cloud.schedule("A", "Reboot", SOON)
        assert ear.hears(given=2)


def test_a_freeze_is_no_reason_to_leave() -> None:
    """A pause of seconds is logged; it is neither notified, withdrawn nor acknowledged."""
    with Azure() as cloud, listening([events(cloud)]) as (watcher, ear):
        cloud.schedule("F", "Freeze", SOON)
        cloud.schedule("A", "Preempt", SOON)
        assert ear.hears()
        cloud.end("F")
        assert cloud.asked(Azure.EVENTS, len(cloud.requests) + 2)
        cloud.schedule("F", "Freeze", SOON)
        assert cloud.asked(Azure.EVENTS, len(cloud.requests) + 2)
        assert watcher.acknowledge()
        assert [(e["EventId"], e["EventStatus"]) for e in cloud.events] == [("A", "Started"), ("F", "Scheduled")]
        assert [notice.action for notice in ear.given] == ["preempt"]
        assert ear.withdrawn == []


def test_events_are_acknowledged_only_on_request_and_for_this_vm_alone() -> None:
    """Azure starts an acknowledged event for all VMs it names: only one that names this VM alone is acknowledged."""
    with Azure() as cloud, listening([events(cloud)]) as (watcher, ear):
        cloud.schedule("A", "Preempt", SOON)
        cloud.schedule("B", "Reboot", SOON, ("worker_2", "worker_3"))
        assert ear.hears(given=2)
        assert not [request for request in cloud.requests if request.method == "POST"]
        assert watcher.acknowledge()
        (post,) = [request for request in cloud.requests if request.method == "POST"]
        assert json.loads(post.body) == {"StartRequests": [{"EventId": "A"}]}
        assert [event["EventStatus"] for event in cloud.events] == ["Started", "Scheduled"]
        # Once it has begun there is nothing more to report.
        assert cloud.asked(Azure.EVENTS, len(cloud.requests) + 2)
        assert watcher.acknowledge()
        assert sum(request.method == "POST" for request in cloud.requests) == 1


def test_an_acknowledgement_is_retried_and_given_up() -> None:
    """A transient error is retried; a server that stays away is reported, not raised."""
    with Azure() as cloud:
        # A source of its own, polled by hand: no other request consumes the faults.
        source = events(cloud)
        cloud.schedule("A", "Preempt", SOON)
        source.look()
        cloud.faults = [Reply(429)]
        with pytest.raises(Unheard, match="429"):
            source.acknowledge(["A"])
        with listening([source]) as (watcher, ear):
            assert ear.hears()
            cloud.stop()
            assert not watcher.acknowledge()
            cloud.start()
            cloud.faults = [Reply(500)]
            assert watcher.acknowledge()
        assert cloud.events[0]["EventStatus"] == "Started"


def test_the_first_answer_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request enables the service and may take two minutes; it is waited for, later ones are not."""
    assert azure.FIRST_SECONDS > 120
    monkeypatch.setattr(azure, "ANSWER_SECONDS", 0.1)
    with Azure() as cloud:
        cloud.slow = 0.5
        cloud.schedule("A", "Preempt", SOON)
        source = events(cloud)
        assert source.look().notices
        cloud.slow = 0.5
        with pytest.raises(Unheard, match="timed out"):
            source.look()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"Events": {}}',
        b'{"Events": [3]}',
        b'{"Events": [{"EventId": "A", "EventType": "Reboot"}]}',
        b'{"Events": [{"EventId": "A", "Resources": ["worker_3"]}]}',
        b'{"Events": [{"EventType": "Reboot", "Resources": ["worker_3"]}]}',
    ],
)
def test_garbage_is_neither_a_notice_nor_a_withdrawal(body: bytes) -> None:
    """An answer that is no document of events is an error to be retried."""
    with Azure() as cloud:
        source = events(cloud)
        cloud.schedule("A", "Preempt", SOON)
        source.look()
        cloud.faults = [Reply(200, body)]
        with pytest.raises(Unheard, match="scheduledevents"):
            source.look()
        assert set(source.look().notices) == {"A"}


def test_a_byte_order_mark_is_accepted() -> None:
    """JSON from Windows hosts may begin with one."""
    with Azure() as cloud:
        source = events(cloud, vm="worker_3")
        cloud.faults = [Reply(200, b"\xef\xbb\xbf" + b'{"DocumentIncarnation": 1, "Events": []}')]
        assert source.look().notices == {}


def test_the_server_is_as_strict_as_azure() -> None:
    """Without its header or version the double refuses, so the requests above were complete."""
    with Azure() as cloud:
        cloud.faults = []
        source = events(cloud)
        source.look()
        request = cloud.requests[-1]
        del request.headers["Metadata"]
        assert cloud.reply(request).status == 400
        request.headers["Metadata"] = "true"
        assert cloud.reply(request).status == 200
        assert cloud.reply(replace(request, query={})).status == 400
