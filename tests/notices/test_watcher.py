"""Outages, closing, and notifying once, for every source."""

from __future__ import annotations

import socket
import threading

import pytest

from chaos.machine.processes import wait_until
from chaos.servers.metadata import Aws, Azure, Gcp, Reply
from elastic3d.clock import SYSTEM
from elastic3d.notices import CloudNotice, Watcher, aws, azure, gcp
from elastic3d.notices.metadata import Metadata, Unheard
from tests.logs import recorded
from tests.notices.ear import listening

FAR = "2017-09-18T08:22:00Z"
ACTION = "/latest/meta-data/spot/instance-action"


def test_a_watcher_survives_an_outage_of_its_server() -> None:
    """It keeps asking; the outage is logged once, and a notice after it counts."""
    with recorded() as entries, Aws() as cloud:
        with listening(aws.sources(cloud.url, pause=0.02)[:1]) as (_, ear):
            assert cloud.asked(ACTION)
            cloud.stop()
            assert wait_until(lambda: bool(entries), 5)
            # Time for several failed tries.
            SYSTEM.sleep(0.5)
            cloud.interrupt("terminate", FAR)
            cloud.start()
            assert ear.hears()
    names = [entry["event"] for entry in entries]
    assert names == ["notices.lost", "notices.back", "notice.heard"]
    assert ACTION in entries[0]["error"]
    assert entries[1]["seconds"] > 0


def test_server_errors_are_retried() -> None:
    """Too many requests, internal errors and garbage in a row: one outage in the log and no notice, then recovery."""
    with recorded() as entries, Gcp() as cloud:
        cloud.faults = [Reply(500), Reply(429), Reply(503), Reply(200, b"TRUE")]
        with listening(gcp.sources(cloud.url, pause=0.02)[:1]) as (_, ear):
            assert cloud.asked(Gcp.PREEMPTED, 6)
            assert ear.given == []
            cloud.set(Gcp.PREEMPTED, "TRUE")
            assert ear.hears()
    assert [entry["event"] for entry in entries] == ["notices.lost", "notices.back", "notice.heard"]
    assert "500" in entries[0]["error"]


def test_an_outage_neither_withdraws_nor_repeats_a_notice() -> None:
    """A notice that stands before and after an outage is given once; silence is no news."""
    with Azure() as cloud, listening(azure.sources(cloud.url, pause=0.02)) as (_, ear):
        cloud.schedule("A", "Preempt", "")
        assert ear.hears()
        cloud.stop()
        SYSTEM.sleep(0.2)
        cloud.start()
        assert cloud.asked(Azure.EVENTS, len(cloud.requests) + 3)
        assert len(ear.given) == 1
        assert ear.withdrawn == []


def test_a_standing_notice_is_given_once() -> None:
    """The same answer in every poll is one notice; another time or action is another."""
    with Aws() as cloud, listening(aws.sources(cloud.url, pause=0.02)[:1]) as (_, ear):
        cloud.interrupt("stop", FAR)
        assert ear.hears()
        assert cloud.asked(ACTION, len(cloud.requests) + 4)
        assert len(ear.given) == 1
        cloud.interrupt("terminate", FAR)
        assert ear.hears(given=2, withdrawn=1)
        assert [notice.action for notice in ear.given] == ["stop", "terminate"]


def test_one_failing_item_does_not_hide_another() -> None:
    """Interruptions count although recommendations cannot be read."""
    with Aws() as cloud:
        cloud.items[aws.REBALANCE] = "garbage"
        with listening(aws.sources(cloud.url, pause=0.02)) as (_, ear):
            assert cloud.asked(aws.REBALANCE, 2)
            cloud.interrupt("terminate", FAR)
            assert ear.hears()


@pytest.mark.parametrize("rebalance", [False, True])
def test_a_recommendation_is_a_notice_only_on_request(rebalance: bool) -> None:
    """By default it is only logged; either way once."""
    with recorded() as entries, Aws() as cloud:
        cloud.recommend(FAR)
        with listening(aws.sources(cloud.url, pause=0.02), rebalance=rebalance) as (_, ear):
            assert cloud.asked(aws.REBALANCE, 3)
            cloud.interrupt("terminate", FAR)
            assert ear.hears(given=1 + rebalance)
    assert [notice.action for notice in ear.given] == ["rebalance", "terminate"][not rebalance :]
    assert [(e["action"], e["told"]) for e in entries] == [("rebalance", rebalance), ("terminate", True)]


def test_close_aborts_a_hanging_request() -> None:
    """A hanging GET of a minute is dropped at once, its thread ends, and no outage is logged."""
    with recorded() as entries, Gcp() as cloud:
        with listening(gcp.sources(cloud.url, pause=0.02)) as (watcher, ear):
            with cloud.changed:
                assert cloud.changed.wait_for(lambda: cloud.hanging == 2, 5)
            began = SYSTEM.monotonic()
            watcher.close()
            assert SYSTEM.monotonic() - began < 4
            assert not any(thread.name.startswith("elastic3d-notices") for thread in threading.enumerate())
            cloud.set(Gcp.PREEMPTED, "TRUE")
        assert ear.given == []
    assert entries == []


def test_close_ends_pauses_and_outages_at_once() -> None:
    """It waits neither for the next poll nor for the next try."""
    with Aws() as cloud:
        pausing = Watcher(aws.sources(cloud.url, pause=60), lambda _: None)
        assert cloud.asked(aws.ACTION)
        assert cloud.asked(aws.REBALANCE)
    trying = Watcher(aws.sources(cloud.url), lambda _: None)
    began = SYSTEM.monotonic()
    pausing.close()
    trying.close()
    assert SYSTEM.monotonic() - began < 4
    assert not any(thread.name.startswith("elastic3d-notices") for thread in threading.enumerate())


def test_a_callback_may_close_the_watcher() -> None:
    """At once, and again later."""
    with Azure() as cloud:
        cloud.schedule("A", "Preempt", "")
        cloud.schedule("B", "Terminate", "")
        notices: list[CloudNotice] = []
        closed = threading.Event()
        watcher: list[Watcher] = []

        def tell(notice: CloudNotice) -> None:
            assert started.wait(5)
            notices.append(notice)
            watcher[0].close()
            closed.set()

        started = threading.Event()
        watcher.append(Watcher(azure.sources(cloud.url), tell))
        started.set()
        assert closed.wait(5)
        watcher[0].close()
        assert [notice.action for notice in notices] == ["preempt"]


def test_a_server_that_never_answers_is_an_outage() -> None:
    """Requests have a timeout of their own."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        metadata = Metadata(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Unheard, match="timed out"):
            metadata.ask("/", timeout=0.1)


def test_a_server_without_http_is_an_outage() -> None:
    """Anything but HTTP is no answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(Unheard):
            Metadata(f"http://127.0.0.1:{listener.getsockname()[1]}").ask("/")
        server.join()


def test_redirects_and_proxies_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metadata server is one hop away: redirects are refused and proxies ignored."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with Gcp() as cloud:
        cloud.faults = [Reply(302, b"", {"Location": f"{cloud.url}{Gcp.PREEMPTED}"})]
        source = gcp.sources(cloud.url)[0]
        with pytest.raises(Unheard, match="302"):
            source.look()
        assert source.look().notices == {}
