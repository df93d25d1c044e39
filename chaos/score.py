"""The score card of health: real jobs that fail in known ways, and what the runtime made of each.

A trial is one job of torchrun agents in which one rank fails once, at a step (`scripts/train_faulty.py`), or a control
in which nothing fails though it looks like it. The runtime has to name the right node, soon, end with the bits of a job
that nothing happened to, and do nothing at all in a control.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.follow import Event, Follower
from chaos.oracle import compare, judge
from chaos.play import Etcd, Outcome, Setting, play
from chaos.processes import leashed
from chaos.scripts import MARK
from elastic3d.health.stuck import Fault
from elastic3d.values import Layout

TRAIN_FAULTY = Path(__file__).parent / "scripts" / "train_faulty.py"

PRECISION, RECALL, CULPRITS = 1.0, 0.99, 0.98
"""Least values of each over all classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A row of the card. faults: what it may be called. bar: seconds to a verdict, 0 for a control, which has none.

    hogs: processes per processor that compute beside the job.
    """

    faults: tuple[Fault, ...] = ()
    bar: float = 0.0
    hogs: int = 0

    @property
    def control(self) -> bool:
        """Whether nothing is at fault."""
        return not self.faults


_ASTRAY = (Fault.LEFT, Fault.MISMATCH)
KINDS: Mapping[str, Kind] = {
    "stop": Kind(faults=(Fault.STOPPED,), bar=5.0),
    "gil": Kind(faults=(Fault.HELD,), bar=5.0),
    "lock": Kind(faults=(Fault.IDLE,), bar=5.0),
    "spin": Kind(faults=(Fault.SPINNING,), bar=35.0),
    "loader": Kind(faults=(Fault.LOADER,), bar=35.0),
    "skip": Kind(faults=_ASTRAY, bar=5.0),
    "order": Kind(faults=_ASTRAY, bar=5.0),
    "shape": Kind(faults=_ASTRAY, bar=5.0),
    "stall": Kind(),
    "oversubscribed": Kind(hogs=3),
}
LAYOUTS = (Layout(pp=2, dp=2), Layout(pp=1, dp=4), Layout(pp=2, dp=1), Layout(pp=1, dp=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One job: what happens to which rank after how many steps, under which layout."""

    kind: str
    rank: int
    step: int
    micro_batch: int
    layout: Layout

    @property
    def fault(self) -> str:
        """The fault as the script's option, "" for none."""
        return "" if self.kind == "oversubscribed" else f"{self.kind}:{self.rank}@{self.step}:{self.micro_batch}"

    def __str__(self) -> str:
        return f"{self.fault or self.kind} with {self.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A verdict that was told. after: seconds from the fault to it."""

    fault: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    act: bool
    after: float
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a trial. node: the one at fault. happened: whether the fault took place.

    recovered: seconds from the fault to the first step after its verdict, NaN if there was none. steps_lost: those made
    again. broken: promises of the oracle that were not kept, with those about bits.
    """

    trial: Trial
    node: str
    happened: bool
    said: tuple[Said, ...]
    recovered: float
    steps_lost: int
    same_bits: bool
    broken: tuple[str, ...] = ()

    @property
    def first(self) -> Said | None:
        """The first verdict that was acted upon."""
        return next((one for one in self.said if one.act), None)

    @property
    def named(self) -> bool:
        """Whether the first verdict names the right node, and no other."""
        return self.first is not None and self.first.nodes == (self.node,)

    @property
    def classed(self) -> bool:
        """Whether the first verdict has the right class."""
        return self.first is not None and self.first.fault in KINDS[self.trial.kind].faults

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "trial": str(self.trial),
            "node": self.node,
            "happened": self.happened,
            "verdicts": [
                {"fault": one.fault, "nodes": list(one.nodes), "act": one.act, "after": round(one.after, 2)}
                for one in self.said
            ],
            "recovered": None if math.isnan(self.recovered) else round(self.recovered, 2),
            "steps_lost": self.steps_lost,
            "same_bits": self.same_bits,
            "broken": list(self.broken),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One class over all its trials. p50, p95: seconds to a verdict, and in `recovered_p50` to the next step."""

    kind: str
    trials: int
    precision: float
    recall: float
    culprits: float
    p50: float
    p95: float
    bar: float
    recovered_p50: float
    steps_lost: int
    same_bits: int

    @property
    def passed(self) -> bool:
        """Whether every gate is passed; times are reported, since a loaded machine is not the runtime's fault."""
        gates = self.precision >= PRECISION and self.recall >= RECALL and self.culprits >= CULPRITS
        return gates and self.same_bits == self.trials


def trials(kinds: Sequence[str], count: int, seed: int, *, steps: int, most: int = 4) -> Iterator[Trial]:
    """Yield `count` trials of each kind, drawn from the seed. steps: of the job. most: nodes."""
    for kind in kinds:
        for number in range(count):
            draw = random.Random(f"{seed} {kind} {number}")
            # What leaves out an exchange, or changes one, needs somebody to exchange with.
            layouts = [one for one in LAYOUTS if one.world <= most and (kind != "skip" or one.dp > 1)]
            layout = draw.choice(layouts)
            yield Trial(
                kind=kind,
                rank=draw.randrange(layout.world),
                step=draw.randrange(4, max(5, steps // 2)),
                micro_batch=draw.randrange(2),
                layout=layout,
            )


def setting(trial: Trial | None, layout: Layout, steps: int) -> Setting:
    """Return the job of a trial, or with None the same one to which nothing happens."""
    fault = trial.fault if trial is not None else ""
    return Setting(
        nodes=layout.world,
        steps=steps,
        layout=layout,
        width=32,
        blocks=5,
        context=32,
        global_batch=16,
        micro_batch=2,
        options=("--checkpoint-every=5", *([f"--fault={fault}"] if fault else [])),
        script=TRAIN_FAULTY,
    )


def play_trial(trial: Trial, quiet: Outcome, *, etcd: Etcd, workdir: Path, steps: int) -> Result:
    """Play a trial under `workdir` and return what became of it. quiet: the same job undisturbed, of any layout."""
    with hogs(KINDS[trial.kind].hogs):
        outcome = play(setting(trial, trial.layout, steps), etcd=etcd, workdir=workdir, name=f"score-{trial.kind}")
    return read(trial, outcome, quiet, workdir)


def read(trial: Trial, outcome: Outcome, quiet: Outcome, workdir: Path) -> Result:
    """Return what became of a trial, from what it left under `workdir`."""
    events = Follower(workdir / "events").poll()
    mark = workdir / "out" / MARK
    happened = mark.exists()
    at = float(json.loads(mark.read_text())["at"]) if happened else math.nan
    first = next(iter(outcome.picture.generations), None)
    named_at = next((event.at for event in events if event.name == "rank.stuck" and event.fields.get("act")), math.inf)
    later = [step.at for step in outcome.picture.steps if step.at > named_at]
    stuck = sum(view.steps_repeated for view in outcome.picture.generations if view.cause == "stuck")
    differences = compare(outcome, quiet)
    return Result(
        trial=trial,
        node=first.nodes[trial.rank // outcome.setting.slots] if first is not None else "",
        happened=happened,
        said=tuple(_said(events, at)),
        recovered=min(later) - at if later else math.nan,
        steps_lost=stuck,
        same_bits=not differences,
        broken=(*judge(outcome).broken, *differences),
    )


def _said(events: Sequence[Event], at: float) -> Iterator[Said]:
    for event in events:
        if event.name in ("rank.stuck", "training.stalled"):
            yield Said(
                fault=str(event.fields["fault"]),
                nodes=tuple(event.fields.get("nodes") or ()),
                ranks=tuple(event.fields.get("ranks") or ()),
                act=bool(event.fields.get("act")),
                after=event.at - at,
                detail=str(event.fields.get("detail") or ""),
            )


def card(results: Sequence[Result]) -> tuple[Row, ...]:
    """Return one row for each kind.

    Precision of a class: of the verdicts that were acted upon and are called so, how many were right; in a control, 1
    if nothing was acted upon. A fault that did not take place in its job counts as one that was not found.
    """
    rows = []
    for kind in dict.fromkeys(result.trial.kind for result in results):
        own = [result for result in results if result.trial.kind == kind]
        names = set(KINDS[kind].faults)
        if KINDS[kind].control:
            quiet = sum(1 for result in own if result.first is None)
            precision = recall = culprits = quiet / len(own)
        else:
            called = [r for r in results if r.first is not None and r.first.fault in names]
            precision = _share([names & set(KINDS[r.trial.kind].faults) and r.named for r in called])
            recall = _share([r.happened and r.classed for r in own])
            culprits = _share([r.named for r in own])
        after = [result.first.after for result in own if result.first is not None]
        back = [result.recovered for result in own if not math.isnan(result.recovered)]
        rows.append(
            Row(
                kind=kind,
                trials=len(own),
                precision=precision,
                recall=recall,
                culprits=culprits,
                p50=quantile(after, 0.5),
                p95=quantile(after, 0.95),
                bar=KINDS[kind].bar,
                recovered_p50=quantile(back, 0.5),
                steps_lost=max((result.steps_lost for result in own), default=0),
                same_bits=sum(1 for result in own if result.same_bits),
            )
        )
    return tuple(rows)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed; NaN if there are none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.nan


def _share(held: Sequence[Any]) -> float:
    return sum(map(bool, held)) / len(held) if held else 1.0


def play_all(
    given: Sequence[Trial], *, etcd: Etcd, workdir: Path, steps: int, heard: Callable[[Result], None]
) -> tuple[Result, ...]:
    """Play trials one after the other; `heard` is given each result. The quiet job is played once for a world."""
    quiet: dict[int, Outcome] = {}
    results = []
    for number, trial in enumerate(given):
        world = trial.layout.world
        if world not in quiet:
            calm = setting(None, trial.layout, steps)
            quiet[world] = play(calm, etcd=etcd, workdir=workdir / f"quiet{world}", name="score-quiet")
        results.append(play_trial(trial, quiet[world], etcd=etcd, workdir=workdir / str(number), steps=steps))
        heard(results[-1])
    return tuple(results)


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Have `count` processes for each processor compute for as long as the context is open."""
    running = [
        subprocess.Popen(leashed([sys.executable, "-c", "while True: pass"]))
        for _ in range(count * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
