"""Runs of one job, each with a schedule and a number of nodes drawn by its own seed."""

from __future__ import annotations

import io
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from chaos.faults.catalogue import KINDS, Skipped, feasible, kind_of, lacking
from chaos.faults.fault import Need
from chaos.report.early import in_a_line, of_one_run, say
from chaos.report.random_documents import DrawnRun, RunVerdict, SkippedFault
from chaos.schedules.draw import LASTING, NAMED, ORDINARY, draw_schedule, last_step
from chaos.schedules.restart import WHY, check_restart
from chaos.schedules.restart import WORDS as RESTART_WORDS
from chaos.schedules.schedule import Schedule
from chaos.schedules.sure import ANY, fewest_nodes
from chaos.storms.storm import Job, Storm, keep, play_storm
from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import UsageError
from elastic3d.values import Layout

FEWEST = 2
"""Nodes of the smallest job: with one, hardly anything can be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """What is drawn from. words: of the catalogue. each: fewest and most faults of a run. nodes, slots: most of them.

    least: nodes that every schedule leaves. asked: the layout that the script asks for, of which schedules leave enough
    nodes as well. steps, saved: of the job, and of its first checkpoint, 0 for none.
    UsageError where no number of so many nodes will do for the layout.
    """

    words: tuple[str, ...]
    each: tuple[int, int]
    nodes: int
    slots: int = 1
    least: int = 1
    asked: Layout = ANY
    steps: int
    saved: int = 0

    def __post_init__(self) -> None:
        if not self.fitting:
            raise UsageError(
                f"the script asks for {self.asked.request()}, which {self.nodes} nodes of {self.slots} slots cannot "
                "have: give more --nodes or --slots"
            )

    @property
    def fitting(self) -> dict[int, int]:
        """The numbers of slots with which nodes can have the layout, and the fewest nodes of each, `least` or more."""
        fewest = {slots: fewest_nodes(self.asked, slots) for slots in range(1, self.slots + 1)}
        return {slots: max(nodes, self.least) for slots, nodes in fewest.items() if 0 < nodes <= self.nodes}


def draw_run(seed: int, chances: Chances, job: Job) -> tuple[Schedule, Job]:
    """Return a schedule and the job with a number of nodes and slots: the same ones of the same seed.

    UsageError where so many faults of these kinds cannot happen to the most nodes.
    """
    chance = random.Random(f"run {seed}")
    fitting = chances.fitting
    fewest = min(max(FEWEST, *fitting.values()), chances.nodes)
    nodes, slots = chance.randint(fewest, chances.nodes), chance.choice([*fitting])
    faults = chance.randint(*chances.each)
    while True:
        try:
            schedule = draw_schedule(
                seed,
                nodes=nodes,
                steps=chances.steps,
                faults=faults,
                words=chances.words,
                slots=slots,
                least=chances.least,
                asked=chances.asked,
                saved=chances.saved,
                also=(lambda faults: None) if job.resident else check_restart,
            )
        except UsageError:
            # Where that is too much for so few nodes, there are more of them.
            if nodes >= chances.nodes:
                raise
            nodes += 1
        else:
            return schedule, replace(job, nodes=nodes, slots=slots)


def words_of(
    given: str, slots: int, *, resident: bool = True, loopback: bool = False
) -> tuple[tuple[str, ...], tuple[SkippedFault, ...]]:
    """Return the words to draw from, and those that are left out: of all, what this machine or any script lacks.

    given: words with commas between, all of which are drawn, also what cannot be made here; "" for all ordinary ones.
    resident: whether the script calls `elastic3d.run`; UsageError for words that are given and cannot happen otherwise.
    loopback: whether nodes are to be no hosts of their own.
    """
    if given:
        words = tuple(word.strip() for word in given.split(","))
        for word in words:
            kind_of(word)
            if not resident and word not in RESTART_WORDS:
                raise UsageError(f"--faults {word}: {WHY}")
        return words, ()
    out: list[SkippedFault] = []
    for word, kind in KINDS.items():
        needs = kind.ABOUT.needs
        if not resident and word not in RESTART_WORDS:
            out.append(SkippedFault(fault=word, why=WHY))
            continue
        missing = [lacking(need) for need in sorted(needs)]
        if Need.SCRIPT in needs:
            missing.append("the script would have to fail by itself; --faults names it all the same")
        elif kind in LASTING:
            missing.append("it lasts as long as a small job; --faults names it all the same")
        elif kind in NAMED:
            missing.append(f"{NAMED[kind]}; --faults names it all the same")
        elif word not in ORDINARY:
            missing.append("it wakes what another one stops; --faults stop,cont draws both")
        if Need.SLOTS in needs and slots < 2:
            missing.append("nodes have one slot; give --slots 2")
        if Need.HOSTS in needs and loopback:
            missing.append("--loopback keeps the nodes from being hosts of their own")
        if why := "; ".join(filter(None, missing)):
            out.append(SkippedFault(fault=word, why=why))
    left_out = {one.fault for one in out}
    return tuple(word for word in ORDINARY if word not in left_out), tuple(out)


def saved_step(checkpoints: Sequence[int], steps: int) -> int:
    """Return the first checkpoint's step, 0 where it is one of the job's end."""
    first = min(checkpoints, default=0)
    return first if first <= last_step(steps) // 2 else 0


def play_run(schedule: Schedule, job: Job, *, kept: Path, out: Path, clock: Clock = SYSTEM) -> DrawnRun:
    """Play a drawn schedule and return what became of it; a run that failed is kept in a folder below `out`.

    kept: the folder that has the undisturbed run. Nobody is told anything meanwhile, but of an error that ends the run
    and is its own: that is said on standard error. Others are raised.
    """
    began = clock.monotonic()
    seed = schedule.seed
    assert seed is not None
    made = DrawnRun(
        seed=seed,
        nodes=job.nodes,
        slots=job.slots,
        faults=tuple(map(str, schedule.faults)),
        verdict=RunVerdict.SKIPPED,
        seconds=0.0,
        skipped=(),
        broken=(),
        generations=0,
        steps_repeated=0,
        folder=None,
    )
    makes, skips = feasible(schedule.faults, slots=job.slots, faulty=job.faulty, loopback=job.loopback)
    made = replace(made, skipped=_told(skips))
    if not makes:
        return made
    try:
        return _played(made, schedule, job, kept, out, began, clock)
    except Exception as error:
        if not of_one_run(error):
            raise
        say(error)
        seconds = round(clock.monotonic() - began, 2)
        return replace(made, verdict=RunVerdict.ERROR, seconds=seconds, error=in_a_line(error))


def _played(
    made: DrawnRun, schedule: Schedule, job: Job, kept: Path, out: Path, began: float, clock: Clock
) -> DrawnRun:
    with tempfile.TemporaryDirectory(prefix="elastic3d-chaos-") as folder:
        workdir = Path(folder)
        storm = play_storm(schedule, job, workdir=workdir, kept=kept, console=Console(file=io.StringIO()))
        where, unkept = None, ""
        if not storm.kept:
            try:
                where = keep(storm, job, out, workdir)
            except UsageError as error:
                # A promise was broken all the same.
                unkept = str(error)
    views = storm.outcome.picture.generations
    return replace(
        made,
        verdict=verdict_of(storm),
        skipped=_told(storm.skipped),
        seconds=round(clock.monotonic() - began, 2),
        broken=storm.verdict.told,
        generations=len(views),
        steps_repeated=sum(view.steps_repeated for view in views),
        folder=None if where is None else str(where),
        unkept=unkept,
    )


def _told(skips: Sequence[Skipped]) -> tuple[SkippedFault, ...]:
    return tuple(SkippedFault(fault=str(fault), why=why) for fault, why in skips)


def verdict_of(storm: Storm) -> RunVerdict:
    """Return what a storm shows."""
    if not storm.kept:
        return RunVerdict.BROKEN
    return RunVerdict.PARTLY if storm.skipped else RunVerdict.KEPT
