"""CSV and JSON lines: whole, each step once, whoever wrote before."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic3d.errors import TrackerError
from elastic3d.trackers.lines import Csv, JsonLines, LineTracker
from elastic3d.trackers.media import FileMedium, ObjectMedium
from elastic3d.trackers.tracker import Position
from tests.trackers.heard import CONFIG, put

Made = Callable[[Path], LineTracker]

KINDS = {"csv": lambda path: Csv(FileMedium(path)), "jsonl": lambda path: JsonLines(FileMedium(path))}
both = pytest.mark.parametrize("made", KINDS.values(), ids=KINDS.keys())


def rows(path: Path) -> list[dict[str, float]]:
    """Read a file as its users do."""
    text = path.read_text()
    if text.startswith("{"):
        return [json.loads(line) for line in text.splitlines()]
    return [{k: float(v) if v else float("nan") for k, v in row.items()} for row in csv.DictReader(text.splitlines())]


def steps(path: Path) -> list[int]:
    return [int(row["step"]) for row in rows(path)]


@both
def test_a_file_goes_on_where_it_ended(made: Made, tmp_path: Path) -> None:
    """Another process reads back where it is; values are kept to the last bit."""
    path = tmp_path / "deep" / "losses"
    one = made(path)
    assert one.open("r", CONFIG) is None
    put(one, 1, 3)
    one.close()
    other = made(path)
    assert other.open("r", CONFIG) == Position(3, 1)
    put(other, 4, 5, generation=2)
    other.close()
    assert steps(path) == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in rows(path)] == [10.0 / step for step in range(1, 6)]
    assert made(path).open("r", CONFIG) == Position(5, 2)
    assert [one.name for one in path.parent.iterdir()] == ["losses"]


@both
def test_a_former_writer_that_still_lives_writes_into_nothing(made: Made, tmp_path: Path) -> None:
    """It was cut off with points in hand. Its file is no longer the one of that name, which it then finds, too."""
    path = tmp_path / "losses"
    old, new = made(path), made(path)
    old.open("r", CONFIG)
    put(old, 1, 3)
    assert new.open("r", CONFIG) == Position(3, 1)
    put(new, 4, 6)
    with pytest.raises(TrackerError, match="another process has replaced"):
        put(old, 4, 9)
    put(new, 7, 8)
    assert steps(path) == list(range(1, 9))


@both
@pytest.mark.parametrize("torn", range(1, 20, 3))
def test_what_was_half_written_is_removed(made: Made, torn: int, tmp_path: Path) -> None:
    """However many bytes of the last line are missing, and whatever the machine left in its place."""
    path = tmp_path / "losses"
    one = made(path)
    one.open("r", CONFIG)
    put(one, 1, 3)
    one.close()
    path.write_bytes(path.read_bytes()[:-torn] + b"\0" * (torn // 2))
    other = made(path)
    assert other.open("r", CONFIG) == Position(2, 1)
    put(other, 3, 4)
    assert steps(path) == [1, 2, 3, 4]


@both
@pytest.mark.parametrize("left", range(12))
def test_a_file_that_ends_in_its_first_line_begins_anew(made: Made, left: int, tmp_path: Path) -> None:
    """Also where the header is all there is, or not even that."""
    path = tmp_path / "losses"
    one = made(path)
    one.open("r", CONFIG)
    put(one, 1, 1)
    one.close()
    path.write_bytes(path.read_bytes()[:left])
    other = made(path)
    assert other.open("r", CONFIG) is None
    put(other, 1, 2)
    assert steps(path) == [1, 2]


@both
@pytest.mark.parametrize("content", [b"dear diary\n", b"a,b\n1,2\n", b'{"a": 1}\n', b"\x89PNG\r\n", b"x" * 3_000_000])
def test_a_file_of_somebody_else_is_left_alone(made: Made, content: bytes, tmp_path: Path) -> None:
    """It is refused, with what to do, and not a byte of it is lost."""
    path = tmp_path / "losses"
    path.write_bytes(content)
    with pytest.raises(TrackerError, match="move it away"):
        made(path).open("r", CONFIG)
    assert path.read_bytes() == content
    assert [one.name for one in tmp_path.iterdir()] == ["losses"]


@both
def test_a_run_that_goes_back_is_cut_there(made: Made, tmp_path: Path) -> None:
    """The steps after it are written again, with their other values."""
    path = tmp_path / "losses"
    one = made(path)
    one.open("r", CONFIG)
    put(one, 1, 6)
    assert one.rewind(3)
    put(one, 4, 5, generation=2, salt=7.0)
    assert steps(path) == [1, 2, 3, 4, 5]
    assert rows(path)[3]["loss"] == 10.0 / 4 + 7.0


@both
def test_the_file_of_an_earlier_run_is_kept_beside_that_of_the_next(made: Made, tmp_path: Path) -> None:
    """A run that begins at step 0 overwrites nothing."""
    path = tmp_path / "losses.txt"
    for salt in (0.0, 1.0, 2.0):
        one = made(path)
        if one.open("r", CONFIG) is not None:
            assert one.rewind(0)
        put(one, 1, 2, salt=salt)
        one.close()
    assert rows(tmp_path / "losses.1.txt")[0]["loss"] == 10.0
    assert rows(tmp_path / "losses.2.txt")[0]["loss"] == 11.0
    assert rows(path)[0]["loss"] == 12.0


def test_a_csv_file_gets_columns_as_values_come(tmp_path: Path) -> None:
    """Rows before have nothing there; a name with a comma or a line break makes no other columns."""
    path = tmp_path / "losses.csv"
    one = Csv(FileMedium(path))
    one.open("r", CONFIG)
    put(one, 1, 2)
    one.write(3, {"loss": float("nan"), "lr, now\nor never": 0.5}, 1.0)
    one.flush()
    put(one, 4, 4)
    assert steps(path) == [1, 2, 3, 4]
    assert set(rows(path)[0]) == {"step", "at", "loss", "generation", "lr, now or never"}
    assert rows(path)[2]["lr, now or never"] == 0.5
    assert Csv(FileMedium(path)).open("r", CONFIG) == Position(4, 1)


def test_json_lines_are_json(tmp_path: Path) -> None:
    """Values that are not finite are null: JSON has no word for them."""
    path = tmp_path / "losses.jsonl"
    one = JsonLines(FileMedium(path))
    one.open("r", CONFIG)
    one.write(1, {"loss": float("inf")}, 1.0)
    one.flush()
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"step": 1, "at": 1.0, "loss": None}


FULL = """
import resource, signal, sys
from pathlib import Path
from elastic3d.trackers.lines import Csv
from elastic3d.trackers.media import FileMedium
from tests.trackers.heard import CONFIG, put
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
one = Csv(FileMedium(Path(sys.argv[1])))
one.open("r", CONFIG)
put(one, 1, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (Path(sys.argv[1]).stat().st_size + 20, resource.RLIM_INFINITY))
try:
    put(one, 11, 20)
except OSError as error:
    print(type(error).__name__)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
one.close()
print(one.open("r", CONFIG))
put(one, 11, 20)
"""


def test_a_line_that_did_not_fit_is_repaired_when_there_is_room(tmp_path: Path) -> None:
    """A file that may not grow takes part of a line; the next opening goes on before it."""
    path = tmp_path / "losses.csv"
    result = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.splitlines() == ["OSError", "Position(step=10, generation=1)"], result.stderr
    assert steps(path) == list(range(1, 21))


def test_a_takeover_that_stood_still_cannot_replace_a_later_one(tmp_path: Path) -> None:
    """A process that was stopped before its rename finds its copy gone, and the newer file stays."""
    path = tmp_path / "losses.csv"
    first = Csv(FileMedium(path))
    first.open("r", CONFIG)
    put(first, 1, 3)
    first.close()
    stopped = FileMedium(path)
    newer = Csv(FileMedium(path))

    def copy(old: object, new: object) -> None:
        newer.open("r", CONFIG)
        put(newer, 4, 6)

    with pytest.raises(FileNotFoundError):
        stopped.take(copy)
    put(newer, 7, 7)
    assert steps(path) == list(range(1, 8))


def test_an_object_is_written_whole_and_goes_on_where_it_ended() -> None:
    """In any store of fsspec; what a former writer put over it is put right by the next writing."""
    import fsspec

    url = f"memory://curves-{os.getpid()}/losses.csv"
    one, other = Csv(ObjectMedium(url)), Csv(ObjectMedium(url))
    assert one.open("r", CONFIG) is None
    put(one, 1, 3)
    assert other.open("r", CONFIG) == Position(3, 1)
    put(other, 4, 5)
    put(one, 4, 4)
    put(other, 6, 7)
    text = fsspec.filesystem("memory").cat_file(url).decode()
    assert [line.split(",")[0] for line in text.splitlines()] == ["step", *map(str, range(1, 8))]
    assert other.rewind(0)
    put(other, 1, 1)
    assert one.open("r", CONFIG) == Position(1, 1)
    assert Csv(ObjectMedium(url.replace(".csv", ".1.csv"))).open("r", CONFIG) == Position(7, 1)
    fsspec.filesystem("memory").rm(url.rpartition("/")[0], recursive=True)
