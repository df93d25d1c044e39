"""TensorBoard's event files, as TensorBoard itself reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic3d.clock import SYSTEM
from elastic3d.errors import TrackerError
from elastic3d.trackers.event_files import EventFiles
from elastic3d.trackers.points import Point, Points
from elastic3d.trackers.tracker import Position
from elastic3d.trackers.turn import Turn
from elastic3d.trackers.writing import TrackerWriter
from tests.trackers.heard import CONFIG, eventually, put, values


def shown(folder: Path, tag: str = "loss") -> dict[int, float]:
    """Return the points that TensorBoard shows; none of them twice."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    scalars = accumulator.Scalars(tag)
    assert [one.step for one in scalars] == sorted({one.step for one in scalars})
    return {one.step: one.value for one in scalars}


def test_a_curve_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Another process reads back where it is; all values of a step stand at the time it was heard of."""
    folder = tmp_path / "runs" / "gpt"
    one = EventFiles(folder)
    assert one.open("r", CONFIG) is None
    put(one, 1, 4)
    one.close()
    other = EventFiles(folder)
    assert other.open("r", CONFIG) == Position(4, 1)
    put(other, 5, 6, generation=2)
    other.close()
    assert shown(folder) == pytest.approx({step: 10.0 / step for step in range(1, 7)})
    assert shown(folder, "generation")[6] == 2
    assert EventFiles(folder).open("r", CONFIG) == Position(6, 2)


def test_a_former_writer_that_still_lives_shows_nothing_twice(tmp_path: Path) -> None:
    """It was cut off with points in hand, and writes them after the next one has begun."""
    old, new = EventFiles(tmp_path), EventFiles(tmp_path)
    old.open("r", CONFIG)
    put(old, 1, 3)
    assert new.open("r", CONFIG) == Position(3, 1)
    put(new, 4, 6)
    with pytest.raises(TrackerError, match="another process has replaced"):
        put(old, 4, 9, salt=5.0)
    put(new, 7, 8)
    assert shown(tmp_path) == pytest.approx({step: 10.0 / step for step in range(1, 9)})


@pytest.mark.parametrize("torn", [1, 5, 30])
def test_what_was_half_written_is_removed(torn: int, tmp_path: Path) -> None:
    """The step is written again as a whole."""
    one = EventFiles(tmp_path)
    one.open("r", CONFIG)
    put(one, 1, 3)
    one.close()
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-torn])
    other = EventFiles(tmp_path)
    assert other.open("r", CONFIG) == Position(2, 1)
    put(other, 3, 4)
    assert shown(tmp_path) == pytest.approx({step: 10.0 / step for step in range(1, 5)})


def test_a_record_whose_bytes_are_wrong_is_not_taken_for_one(tmp_path: Path) -> None:
    """A machine that went down may have left zeros at the end of a file of the right length."""
    one = EventFiles(tmp_path)
    one.open("r", CONFIG)
    put(one, 1, 3)
    one.close()
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-10] + b"\0" * 10)
    assert EventFiles(tmp_path).open("r", CONFIG) == Position(2, 1)


def test_a_run_that_goes_back_is_shown_with_its_other_values(tmp_path: Path) -> None:
    """The mark has readers forget the steps after it, and the next opening reads back the same."""
    one = EventFiles(tmp_path)
    one.open("r", CONFIG)
    put(one, 1, 6)
    assert one.rewind(3)
    assert EventFiles(tmp_path).open("r", CONFIG) == Position(3, 1)
    one.close()
    one.open("r", CONFIG)
    put(one, 4, 5, generation=2, salt=7.0)
    one.close()
    expected = {step: 10.0 / step for step in (1, 2, 3)} | {step: 10.0 / step + 7.0 for step in (4, 5)}
    assert shown(tmp_path) == pytest.approx(expected)
    assert EventFiles(tmp_path).open("r", CONFIG) == Position(5, 2)


def test_another_life_of_the_run_is_shown_though_etcd_was_away_before_its_first_step(tmp_path: Path) -> None:
    """The mark went with a file in which nothing was; the next opening sets it again."""
    earlier = EventFiles(tmp_path)
    earlier.open("r", CONFIG)
    put(earlier, 1, 10)
    earlier.close()
    opened: list[str] = []
    points = Points()
    writer = TrackerWriter(
        "tensorboard", EventFiles(tmp_path), points, run_id="r", emit=lambda name, **_: opened.append(name), pace=0.01
    )
    writer.begin(Turn(generation=2, config=CONFIG, restored=4))
    assert eventually(lambda: opened.count("tracker.opened") == 1)
    writer.hold(True)
    assert eventually(lambda: len(list(tmp_path.iterdir())) == 1)
    writer.hold(False)
    for step in range(5, 9):
        points.add(Point(step=step, generation=2, at=1.0, values=values(step, 2, 7.0)))
    writer.heard()
    writer.finish(SYSTEM.monotonic() + 10)
    writer.wait()
    expected = {step: 10.0 / step for step in range(1, 5)} | {step: 10.0 / step + 7.0 for step in range(5, 9)}
    assert shown(tmp_path) == pytest.approx(expected)


def test_openings_that_wrote_nothing_leave_no_file(tmp_path: Path) -> None:
    """A tracker that fails is opened again and again."""
    one = EventFiles(tmp_path)
    for _ in range(5):
        one.open("r", CONFIG)
        one.close()
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_neither_read_nor_changed(tmp_path: Path) -> None:
    """Only our own say where the curve is."""
    other = tmp_path / "events.out.tfevents.1999999999.host.1.0"
    other.write_bytes(b"whatever")
    one = EventFiles(tmp_path)
    assert one.open("r", CONFIG) is None
    put(one, 1, 2)
    assert other.read_bytes() == b"whatever"


def test_clocks_that_disagree_change_no_order(tmp_path: Path) -> None:
    """The node that writes next has an earlier wall clock: its file still comes last."""
    one = EventFiles(tmp_path)
    one.open("r", CONFIG)
    put(one, 1, 3)
    one.close()
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / "events.out.tfevents.4102444800.77.elastic3d")
    other = EventFiles(tmp_path)
    assert other.open("r", CONFIG) == Position(3, 1)
    put(other, 4, 5)
    assert list(shown(tmp_path)) == [1, 2, 3, 4, 5]
