"""One tracker's thread: what it writes, and what it says where that fails."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elastic3d.clock import SYSTEM
from elastic3d.threads import Edge, ThreadFailure
from elastic3d.trackers.points import Void
from elastic3d.trackers.tracker import Position
from elastic3d.trackers.turn import Turn, rewound_to
from elastic3d.trackers.writing import SILENT
from tests.clocks import HandClock
from tests.trackers.heard import Shelf, Writing, eventually, values


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def first(shelf: Shelf) -> Iterator[Writing]:
    node = Writing(shelf)
    yield node
    node.end()


@pytest.fixture
def second(shelf: Shelf) -> Iterator[Writing]:
    node = Writing(shelf)
    yield node
    node.end()


def test_the_next_writer_writes_what_the_former_one_did_not(shelf: Shelf, first: Writing, second: Writing) -> None:
    """Both heard all steps; the first died, or was cut off, before it wrote the last ones."""
    for node in (first, second):
        node.add(1, 5)
    first.begin()
    assert eventually(lambda: len(shelf.sent) == 5)
    first.writer.stop()
    for node in (first, second):
        node.add(6, 9)
    second.begin(2)
    assert eventually(lambda: len(shelf.sent) == 9)
    second.add(7, 12, generation=2)
    second.end()
    assert shelf.sent == list(range(1, 13))
    assert second.said("tracker.gap") == second.said("tracker.unwritten") == []
    assert eventually(lambda: first.tracker.closed == first.tracker.opened == 1)


def test_a_writer_that_is_held_writes_nothing_and_reads_back_afterwards(shelf: Shelf, first: Writing) -> None:
    """While etcd is away another may write, as one did here."""
    first.begin()
    first.add(1, 3)
    assert eventually(lambda: len(shelf.sent) == 3)
    first.writer.hold(True)
    first.add(4, 6)
    assert eventually(lambda: first.tracker.closed == 1)
    shelf.points[4] = values(4)
    first.writer.hold(False)
    assert eventually(lambda: len(shelf.sent) == 5)
    assert shelf.sent == [1, 2, 3, 5, 6]


def test_a_node_that_wrote_writes_again_only_after_reading_back(shelf: Shelf, first: Writing, second: Writing) -> None:
    """Between its two turns another one wrote."""
    for node in (first, second):
        node.add(1, 4)
    first.begin(1)
    assert eventually(lambda: len(shelf.sent) == 4)
    first.writer.stop()
    second.begin(2)
    for node in (first, second):
        node.add(5, 8)
    assert eventually(lambda: len(shelf.sent) == 8)
    second.writer.stop()
    first.add(9, 9)
    first.begin(3)
    assert eventually(lambda: len(shelf.sent) == 9)
    assert shelf.sent == list(range(1, 10))


def test_a_failure_is_said_once_and_its_points_are_written_later(shelf: Shelf, first: Writing) -> None:
    """The tracker is opened anew at each try, so that what did arrive is not written again."""
    shelf.broken = True
    first.begin()
    first.add(1, 4)
    assert eventually(lambda: first.tracker.opened >= 3)
    first.add(5, 8)
    shelf.broken = False
    assert eventually(lambda: len(shelf.sent) == 8)
    assert eventually(lambda: first.said("tracker.mended"))
    assert shelf.sent == list(range(1, 9))
    (failed,) = first.said("tracker.failed")
    assert failed["error"] == "OSError: no space left"
    assert failed["tracker"] == "shelf"


def test_a_password_in_what_a_tracker_raises_is_in_no_event(
    shelf: Shelf, first: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients say which address they called, the user's name and password in it."""

    def refuse(*args: Any) -> None:
        raise OSError(
            "API request to http://alice:secret@127.0.0.1:9/api/runs failed: /api/runs?token=secret (refused)"
        )

    monkeypatch.setattr(first.tracker, "write", refuse)
    monkeypatch.setattr(first.tracker, "close", refuse)
    first.begin()
    first.add(1, 2)
    assert eventually(lambda: len(first.said("tracker.failed")) == 2)
    first.end(0.1)
    assert first.said("tracker.unwritten")
    assert "secret" not in str(first.events)
    said = "OSError: API request to http://***@127.0.0.1:9/api/runs failed: /api/runs?... (refused)"
    assert {failed["error"] for failed in first.said("tracker.failed")} == {said}


def test_points_beyond_the_bound_are_lost_and_named(shelf: Shelf) -> None:
    """Memory is bounded however long a tracker is away."""
    node = Writing(shelf, kept=10)
    shelf.broken = True
    node.begin()
    node.add(1, 30)
    assert eventually(lambda: node.said("tracker.failed"))
    shelf.broken = False
    assert eventually(lambda: len(shelf.sent) == 10)
    node.end()
    assert shelf.sent == list(range(21, 31))
    (gap,) = node.said("tracker.gap")
    assert gap["steps"] == [1, 20]


def test_the_end_waits_for_a_bounded_time_and_says_what_is_not_written(shelf: Shelf) -> None:
    """A tracker that fails until the end costs no more than the patience."""
    node = Writing(shelf)
    shelf.broken = True
    node.begin()
    node.add(1, 7)
    assert eventually(lambda: node.said("tracker.failed"))
    began = SYSTEM.monotonic()
    node.end(0.3)
    assert SYSTEM.monotonic() - began < 5
    (unwritten,) = node.said("tracker.unwritten")
    assert (unwritten["steps"], unwritten["count"]) == ([1, 7], 7)
    assert "no space left" in unwritten["error"]


def test_the_end_does_not_wait_for_a_tracker_that_hangs(shelf: Shelf) -> None:
    """It never returned from its first write."""
    node, shelf.gate = Writing(shelf), threading.Event()
    node.begin()
    node.add(1, 3)
    began = SYSTEM.monotonic()
    node.end(0.3)
    assert SYSTEM.monotonic() - began < 5
    (unwritten,) = node.said("tracker.unwritten")
    assert unwritten["count"] == 3
    shelf.gate.set()


def test_the_thread_survives_whatever_a_tracker_raises(
    reported: queue.SimpleQueue[ThreadFailure], shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what ends a program elsewhere; it is tried again."""
    node = Writing(shelf)
    real = node.tracker.write

    def write(*args: Any) -> None:
        monkeypatch.setattr(node.tracker, "write", real)
        raise SystemExit(3)

    monkeypatch.setattr(node.tracker, "write", write)
    node.begin()
    node.add(1, 3)
    failure = reported.get(timeout=30)
    assert (failure.thread, failure.edge) == ("tracker-shelf", Edge.AGAIN)
    assert eventually(lambda: len(shelf.sent) == 3)
    node.end()
    assert [name for name, _ in node.events if name in ("tracker.failed", "tracker.mended")] == [
        "tracker.failed",
        "tracker.mended",
    ]


def test_a_tracker_that_does_not_answer_is_named_and_mended(shelf: Shelf) -> None:
    """It hangs in a write for longer than a minute, by a clock of ours."""
    clock = HandClock()
    node, shelf.gate = Writing(shelf, clock=clock), threading.Event()
    node.add(1, 3)
    node.begin()
    assert eventually(lambda: node.writer._busy_since is not None and node.tracker.opened)
    node.writer.look()
    assert not node.said("tracker.failed")
    clock.now += SILENT + 1
    for _ in range(3):
        node.writer.look()
    shelf.gate.set()
    assert eventually(lambda: node.said("tracker.mended"))
    assert len(node.said("tracker.failed")) == 1
    assert shelf.sent == [1, 2, 3]
    node.end()


@pytest.mark.parametrize("returned", [7, "3", (1, 2, 3), (1.5, 0), [1, 2]])
def test_a_tracker_that_returns_no_position_is_named(returned: object, shelf: Shelf, first: Writing) -> None:
    """What is wrong with it is said, and nothing is written on a guess."""
    first.tracker.open = lambda run_id, config: returned  # type: ignore[method-assign,assignment,return-value]
    first.begin()
    first.add(1, 2)
    assert eventually(lambda: first.said("tracker.failed"))
    assert "Position or None" in first.said("tracker.failed")[0]["error"]
    assert shelf.sent == []
    first.writer.stop()


def test_a_run_that_went_back_is_written_anew_from_there(shelf: Shelf, first: Writing) -> None:
    """Steps 4 to 6 were made with samples that are left out since; nothing of them stays."""
    shelf.forgets = True
    first.begin(1)
    first.add(1, 6)
    assert eventually(lambda: len(shelf.sent) == 6)
    voids = (Void(before=2, step=3),)
    first.points.leave_out(voids)
    first.begin(2, voids=voids)
    first.add(4, 8, generation=2, salt=100.0)
    assert eventually(lambda: 8 in shelf.points)
    assert shelf.points == {
        **{step: values(step) for step in (1, 2, 3)},
        **{step: values(step, 2, 100.0) for step in range(4, 9)},
    }


def test_a_tracker_that_cannot_forget_is_named_where_the_run_goes_back(shelf: Shelf, first: Writing) -> None:
    """It then has both points of these steps."""
    first.begin(1)
    first.add(1, 6)
    assert eventually(lambda: len(shelf.sent) == 6)
    voids = (Void(before=2, step=3),)
    first.points.leave_out(voids)
    first.begin(2, voids=voids)
    first.add(4, 7, generation=2, salt=100.0)
    assert eventually(lambda: len(shelf.sent) == 10)
    (kept,) = first.said("tracker.kept")
    assert kept["steps"] == [4, 6]


def test_another_life_of_the_run_replaces_what_came_after_the_state_it_began_with(shelf: Shelf, first: Writing) -> None:
    """A node that heard nothing of the run before goes on from step 4; steps after it are made again."""
    shelf.forgets = True
    shelf.points = {step: values(step) for step in range(1, 8)}
    first.begin(9, restored=4)
    first.add(5, 6, generation=9, salt=5.0)
    assert eventually(lambda: 6 in shelf.sent)
    assert shelf.points[5] == values(5, 9, 5.0)
    assert 7 not in shelf.points


def test_what_this_life_has_written_is_not_removed_as_that_of_another(shelf: Shelf, first: Writing) -> None:
    """A generation ended before its first step, so the next one has the same turn; later etcd was away for a moment."""
    shelf.forgets = True
    first.begin(1, restored=0)
    assert eventually(lambda: first.said("tracker.opened"))
    first.begin(2, restored=0)
    first.add(1, 6, generation=2)
    assert eventually(lambda: len(shelf.sent) == 6)
    first.writer.hold(True)
    assert eventually(lambda: first.tracker.closed == 1)
    first.writer.hold(False)
    first.add(7, 7, generation=2)
    assert eventually(lambda: 7 in shelf.sent)
    assert shelf.sent == [1, 2, 3, 4, 5, 6, 7]


def test_what_a_tracker_cannot_forget_is_said_once(shelf: Shelf, first: Writing) -> None:
    """However often it is opened before there is a step that it lacks."""
    shelf.points = {step: values(step) for step in range(1, 8)}
    first.begin(9, restored=4)
    assert eventually(lambda: first.said("tracker.kept"))
    first.writer.hold(True)
    assert eventually(lambda: first.tracker.closed == 1)
    first.writer.hold(False)
    first.add(5, 9, generation=9)
    assert eventually(lambda: 9 in shelf.sent)
    assert shelf.sent == [8, 9]
    assert [kept["steps"] for kept in first.said("tracker.kept")] == [[5, 7]]


@pytest.mark.parametrize(
    ("position", "voids", "restored", "back"),
    [
        (None, (Void(before=3, step=5),), 0, None),
        (Position(9, 2), (Void(before=3, step=5),), None, 5),
        (Position(9, 3), (Void(before=3, step=5),), None, None),
        (Position(5, 2), (Void(before=3, step=5),), None, None),
        (Position(9, 2), (), 4, 4),
        (Position(9, 2), (), 9, None),
        (Position(9, 2), (Void(before=3, step=5), Void(before=7, step=2)), 4, 2),
    ],
)
def test_how_far_back_the_storage_is_right(
    position: Position | None, voids: tuple[Void, ...], restored: int | None, back: int | None
) -> None:
    """A point counts as the run's unless it was made before the run went back beyond it."""
    assert rewound_to(Turn(generation=9, voids=voids, restored=restored), position) == back
