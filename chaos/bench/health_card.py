"""The score card of hundreds of faults, and minutes of controls: is whoever is at fault found, and nobody else?"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from chaos.machine.cluster import started_by
from chaos.machine.preloaded import PreloadedServer
from chaos.playing.outcome import Outcome
from chaos.playing.play import play
from chaos.score.card import CULPRITS, PRECISION, RECALL, Row, card
from chaos.score.controls import CONTROLS, Calm, Control, play_control
from chaos.score.kinds import KINDS
from chaos.score.results import Result
from chaos.score.series import EACH, counts, draw, play_all, steps_of
from chaos.score.shown import document, line
from chaos.servers.etcd import EtcdServer
from elastic3d.clock import SYSTEM

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """All classes together. faults: of which that many happened. controls: trials and jobs in which nothing failed."""

    faults: int
    controls: int
    precision: float
    recall: float
    culprits: float
    same_bits: int

    @property
    def passed(self) -> bool:
        """Whether every gate is passed."""
        gates = self.precision >= PRECISION and self.recall >= RECALL and self.culprits >= CULPRITS
        return gates and self.same_bits == self.faults + self.controls


def total(results: Sequence[Result], calm: Sequence[Calm] = ()) -> Total:
    """Return what all trials and controls together come to.

    Precision: of all that was acted upon, how much was right; what a control says without acting counts as well. What
    this machine could not try counts for nothing.
    """
    results = [result for result in results if not result.skipped]
    faults = [result for result in results if not KINDS[result.trial.kind].control]
    quiet = [result for result in results if KINDS[result.trial.kind].control]
    right = sum(result.named and result.classed for result in faults)
    acted = sum((result.first is not None) + len(result.again) for result in results) + sum(
        bool(one.alarms) for one in calm
    )
    return Total(
        faults=len(faults),
        controls=len(quiet) + len(calm),
        precision=right / acted if acted else 1.0,
        recall=_share([result.happened and result.classed for result in faults]),
        culprits=_share([result.named for result in faults]),
        same_bits=sum(result.same_bits for result in results) + sum(not one.broken for one in calm),
    )


def _share(held: Sequence[bool]) -> float:
    return sum(held) / len(held) if held else 1.0


def trials_of(count: int) -> int:
    """Return how many trials `faults` plays of all kinds for `count` faults, with its controls."""
    return sum(counts(list(KINDS), count).values()) if count else 0


def faults(count: int, *, seed: int, lanes: int, kinds: Sequence[str] = (), say: Say = print) -> tuple[Result, ...]:
    """Play `count` faults of all kinds, and the controls that may share a job with them; each told as it comes.

    Ctrl-C ends it, and what was played until then is returned.
    """
    wanted = counts(list(kinds) or list(KINDS), count)
    jobs = draw(wanted, seed, each=EACH)
    made: list[Result] = []
    of, began = sum(wanted.values()), SYSTEM.monotonic()

    def heard(result: Result) -> None:
        made.append(result)
        minutes = (SYSTEM.monotonic() - began) / 60
        say(f"{len(made)} of {of}, {minutes:.1f} min: {line(result)}")

    with tempfile.TemporaryDirectory(prefix="elastic3d-bench-") as folder:
        try:
            return play_all(jobs, workdir=Path(folder), steps=steps_of(EACH), lanes=lanes, heard=heard)
        except KeyboardInterrupt:
            say(f"ended before its time: {len(made)} of {of}")
            return tuple(made)


def controls(minutes: float, *, given: Sequence[Control] = CONTROLS, say: Say = print) -> list[Calm]:
    """Play controls in turns until they have taken so many minutes, each at least once; none at all for 0."""
    made: list[Calm] = []
    quiet: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="elastic3d-bench-") as name:
        folder = Path(name)
        while minutes and (len(made) < len(given) or sum(one.seconds for one in made) < 60 * minutes):
            control = given[len(made) % len(given)]
            if control.name not in quiet:
                quiet[control.name] = _undisturbed(control, folder / f"quiet-{control.name}")
            made.append(play_control(control, quiet[control.name], workdir=folder / str(len(made))))
            say(f"control {control.name}: {made[-1].seconds:.0f} s; {_said(made[-1])}")
    return made


def _undisturbed(control: Control, workdir: Path) -> Outcome:
    with EtcdServer() as etcd, PreloadedServer() as server, started_by(server):
        return play(control.setting(disturbed=False), etcd=etcd, workdir=workdir, name="control-quiet")


def _said(calm: Calm) -> str:
    return "; ".join((*calm.alarms, *calm.broken)) or "nobody named, nothing done, same bits"


def tables(results: Sequence[Result], calm: Sequence[Calm]) -> list[Table]:
    """Return the card by class, the controls, and the total against the gates."""
    shown = Table("class", "n", "precision", "recall", "culprit", "verdict p50", "p95", "bar", title="health: faults")
    for name in ("next step p50", "steps lost p50", "p95", "same bits"):
        shown.add_column(name)
    for row in card(results) if results else ():
        shown.add_row(*_cells(row), style="" if row.passed else "bold red")
    if not calm and not results:
        return []
    quiet = Table("controls", "minutes", "said or done", "other promises", title="health: nothing is wrong")
    for one in calm:
        quiet.add_row(one.control.name, f"{one.seconds / 60:.1f}", "; ".join(one.alarms), "; ".join(one.broken))
    whole = total(results, calm)
    gates = Table("", "measured", "gate", title=f"{whole.faults} faults, {whole.controls} controls")
    gates.add_row("precision", f"{whole.precision:.3f}", f"{PRECISION}")
    gates.add_row("recall", f"{whole.recall:.3f}", f"{RECALL}")
    gates.add_row("culprit", f"{whole.culprits:.3f}", f"{CULPRITS}")
    gates.add_row("same bits", str(whole.same_bits), f"{whole.faults + whole.controls}")
    gates.add_row("", "passed" if whole.passed else "NOT PASSED", "")
    return [shown, quiet, gates]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.kind,
        str(row.trials),
        f"{row.precision:.3f}",
        f"{row.recall:.3f}",
        f"{row.culprits:.3f}",
        _seconds(row.p50),
        _seconds(row.p95),
        f"{row.bar:.0f} s" if row.bar else "none",
        _seconds(row.recovered_p50),
        f"{row.lost_p50:.0f}",
        f"{row.lost_p95:.0f}",
        f"{row.same_bits} of {row.trials}",
    )


def _seconds(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1f} s"


def as_json(results: Sequence[Result], calm: Sequence[Calm]) -> dict[str, Any]:
    """Return every trial and control, the rows and the total."""
    whole = total(results, calm)
    return document(card(results) if results else (), results, wanted=len(results)) | {
        "total": {name: getattr(whole, name) for name in Total.__dataclass_fields__} | {"passed": whole.passed},
        "controls": [
            {"name": one.control.name, "seconds": one.seconds, "alarms": one.alarms, "broken": one.broken}
            for one in calm
        ],
    }
