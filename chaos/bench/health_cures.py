"""The cure of a slow node: how soon it is named, how soon there is another layout, and how good that is.

One of four nodes takes twice as long for its blocks from a step on. The job's steps after the cure are compared with
those of a job that began in the best layout that there is for such a node, with the same node slow from its first step
on. Blocks sleep for their passes, as beside a device: four nodes that compute would only wait for two processors.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from chaos.history.follow import Follower
from chaos.machine.cluster import started_by
from chaos.machine.preloaded import PreloadedServer
from chaos.playing.outcome import Outcome
from chaos.playing.play import play
from chaos.playing.setting import Etcd, Setting
from chaos.score.playing import TRAIN_FAULTY
from chaos.score.reading import happened_at
from chaos.servers.etcd import EtcdServer
from elastic3d.values import Layout

BAR = 1.1
"""How many times as long as in the best layout a step may take after the cure."""

SLOW, FACTOR, BEGINS, IDLE = 1, 2.0, 24, 0.004
"""The slow node's rank, how many times as long its blocks take and after how many steps, and a block's own seconds."""

BLOCKS, STEPS, LAST, DIRECT = 8, 130, 24, 40
"""Blocks of the model; steps of a job; those whose median counts, at its end; steps of one in the best layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ill:
    """A job with a slow node. began: its layout; best: the best one for the slow node; micro_batches: of each step."""

    name: str
    began: Layout
    best: Layout
    micro_batches: int


ILL = (
    Ill(name="stages", began=Layout(pp=2, dp=2), best=Layout(pp=2, dp=2, cuts=(3,)), micro_batches=8),
    Ill(
        name="shares",
        began=Layout(pp=1, dp=4, zero=2),
        best=Layout(pp=1, dp=4, zero=2, shares=(5, 2, 5, 4)),
        micro_batches=16,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """What became of one. Seconds: of a step before, while the node was slow, after the cure, and in the best layout.

    named, cured: from the fault to the verdict, and to the first step in another layout, NaN if there was none. said:
    why it was changed. broken: what was not as it must be.
    """

    name: str
    before: float
    slow: float
    after: float
    best: float
    named: float
    cured: float
    said: str
    broken: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """How many times as long as in the best layout a step takes after the cure."""
        return self.after / self.best


def measure(say: Callable[[str], None] = lambda text: None, given: Sequence[Ill] = ILL) -> list[Cure]:
    """Play each job, and the one that began in its best layout."""
    made = []
    for ill in given:
        with (
            tempfile.TemporaryDirectory(prefix="elastic3d-bench-") as folder,
            EtcdServer() as etcd,
            PreloadedServer() as agents,
            started_by(agents),
        ):
            made.append(_cured(ill, etcd, Path(folder)))
        say(f"cure of {ill.name}: {_cells(made[-1])}")
    return made


def _cured(ill: Ill, etcd: Etcd, folder: Path) -> Cure:
    plain = Setting(
        nodes=ill.began.world,
        steps=STEPS,
        layout=ill.began,
        width=32,
        blocks=BLOCKS,
        context=32,
        global_batch=2 * ill.micro_batches,
        micro_batch=2,
        options=("--checkpoint-every=0", f"--idle={IDLE}", f"--fault=slow:{SLOW}@{BEGINS}:{FACTOR}"),
        script=TRAIN_FAULTY,
    )
    outcome = play(plain, etcd=etcd, workdir=folder / "cured", name="cured")
    options = (*plain.options[:-1], f"--fault=slow:{SLOW}@0:{FACTOR}", "--health=log")
    direct = replace(plain, layout=ill.best, steps=DIRECT, options=options)
    best = play(direct, etcd=etcd, workdir=folder / "best", name="best")
    at = happened_at(folder / "cured", BEGINS)
    events = Follower(folder / "cured" / "events").poll()
    named = [event.at for event in events if event.name == "node.slow"]
    changed = [view for view in outcome.picture.generations if view.cause == "balance"]
    began = changed[0].first_step if changed else None
    first = next((step.at for step in outcome.picture.steps if step.number == began), math.nan)
    return Cure(
        name=ill.name,
        before=_seconds(outcome, 8, BEGINS),
        slow=_seconds(outcome, BEGINS + 4, BEGINS + 4 + LAST),
        # Where nothing was changed there is nothing to compare, however fast steps have become.
        after=_seconds(outcome, max(STEPS - LAST, began + 2), STEPS) if began is not None else math.nan,
        best=_seconds(best, DIRECT - LAST, DIRECT),
        named=min(named, default=math.nan) - at,
        cured=first - at,
        said=changed[0].detail if changed else "",
        broken=tuple(filter(None, (outcome.failure, best.failure, "" if changed else "nothing was changed"))),
    )


def _seconds(outcome: Outcome, first: int, stop: int) -> float:
    """Return the median time from one step to the next."""
    at = {step.number: step.at for step in outcome.picture.steps}
    gaps = [at[number] - at[number - 1] for number in range(first, stop) if number in at and number - 1 in at]
    return median(gaps) if gaps else math.nan


def _cells(cure: Cure) -> str:
    return (
        f"named after {cure.named:.0f} s, cured after {cure.cured:.0f} s; steps of {cure.before:.3f} s, "
        f"{cure.slow:.3f} s while slow, {cure.after:.3f} s after it ({cure.said}), {cure.best:.3f} s in the best "
        f"layout: {cure.ratio:.2f} times; {'; '.join(cure.broken)}"
    )


def table(cures: Sequence[Cure]) -> Table:
    """Return one row for each."""
    shown = Table(
        "", "named", "cured", "step before", "slow", "cured", "best", f"times the best (bar {BAR})", title="cures"
    )
    for cure in cures:
        steps = (f"{seconds:.3f} s" for seconds in (cure.before, cure.slow, cure.after, cure.best))
        shown.add_row(cure.name, f"{cure.named:.0f} s", f"{cure.cured:.0f} s", *steps, f"{cure.ratio:.2f}")
    return shown


def as_json(cures: Sequence[Cure]) -> list[dict[str, Any]]:
    """Return every figure."""
    return [{**asdict(cure), "ratio": cure.ratio} for cure in cures]
