"""The event log: one list of names, whole lines."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic3d import output
from elastic3d.errors import ConfigurationError
from elastic3d.log import EventLog, Level, observe_process, process_log
from tests.logs import recorded


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_carries_its_logs_bound_fields(tmp_path: Path) -> None:
    """A bound log adds its fields to each event and shares the file with the log it was made from."""
    with EventLog(tmp_path / "sub" / "n0-0.jsonl", run="r", node="n0", slot=0) as log:
        log.emit("member.joined", incarnation="a")
        log.bind(generation=2, rank=3).emit("state.restored", source="memory", step=7)
    first, second = lines(tmp_path / "sub" / "n0-0.jsonl")
    assert (first["event"], first["run"], first["node"], first["incarnation"]) == ("member.joined", "r", "n0", "a")
    assert (second["generation"], second["rank"], second["source"]) == (2, 3, "memory")
    assert isinstance(first["at"], float)


def test_an_unknown_event_or_field_is_refused(tmp_path: Path) -> None:
    """Names come from the list; a misspelt one fails where it is written, not where it is missed."""
    with EventLog(tmp_path / "log.jsonl") as log:
        with pytest.raises(ValueError, match="not an event"):
            log.emit("member.joind")
        with pytest.raises(ValueError, match="no field 'colour'"):
            log.emit("member.joined", colour="red")


def test_threads_never_tear_a_line(tmp_path: Path) -> None:
    """Lines written by several threads at once are whole and complete."""
    path = tmp_path / "log.jsonl"
    with EventLog(path, node="n0") as log:
        threads = [
            threading.Thread(target=lambda: [log.emit("snapshot.held", step=step) for step in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(lines(path)) == 800


def test_a_full_disk_loses_only_events(capfd: pytest.CaptureFixture[str]) -> None:
    """It is reported once what is lost and why; callers go on."""
    with EventLog("/dev/full", node="n0") as log:
        for step in range(3):
            log.emit("snapshot.held", step=step)
    said = capfd.readouterr().err
    assert said == "elastic3d: events are lost until /dev/full can be written: No space left on device\n"


HALF = """
import resource, sys
from pathlib import Path
from elastic3d.log import EventLog

with EventLog(sys.argv[1]) as log:
    writer = int(Path("/proc/thread-self/children").read_text())
    log.emit("snapshot.held", step=1)
    log.flush(10)
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (80, resource.RLIM_INFINITY))
    log.emit("snapshot.held", step=2)
    log.emit("snapshot.held", step=3)
    log.flush(10)
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.emit("snapshot.held", step=4)
"""


def test_a_torn_line_does_not_damage_the_next(tmp_path: Path) -> None:
    """A disk that fills up in the middle of a line tears that line; those written later are whole."""
    path = tmp_path / "log.jsonl"
    done = subprocess.run([sys.executable, "-c", HALF, str(path)], capture_output=True, text=True, check=True)
    first, torn, last = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in (first, last)] == [1, 4]
    assert not torn.endswith("}")
    assert done.stderr.count("events are lost") == 1


def test_a_log_without_a_file_drops_events_and_still_checks_them() -> None:
    """Whoever wants no events pays nothing for them, but cannot misspell them either."""
    log = EventLog(None)
    log.emit("member.joined", incarnation="a")
    with pytest.raises(ValueError, match="not an event"):
        log.emit("nothing")


def test_the_event_file_stays_within_its_limit(tmp_path: Path) -> None:
    """At half of it the file is renamed and replaces an older one; every line in either file is whole."""
    path = tmp_path / "n0-0.jsonl"
    with EventLog(path, limit=4000, node="n0") as log:
        for step in range(200):
            log.emit("snapshot.held", step=step)
    older = tmp_path / "n0-0.jsonl.1"
    kept = [line["step"] for file in (older, path) for line in lines(file)]
    assert kept == list(range(200))[-len(kept) :]
    assert 2000 < older.stat().st_size + path.stat().st_size <= 4000


def test_no_short_line_goes_into_a_file_that_is_due_for_renaming(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would be lost, and the next long one said to be lost anew."""
    path = tmp_path / "events" / "n0-0.jsonl"
    with EventLog(path, limit=4000, node="n0") as log:
        log.emit("fault.refused", fault="x" * 1500)
        assert log.flush(30)
        path.unlink()
        path.parent.rename(tmp_path / "away")
        for length in (900, 1, 900):
            log.emit("fault.refused", fault="x" * length)
        assert log.flush(30)
        (tmp_path / "away").rename(path.parent)
        log.emit("fault.refused", fault="last")
    assert [line["fault"] for line in lines(path)] == ["last"]
    assert capfd.readouterr().err.count("events are lost") == 1


def test_an_event_file_that_somebody_removed_is_made_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """When it is due for renaming; the same where it was renamed, and no other could be made at that time."""
    path = tmp_path / "events" / "n0-0.jsonl"
    with EventLog(path, limit=4000, node="n0") as log:
        log.emit("snapshot.held", step=0)
        assert log.flush(30)
        path.unlink()
        path.parent.rename(tmp_path / "away")
        for step in range(1, 50):
            log.emit("snapshot.held", step=step)
        assert log.flush(30)
        (tmp_path / "away").rename(path.parent)
        for step in range(50, 60):
            log.emit("snapshot.held", step=step)
    assert [line["step"] for line in lines(path)] == list(range(50, 60))
    assert capfd.readouterr().err.count("events are lost") == 1


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("", ["warning: peer.lost"]),
        ("info", ["warning: peer.lost"]),
        ("debug", ["debug: snapshot.held", "warning: peer.lost"]),
        ("loud", ["warning: peer.lost"]),
    ],
)
def test_events_are_shown_by_their_level(
    setting: str, shown: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One readable line each on stderr, with its origin; stdout belongs to the user, and the file has all events."""
    monkeypatch.setenv("ELASTIC3D_LOG", setting)
    if not setting:
        monkeypatch.delenv("ELASTIC3D_LOG")
    with EventLog(tmp_path / "log.jsonl", run="r", node="n0", slot=0) as log:
        log.emit("snapshot.held", step=1, generation=4)
        log.emit("peer.lost", peer="n1", evidence="refuses\nall of it")
    out, err = capfd.readouterr()
    assert out == ""
    fields = {"snapshot.held": "step=1 node=n0 slot=0 generation=4"}
    fields["peer.lost"] = "peer=n1 evidence=refuses node=n0 slot=0"
    assert err.splitlines() == [f"elastic3d: {line} {fields[line.split()[1]]}" for line in shown]
    assert [line["event"] for line in lines(tmp_path / "log.jsonl")] == ["snapshot.held", "peer.lost"]


def test_in_json_mode_every_line_is_an_object(tmp_path: Path) -> None:
    """Events with all their fields, and text that belongs to none; debug events are left out."""
    with recorded() as entries:
        log = EventLog(None, run="r", node="n0", slot=1)
        log.emit("snapshot.held", step=1)
        log.emit_at(Level.ERROR, "checkpoint.failed", step=3, error="full\nvery", age=None)
        output.say("two\nlines")
    assert len(entries) == 2
    at = entries[0].pop("at")
    assert isinstance(at, float)
    assert entries[0] == {
        "event": "checkpoint.failed",
        "level": "error",
        "run": "r",
        "node": "n0",
        "slot": 1,
        "step": 3,
        "error": "full\nvery",
        "age": None,
    }
    assert entries[1] == {"event": None, "level": "info", "text": "two\nlines"}


def test_a_bug_is_shown_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """The message asks to report it; torchrun shows the traceback of a script, once."""
    process_log().emit("slot.failed", error="KeyError(1)", traceback="Traceback\n  here\n", slot=2)
    process_log().emit("script.raised", error="rank 0: KeyError: 1", traceback="Traceback\n  there\n", final=False)
    assert capfd.readouterr().err.splitlines() == [
        "elastic3d: error: slot.failed error=KeyError(1) slot=2; this is a bug in elastic3d, please report it",
        *("Traceback", "  here"),
        "elastic3d: error: script.raised error=rank 0: KeyError: 1 final=False",
    ]


def test_an_unknown_log_setting_is_refused_at_process_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message lists the known ones."""
    monkeypatch.setenv("ELASTIC3D_LOG", "loud")
    with pytest.raises(ConfigurationError, match="ELASTIC3D_LOG=loud: give one of debug, info, json"):
        output.checked_verbosity()


def test_an_event_is_counted_before_its_line_can_be_read(tmp_path: Path) -> None:
    """Whoever has read a line finds it in the metrics."""
    path, seen = tmp_path / "events.jsonl", list[tuple[str, str]]()

    def observe(name: str, _: Mapping[str, Any]) -> None:
        assert log.flush(5.0)
        seen.append((name, path.read_text()))

    with EventLog(path, observe=observe) as log:
        log.emit("metrics.served", address="[::]:1")
    assert seen == [("metrics.served", "")]
    assert "metrics.served" in path.read_text()


def test_an_event_of_another_process_is_written_as_of_when_it_happened(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With that process's fields, counted, and not shown a second time."""
    path, seen = tmp_path / "events.jsonl", list[tuple[str, Any]]()
    with EventLog(path, observe=lambda name, fields: seen.append((name, fields)), node="n", slot=0) as log:
        log.record("cache.unfit", 12.5, {"error": "full", "slot": 1, "rank": 3})
        with pytest.raises(ValueError, match="no field"):
            log.record("cache.unfit", 12.5, {"errors": "full"})
    said = {"node": "n", "slot": 1, "rank": 3, "error": "full"}
    assert json.loads(path.read_text()) == {**said, "at": 12.5, "event": "cache.unfit"}
    assert seen == [("cache.unfit", said)]
    assert capfd.readouterr().err == ""


def test_the_events_of_a_process_reach_whoever_observes_it(capfd: pytest.CaptureFixture[str]) -> None:
    """Beside standard error, with what the process is bound with."""
    seen: list[tuple[str, Any]] = []
    observe_process(lambda name, fields: seen.append((name, dict(fields))))
    try:
        process_log().bind(rank=2).emit("cache.unfit", error="full")
    finally:
        observe_process(None)
    process_log().emit("cache.unfit", error="full")
    assert seen == [("cache.unfit", {"rank": 2, "error": "full"})]
    assert len(capfd.readouterr().err.splitlines()) == 2
