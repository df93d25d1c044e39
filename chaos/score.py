"""The score card of health: real jobs that fail in known ways, and what the runtime made of each.

A trial is a job of torchrun agents in which one rank fails, at a step (`scripts/train_faulty.py`), or a control in
which nothing fails though it looks like it; several may share a job (`series`). The runtime has to name the right node,
soon, end with the bits of a job that nothing happened to, and do nothing at all in a control.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from chaos.follow import Event, Follower
from chaos.hung_files import HungFiles
from chaos.oracle import compare, judge
from chaos.play import Etcd, Outcome, Setting, play
from chaos.processes import leashed
from chaos.scenario import Slow, When, node_name
from chaos.scripts import SECOND, mark_of
from elastic3d.health.hearing import Finding
from elastic3d.health.slow_node import SlowKind
from elastic3d.health.stuck import Fault
from elastic3d.health.trouble import KNOWN
from elastic3d.owners import Owners
from elastic3d.values import Layout

TRAIN_FAULTY = Path(__file__).parent / "scripts" / "train_faulty.py"

PRECISION, RECALL, CULPRITS = 1.0, 0.99, 0.98
"""Least values of each over all classes."""


class Unable(Exception):
    """This machine lacks what a trial needs."""


class Culprit(StrEnum):
    """Whom the first verdict has to name."""

    NODE = "node"  # the one at fault, and no other
    PAIR = "pair"  # that one, or its rank and one other
    EDGES = "edges"  # its rank, among those that wait for each other
    LIARS = "liars"  # it, and nobody but the other liar besides
    SAMPLES = "samples"  # no node, and the samples that are to be left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A row of the card. faults: what it may be called. bar: seconds to a verdict, 0 for a control, which has none.

    hogs: processes per processor that compute beside the job. together: some ranks have to do the same, as dp columns
    do. between_two: no more than two may, since in a larger group nothing says which of its connections is at fault.
    lies: a device computes wrongly; the job is audited in each step, and `steps` more may be made until it is found.
    hung: files that never answer have to be there. alone: no other fault happens in its job. options: of the script,
    besides the fault. from_step: the first step at which it can be seen. data: it is of samples, and the job has to end
    with the bits of one that leaves them out from its beginning. lasts: it goes on in a job of `LONG` steps, so that
    what is slow can be found. factor: how many times as long a node's blocks take. share: of a processor that its
    trainers may use.
    """

    faults: tuple[str, ...] = ()
    bar: float = 0.0
    hogs: int = 0
    culprit: Culprit = Culprit.NODE
    together: bool = False
    between_two: bool = False
    lies: bool = False
    steps: int = 0
    hung: bool = False
    alone: bool = False
    options: tuple[str, ...] = ()
    from_step: int = 4
    data: bool = False
    lasts: bool = False
    factor: float = 0.0
    share: float = 0.0

    @property
    def control(self) -> bool:
        """Whether nothing is at fault."""
        return not self.faults


ALTERED = "altered"
"""What the card calls bits that change in memory."""

SHORT = "out of memory"
"""What it calls memory that runs out on a rank."""

NOT_FINITE, SPIKED = "not finite", "spiked"
"""What it calls samples that bring such numbers, and a loss that jumped up."""

SHOWS, BACK = 3, 10
"""In how many steps a spike shows, and how many steps the run goes back for it."""

_AUDITED = ("--audit=100%",)
SETTLED, LONG, WORK = 48, 240, 16
"""Steps after which what lasts begins, those of such a job, and products of matrices that each of its blocks computes.

They make half a minute on two processors, of steps of a seventh of a second, where nothing is slow."""
_LONG = (f"--work={WORK}",)
_ASTRAY = (Fault.LEFT, Fault.MISMATCH)
KINDS: Mapping[str, Kind] = {
    "stop": Kind(faults=(Fault.STOPPED,), bar=5.0),
    "gil": Kind(faults=(Fault.HELD,), bar=5.0),
    "lock": Kind(faults=(Fault.IDLE,), bar=5.0),
    "blocked": Kind(faults=(Fault.BLOCKED,), bar=5.0, hung=True),
    "blackhole": Kind(faults=(Fault.LINK,), bar=5.0, culprit=Culprit.PAIR, between_two=True),
    "spin": Kind(faults=(Fault.SPINNING,), bar=35.0),
    "loader": Kind(faults=(Fault.LOADER,), bar=35.0),
    "skip": Kind(faults=_ASTRAY, bar=5.0, together=True),
    "order": Kind(faults=_ASTRAY, bar=5.0),
    "shape": Kind(faults=_ASTRAY, bar=5.0),
    "dtype": Kind(faults=_ASTRAY, bar=5.0),
    "deadlock": Kind(faults=(Fault.DEADLOCK, Fault.LEFT), bar=5.0, culprit=Culprit.EDGES, together=True),
    "flip": Kind(faults=(Finding.TRANSIENT,), bar=5.0, lies=True, options=_AUDITED),
    "forward": Kind(faults=(Finding.TRANSIENT,), bar=5.0, lies=True, options=_AUDITED),
    "backward": Kind(faults=(Finding.TRANSIENT,), bar=5.0, lies=True, options=_AUDITED),
    "auditor": Kind(faults=(Finding.TRANSIENT,), bar=5.0, lies=True, options=_AUDITED),
    "sticky": Kind(faults=(Finding.PERSISTENT,), bar=5.0, lies=True, steps=1, options=_AUDITED),
    "leader": Kind(faults=(Finding.PERSISTENT,), bar=5.0, lies=True, steps=1, options=_AUDITED),
    "liars": Kind(faults=(Finding.PERSISTENT,), bar=5.0, culprit=Culprit.LIARS, lies=True, steps=1, options=_AUDITED),
    "nandevice": Kind(faults=(Finding.PERSISTENT,), bar=5.0, lies=True, options=("--numerics=skip",)),
    "nan": Kind(
        faults=(NOT_FINITE,), bar=5.0, culprit=Culprit.SAMPLES, alone=True, data=True, options=("--numerics=skip",)
    ),
    "spike": Kind(
        faults=(SPIKED,),
        bar=5.0,
        culprit=Culprit.SAMPLES,
        alone=True,
        data=True,
        options=(f"--rollback-steps={BACK}",),
        from_step=40,
    ),
    "rest": Kind(faults=(ALTERED,), bar=5.0, alone=True),
    "memory": Kind(faults=(SHORT,), bar=5.0, alone=True),
    "slow": Kind(faults=(SlowKind.COMPUTE,), bar=60.0, lasts=True, options=_LONG, factor=1.3),
    "quota": Kind(faults=(SlowKind.COMPUTE,), bar=40.0, lasts=True, options=_LONG, share=0.4),
    "stall": Kind(),
    "oversubscribed": Kind(hogs=3),
    "tenth": Kind(lasts=True, options=_LONG, factor=1.1),
    "busy": Kind(lasts=True, options=_LONG, hogs=3),
}
_CURES = ("stuck", "lying", "spike", "balance", "out_of_memory")
_LIES = {"auditor": "flip", "leader": "sticky"}
"""Under what name the script knows a kind that is the same lie at another place."""

_GLOBAL, _MICRO, _BLOCKS, _SEED = 16, 2, 5, 17
WITNESSES = Layout(pp=1, dp=4)
"""Who lies is found where three others do the same: two that agree, and a second liar."""

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
        kind = KINDS[self.kind]
        if kind.factor:
            return f"slow:{self.rank}@{self.step}:{kind.factor}"
        if kind.hogs or kind.share:
            return ""
        rank = "leader" if self.kind == "leader" else self.rank
        return f"{_LIES.get(self.kind, self.kind)}:{rank}@{self.step}:{self.micro_batch}"

    @property
    def samples(self) -> tuple[tuple[int, int], ...]:
        """Positions of the run that are to be left out for it; none where it is not of the data."""
        if self.kind == "nan":
            first = self.step * _GLOBAL + self.micro_batch * _MICRO
            return ((first, first + _MICRO),)
        if self.kind == "spike":
            stop = self.step + SHOWS
            return (((stop - BACK) * _GLOBAL, stop * _GLOBAL),)
        return ()

    def __str__(self) -> str:
        return f"{self.fault or self.kind} with {self.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A verdict that was told, in a generation. after: seconds since the fault. step: after which, -1 if unknown.

    samples: positions that are left out for it.
    """

    fault: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    act: bool
    after: float
    detail: str
    step: int = -1
    generation: int = 1
    samples: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a trial. node: the one at fault. happened: whether the fault took place.

    recovered: seconds from the fault to the first step after its verdict, NaN if there was none. steps_lost: those made
    again. broken: promises of the oracle that were not kept, with those about bits. liar: the second node at fault.
    skipped: what this machine lacks for the trial, which was not played then and proves nothing, "" if it was.
    """

    trial: Trial
    node: str
    happened: bool
    said: tuple[Said, ...]
    recovered: float
    steps_lost: int
    same_bits: bool
    broken: tuple[str, ...] = ()
    liar: str = ""
    skipped: str = ""

    @property
    def first(self) -> Said | None:
        """The first verdict that was acted upon."""
        return next((one for one in self.said if one.act), None)

    @property
    def again(self) -> tuple[Said, ...]:
        """What was acted upon in generations after the first verdict's, where nothing happened any more."""
        first = self.first
        return tuple(one for one in self.said if first is not None and one.act and one.generation > first.generation)

    @property
    def named(self) -> bool:
        """Whether the first verdict names whom it should, and no other; of lies, whether every verdict does."""
        first, rank = self.first, self.trial.rank
        if first is None:
            return False
        match KINDS[self.trial.kind].culprit:
            case Culprit.PAIR:
                return first.nodes == (self.node,) or (rank in first.ranks and len(first.ranks) == 2)
            case Culprit.EDGES:
                return rank in first.ranks
            case Culprit.SAMPLES:
                return (first.nodes, first.samples) == ((), self.trial.samples)
            case Culprit.LIARS:
                named = {node for said in self.said if said.act for node in said.nodes}
                return bool(named) and named <= {self.node, self.liar}
            case _ if KINDS[self.trial.kind].lies:
                return all(said.nodes == (self.node,) for said in self.said if said.act)
            case _:
                return first.nodes == (self.node,)

    @property
    def classed(self) -> bool:
        """Whether the first verdict has the right class, and a lie was found in as many steps as it may take."""
        kind, first = KINDS[self.trial.kind], self.first
        if first is None or first.fault not in kind.faults:
            return False
        return not kind.lies or 0 <= first.step - self.trial.step <= kind.steps

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
            "skipped": self.skipped or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One class over all its trials. p50, p95: seconds to a verdict, and in `recovered_p50` to the next step.

    trials: those that were played; skipped: those that could not be, and count for nothing. steps_lost: the most,
    lost_p50, lost_p95: of a trial; how many were made again.
    """

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
    lost_p50: float
    lost_p95: float
    same_bits: int
    skipped: int = 0

    @property
    def passed(self) -> bool:
        """Whether it was tried, and every gate is passed; times are only reported: a loaded machine is not at fault."""
        gates = self.precision >= PRECISION and self.recall >= RECALL and self.culprits >= CULPRITS
        return gates and self.same_bits == self.trials > 0


def trials(kinds: Sequence[str], count: int, seed: int, *, steps: int, most: int = 4) -> Iterator[Trial]:
    """Yield `count` trials of each kind, drawn from the seed. steps: of the job. most: nodes."""
    for kind in kinds:
        for number in range(count):
            draw = random.Random(f"{seed} {kind} {number}")
            # What leaves out an exchange, or changes one, needs somebody to exchange with.
            row = KINDS[kind]
            layouts = [one for one in LAYOUTS if one.world <= most and (not row.together or one.dp > 1)]
            layouts = [one for one in layouts if not row.between_two or one.dp <= 2]
            layout = WITNESSES if KINDS[kind].lies else draw.choice(layouts)
            rank, step = draw.randrange(layout.world), draw.randrange(row.from_step, max(row.from_step + 1, steps // 2))
            step = SETTLED if row.lasts else step
            yield Trial(
                kind=kind,
                rank=rank,
                step=step,
                micro_batch=_audited(kind, step, layout) if KINDS[kind].lies else draw.randrange(2),
                layout=layout,
            )


def _audited(kind: str, step: int, layout: Layout) -> int:
    """Return which pass of a rank is one whose gradients are compared: its own one, or that of an audit."""
    count = _GLOBAL // _MICRO
    # It brings torch, for which nobody waits who only looks at the help.
    from elastic3d.health import audit

    plan = audit.plan(layout, budget=1.0, blocks=_BLOCKS, counts=[count], nodes=range(layout.world))
    owners = Owners(dp=layout.dp, shares=layout.shares)
    audited = audit.audit_at(plan, step, seed=_SEED, owners=owners, micro_batches=count)
    assert audited is not None
    return count // layout.dp if kind == "auditor" else audited.turns[0]


def setting(trial: Trial | None, layout: Layout, steps: int) -> Setting:
    """Return the job of a trial, or with None the same one to which nothing happens."""
    fault = trial.fault if trial is not None else ""
    more = KINDS[trial.kind].options if trial is not None else ()
    lies = trial is not None and KINDS[trial.kind].lies
    # What happens late in a job needs some steps more.
    steps = steps if trial is None else max(steps, KINDS[trial.kind].from_step + LATER)
    return Setting(
        nodes=layout.world,
        steps=steps,
        seed=_SEED,
        # Whoever lies is left out, and the others go on.
        layout=Layout(pp=layout.pp) if lies else layout,
        width=32,
        blocks=_BLOCKS,
        context=32,
        global_batch=_GLOBAL,
        micro_batch=_MICRO,
        options=("--checkpoint-every=5", *([f"--fault={fault}"] if fault else []), *more),
        script=TRAIN_FAULTY,
    )


LATER = 10
"""Steps of a job after the first one at which its fault can be seen."""


def play_trial(trial: Trial, quiet: Callable[[], Outcome], *, etcd: Etcd, workdir: Path, steps: int) -> Result:
    """Play a trial under `workdir` and return what became of it. quiet: the same job undisturbed, of any layout.

    Where samples are to be left out, that is another one, played here: it leaves them out from its beginning. Unable
    where this machine lacks what it needs.
    """
    kind, made = KINDS[trial.kind], setting(trial, trial.layout, steps)
    node = node_name(trial.rank // made.slots)
    faults = [Slow(node=node, share=kind.share, when=When(step=trial.step))] if kind.share else []
    with ExitStack() as stack:
        stack.enter_context(hogs(kind.hogs))
        if kind.hung:
            try:
                files = stack.enter_context(HungFiles(workdir / "hung"))
            except OSError as error:
                raise Unable(f"no FUSE file system can be mounted here: {error}") from error
            made = replace(made, options=(*made.options, f"--hung={files.folder}"))
        outcome = play(made, faults, etcd=etcd, workdir=workdir, name=f"score-{trial.kind}")
        if kind.data:
            calm = setting(None, Layout(pp=1, dp=2), made.steps)
            without = [f"--exclude={first}:{stop}" for first, stop in trial.samples]
            calm = replace(calm, options=(*calm.options, *without))
            return read(
                trial, outcome, play(calm, etcd=etcd, workdir=workdir / "without", name="score-without"), workdir
            )
    return read(trial, outcome, quiet(), workdir)


def read(
    trial: Trial,
    outcome: Outcome,
    quiet: Outcome,
    workdir: Path,
    *,
    begin: float = -math.inf,
    end: float = math.inf,
) -> Result:
    """Return what became of a trial, from what it left under `workdir`.

    begin, end: between which times by the wall clock all that was said is about it, where its job has other trials.
    """
    at, node = happened_at(workdir, trial.step), _marked(workdir, mark_of(trial.step))
    for done in outcome.injections:
        at, node = done.at, done.node
    events = [event for event in Follower(workdir / "events").poll() if begin <= event.at < end]
    generations = [view for view in outcome.picture.generations if not view.sealed_at > at]
    said = tuple(_said(events, at))
    named_at = next((one.after + at for one in said if one.act), math.inf)
    later = [step.at for step in outcome.picture.steps if step.at > named_at]
    causes = (*_CURES, "failure") if trial.kind == "rest" else _CURES
    cured = [v for v in outcome.picture.generations if v.cause in causes and begin <= v.sealed_at < end]
    if not node and generations:
        node = generations[-1].nodes[trial.rank // outcome.setting.slots]
    differences = compare(outcome, quiet)
    return Result(
        trial=trial,
        node=node,
        happened=not math.isnan(at),
        said=said,
        recovered=min(later) - at if later else math.nan,
        steps_lost=sum(view.steps_repeated for view in cured),
        same_bits=not differences,
        broken=(*judge(outcome).broken, *differences),
        liar=_marked(workdir, SECOND),
    )


def happened_at(workdir: Path, step: int) -> float:
    """Return when the fault of a step happened, NaN if it did not."""
    mark = workdir / "out" / mark_of(step)
    return float(json.loads(mark.read_text())["at"]) if mark.exists() else math.nan


def _marked(workdir: Path, name: str) -> str:
    """Return the node that a mark names, "" for none."""
    mark = workdir / "out" / name
    return str(json.loads(mark.read_text()).get("node") or "") if mark.exists() else ""


def _said(events: Sequence[Event], at: float) -> Iterator[Said]:
    for event in events:
        if event.name == "node.slow":
            yield Said(
                fault=str(event.fields["kind"]),
                nodes=tuple(event.fields["nodes"]),
                ranks=tuple(event.fields["ranks"]),
                act=True,
                after=event.at - at,
                detail=str(event.fields["detail"]),
                step=int(event.fields["step"]),
                generation=event.generation,
            )
        stuck, altered = event.name in ("rank.stuck", "training.stalled"), event.name == "state.altered"
        if stuck or altered or event.name == "audit.failed":
            finding = ALTERED if altered else str(event.fields.get("finding") or "")
            acted = bool(event.fields.get("acted" if altered else "act"))
            yield Said(
                fault=str(event.fields["fault"]) if stuck else finding,
                nodes=tuple(event.fields.get("nodes") or ()),
                ranks=tuple(event.fields.get("ranks") or ()),
                act=acted if stuck or altered else finding in (Finding.TRANSIENT, Finding.PERSISTENT),
                after=event.at - at,
                detail=str(event.fields.get("detail") or ""),
                step=int(event.fields.get("step", -1)),
                generation=event.generation,
            )
        if event.name == "memory.short":
            yield Said(
                fault=SHORT,
                nodes=tuple(event.fields["nodes"]),
                ranks=tuple(event.fields["ranks"]),
                act=bool(event.fields["act"]),
                after=event.at - at,
                detail=str(event.fields["detail"]),
                step=int(event.fields["step"]),
                generation=event.generation,
            )
        excluded = event.name == "batch.excluded" and event.fields.get("detail") != KNOWN
        if excluded or event.name == "run.rolled_back":
            yield Said(
                fault=NOT_FINITE if excluded else SPIKED,
                nodes=(),
                ranks=(),
                act=True,
                after=event.at - at,
                detail=str(event.fields.get("detail") or ""),
                step=int(event.fields["step"]),
                generation=event.generation,
                samples=tuple((int(first), int(stop)) for first, stop in event.fields["samples"]),
            )


def card(results: Sequence[Result]) -> tuple[Row, ...]:
    """Return one row for each kind.

    Precision of a class: of the verdicts that were acted upon and are called so, how many were right; in a control, 1
    if nothing was acted upon. A fault that did not take place in its job counts as one that was not found.
    """
    rows = []
    skipped = [result.trial.kind for result in results if result.skipped]
    kinds = dict.fromkeys(result.trial.kind for result in results)
    results = [result for result in results if not result.skipped]
    for kind in kinds:
        own = [result for result in results if result.trial.kind == kind]
        names = set(KINDS[kind].faults)
        if KINDS[kind].control:
            quiet = sum(1 for result in own if result.first is None)
            precision = recall = culprits = quiet / max(1, len(own))
        else:
            called = [r for r in results if r.first is not None and r.first.fault in names]
            right = [bool(names & set(KINDS[r.trial.kind].faults)) and r.named for r in called]
            # Whoever is named while nothing happens counts against what it is called, and where it was.
            alarms = [False for r in results for said in r.again if said.fault in names or r.trial.kind == kind]
            precision = _share([*right, *alarms])
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
                lost_p50=quantile([result.steps_lost for result in own], 0.5),
                lost_p95=quantile([result.steps_lost for result in own], 0.95),
                same_bits=sum(1 for result in own if result.same_bits),
                skipped=skipped.count(kind),
            )
        )
    return tuple(rows)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed; NaN if there are none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.nan


def _share(held: Sequence[Any]) -> float:
    return sum(map(bool, held)) / len(held) if held else 1.0


def skipped(trial: Trial, why: str) -> Result:
    """Return the result of a trial that cannot be played here."""
    return Result(
        trial=trial,
        node="",
        happened=False,
        said=(),
        recovered=math.nan,
        steps_lost=0,
        same_bits=False,
        skipped=why,
    )


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
