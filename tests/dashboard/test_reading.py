"""The one reader of etcd: what it publishes, and how often it looks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from elastic3d.clock import SYSTEM
from elastic3d.dashboard.event_files import EventFolder
from elastic3d.dashboard.feed import ViewFeed
from elastic3d.dashboard.reading import EVERY, JobReader
from elastic3d.dashboard.view import view
from elastic3d.errors import EtcdUnavailable
from elastic3d.log import EventLog
from elastic3d.membership.inspection.derivation import status
from elastic3d.membership.inspection.keys import RunKeys, find
from elastic3d.membership.inspection.status import Status
from tests.cli.status import scenes
from tests.cli.status.scenes import ROOT, WALL


class Source:
    """A job in training whose every look is a step later, and that may be away. looks: how often it was asked."""

    def __init__(self) -> None:
        self.scene, self.looks, self.away = scenes.training(), 0, False

    def read(self) -> tuple[Status, RunKeys]:
        self.looks += 1
        if self.away:
            raise EtcdUnavailable("no endpoint answered:\n127.0.0.1:1 refuses connections")
        self.scene.put("pulses/a@1", scenes.pulse(1300 + self.looks, loss=1 / self.looks))
        run_keys = find(ROOT, self.scene.items())
        return status("gpt-1b", run_keys, revision=9, remaining={}, wall=WALL), run_keys


def reading(source: Source, feed: ViewFeed, events: EventFolder | None = None) -> JobReader:
    """Return a reader for browsers."""
    return JobReader(
        source.read,
        lambda document: feed.publish(view(document), document.read_at),
        watched=lambda: feed.watching > 0,
        events=events,
    )


def test_the_curve_has_what_nodes_report() -> None:
    """Each step once, with the loss that its pulse had."""
    source, feed = Source(), ViewFeed()
    reader = reading(source, feed)
    for _ in range(3):
        assert reader.look()
    points = feed.view()[1]["series"]["0"]
    assert [point[:2] for point in points] == [[1301, 1.0], [1302, 0.5], [1303, 0.333333]]


def test_event_files_have_each_step(tmp_path: Path) -> None:
    """Where they are read, the curve is theirs alone; before they have any step, that of the pulses is shown."""
    source, feed = Source(), ViewFeed()
    reader = reading(source, feed, events=EventFolder(tmp_path))
    reader.look()
    assert feed.view()[1]["series"]["0"][0][0] == 1301
    with EventLog(tmp_path / "a-0.jsonl") as log:
        for step in (1, 2):
            log.emit("step.committed", step=step, loss=(0.5).hex(), seconds=0.1, generation=1)
    reader.look()
    assert feed.view()[1]["series"] == {"0": [[1, 0.5, 0.1, 1], [2, 0.5, 0.1, 1]]}


def test_what_etcd_last_showed_is_kept_while_it_is_away() -> None:
    """With the reason on one line; an etcd that never answered is an error."""
    source, feed = Source(), ViewFeed()
    source.away = True
    reader = reading(source, feed)
    with pytest.raises(EtcdUnavailable):
        reader.look()
    source.away = False
    reader.look()
    _, before, read_at = feed.view()
    source.away = True
    assert not reader.look()
    _, after, still = feed.view()
    assert after["away"] == "no endpoint answered: 127.0.0.1:1 refuses connections"
    assert {**after, "away": ""} == before
    assert still == read_at
    source.away = False
    assert reader.look()
    assert feed.view()[1]["away"] == ""


def test_it_looks_once_a_second_however_many_ask_for_it() -> None:
    """Browsers that come, and orders, only bring the next look forward to a second after the last."""
    source, feed = Source(), ViewFeed()
    feed.watching = 5
    reader = reading(source, feed)
    thread = threading.Thread(target=reader.run)
    begun, stop = SYSTEM.monotonic(), threading.Event()
    thread.start()
    while source.looks < 3:
        reader.hurry()
        stop.wait(0.01)
    took = SYSTEM.monotonic() - begun
    reader.stop()
    thread.join(10)
    assert not thread.is_alive()
    # The first at once, the third two seconds later: when this thread comes to see it is up to the machine.
    assert took >= 2 * EVERY - 0.01
