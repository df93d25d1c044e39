"""What became of schedules that were drawn, and of those that were made smaller: as `--json` prints it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

SCHEMA = 1


def replay_command(folder: Path | str, *options: str) -> str:
    """Return the command that plays again what is kept in a folder, as a person would type it."""
    return shlex.join(["elastic3d", "chaos", "replay", str(folder), *options])


class RunVerdict(StrEnum):
    """What a run with a drawn schedule shows: `partly` where every promise held, but of some faults only, since others
    could not be made; `skipped` where none could be made, so that nothing was played; `error` where an error ended the
    run before it was judged."""

    KEPT = "kept"
    BROKEN = "broken"
    PARTLY = "partly"
    SKIPPED = "skipped"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedFault:
    """A fault that is not made here."""

    fault: str
    """It, or its word."""
    why: str
    """What this machine, the job or the script lacks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRun:
    """One run with a drawn schedule."""

    seed: int
    """What its schedule and its nodes were drawn from."""
    nodes: int
    """Nodes that it started with."""
    slots: int
    """Trainers per node."""
    faults: tuple[str, ...]
    """Its schedule."""
    verdict: RunVerdict
    """What became of it."""
    seconds: float
    """How long it took."""
    skipped: tuple[SkippedFault, ...]
    """Faults of its schedule that were not made."""
    broken: tuple[str, ...]
    """Each broken promise: what was promised, the page that promises it, and what was seen."""
    generations: int
    """Generations that the job had."""
    steps_repeated: int
    """Steps that it made again."""
    folder: str | None
    """What is kept of a run that failed, from which it is replayed; null for others."""
    unkept: str = ""
    """Why nothing is kept of a run that failed, "" otherwise."""
    error: str = ""
    """What ended it before it was judged, "" for nothing."""

    @property
    def replay(self) -> str:
        """The command that plays it again, "" where nothing is kept of it."""
        return replay_command(self.folder) if self.folder else ""

    @property
    def shrink(self) -> str:
        """The command that looks for a smaller schedule, "" where nothing is kept of it."""
        return f"elastic3d chaos shrink {shlex.quote(self.folder)}" if self.folder else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomDocument:
    """All runs of one call of `elastic3d chaos random`."""

    script: str
    """The file of the job's script."""
    seed: int
    """The seed of the first run; each later one has the next."""
    steps: int
    """Steps of the job."""
    left_out: tuple[SkippedFault, ...]
    """Faults, by their words, that were not drawn, and why."""
    runs: tuple[DrawnRun, ...]
    """What was played, in order."""
    interrupted: bool
    """Whether it was ended before its time by Ctrl-C or another signal."""
    error: str = ""
    """What ended it before its time, with the run that was played then; "" for nothing."""

    @property
    def early(self) -> str:
        """Why not all of it was played, "" where it was."""
        return self.error or ("it was interrupted" if self.interrupted else "")

    def count(self, verdict: RunVerdict) -> int:
        """Return how many runs have a verdict."""
        return sum(run.verdict is verdict for run in self.runs)

    @property
    def seconds(self) -> float:
        """How long all runs took."""
        return sum(run.seconds for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrunkDocument:
    """The smallest schedule, of those that were tried, that still fails."""

    promise: str
    """The promise that is broken."""
    faults: tuple[str, ...]
    """What is left of the schedule; all of it where it did not fail again."""
    before: int
    """Faults that it had."""
    tries: int
    """Runs that were played, beside the first one."""
    schedule: dict[str, Any]
    """What is left, as a schedule's file of JSON has it."""
    folder: str | None
    """What is kept of its run; null where it did not fail again."""
    test: str | None
    """The file of a test that plays it."""
    early: str = ""
    """What ended the search before its time, "" for nothing: then there may be less."""
