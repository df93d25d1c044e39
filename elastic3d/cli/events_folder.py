"""The event files that a run's nodes left in a folder, read for what became of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from elastic3d.accounting.clock_offsets import ClockOffset, by_one_clock, clock_offsets
from elastic3d.accounting.node_lives import in_starts, lives
from elastic3d.accounting.past_run import PastRun, past_run
from elastic3d.accounting.recorded_events import RecordedEvent, recorded
from elastic3d.cli.ckpt.telling import Advance, bar
from elastic3d.errors import UsageError

ROTATED = ".1"
"""Ends the name of a node's older file."""

LONGEST = 1 << 20
"""Bytes of a line beyond which it is no event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsFolder:
    """A run of a folder. others: the folder's other runs. remarks: what could not be read of it."""

    run_id: str
    run: PastRun
    clocks: tuple[ClockOffset, ...]
    others: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def read_run(folder: Path, run_id: str = "", keep: Collection[str] | None = None) -> EventsFolder:
    """Return a run of a folder, the one that wrote last unless it is named.

    keep: the events whose fields are needed; None for all. Files are found by their names: `<node>-0.jsonl`, and
    `<node>-0.jsonl.1` for what that node wrote before. UsageError where there is nothing to account for, or no such
    run; OSError if a file cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(
            f"{str(folder)!r} is no folder: give the one that the script names in elastic3d.run(events=...)"
        )
    files = event_files(folder)
    if not files:
        raise UsageError(
            f"{str(folder)!r} holds no event files (*.jsonl): give the folder that the script names in "
            "elastic3d.run(events=...), with the files of all nodes"
        )
    remarks: list[str] = []
    runs: dict[str, dict[str, list[RecordedEvent]]] = defaultdict(lambda: defaultdict(list))
    read = 0
    with bar("reading events", total=sum(path.stat().st_size for path in files)) as advance:
        for path in files:
            unreadable = 0
            for event in _events(path, read, advance):
                if event is None:
                    unreadable += 1
                    continue
                if keep is not None and event.name not in keep:
                    event = replace(event, fields={})
                runs[event.run][event.node].append(event)
            read += path.stat().st_size
            if unreadable:
                lines = "a line" if unreadable == 1 else f"{unreadable} lines"
                remarks.append(f"{lines} of {path.name} cannot be read, as after a crash, and count as not written")
    if not runs:
        raise UsageError(
            f"the files in {str(folder)!r} hold no events: nothing was written to them, or by another program"
        )
    newest = {name: max(event.at for events in nodes.values() for event in events) for name, nodes in runs.items()}
    chosen = run_id or max(newest, key=lambda name: newest[name])
    if chosen not in runs:
        raise no_run(chosen, folder, runs)
    all_lives = in_starts([life for node, events in runs[chosen].items() for life in lives(node, events)])
    clocks = clock_offsets(all_lives)
    return EventsFolder(
        run_id=chosen,
        run=past_run(by_one_clock(all_lives, clocks)),
        clocks=clocks,
        others=tuple(sorted(set(runs) - {chosen})),
        remarks=tuple(remarks),
    )


def no_run(run_id: str, folder: Path, runs: Collection[str]) -> UsageError:
    """Return the error for a run that is not one of those in a folder."""
    return UsageError(f"no run {run_id!r} in {str(folder)!r}; there are {', '.join(map(repr, sorted(runs)))}")


def others_said(others: Collection[str]) -> str:
    """Return what people should know of a folder's other runs."""
    return f"other runs in this folder, which --id names: {', '.join(others)}"


def event_files(folder: Path) -> list[Path]:
    """Return the event files of a folder, of each node the older one first."""
    files = [path for path in folder.iterdir() if path.name.endswith((".jsonl", ".jsonl" + ROTATED)) and path.is_file()]
    return sorted(files, key=lambda path: (path.name.removesuffix(ROTATED), not path.name.endswith(ROTATED)))


def _events(path: Path, before: int, advance: Advance) -> Iterator[RecordedEvent | None]:
    """Yield what each line of a file says, None for one that cannot be read; empty ones say nothing."""
    node = path.name.removesuffix(ROTATED).removesuffix(".jsonl").removesuffix("-0")
    done = before
    with path.open("rb") as file:
        for number, line in enumerate(event_lines(file)):
            done += len(line)
            if number % 1000 == 0:
                advance(done)
            if line.strip():
                yield recorded(line, node) if len(line) <= LONGEST else None


def event_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, of longer ones than any event is only the beginning."""
    while line := file.readline(LONGEST + 1):
        yield line
        rest = line
        while len(rest) > LONGEST and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST + 1)
