"""Faults one after another in one job: what makes a score card of hundreds of them affordable.

A job takes longer to start and to end than most faults take to be found. So one job meets a fault, is cured, makes some
steps, and meets the next one, on another rank. What one leaves behind must not reach the next: no machine is kept out
for holding the others up again and again (`flaps=0`), every fault meets a generation that has made enough steps to know
its own pace, and controls, whose long gaps a generation remembers, come after all faults.

A series is drawn from its seed, and says everything that happens to its job: it can be played again.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from chaos.judging.oracle import compare
from chaos.machine.cluster import started_by
from chaos.machine.preloaded import PreloadedServer
from chaos.playing.outcome import Outcome
from chaos.playing.play import play
from chaos.playing.setting import Etcd, Setting
from chaos.score.kinds import KINDS
from chaos.score.playing import Unable, play_trial, setting
from chaos.score.reading import happened_at, read
from chaos.score.results import Result, skipped
from chaos.score.trials import Trial, trials
from chaos.servers.etcd import EtcdServer
from elastic3d.clock import SYSTEM, Clock
from elastic3d.values import Layout

EACH = 10
"""Most faults of one job."""

FIRST, APART, REST = 5, (5, 7), 4
"""Steps before the first fault, the least and the most between two, and those after the last."""

ALONE = 30
"""Steps of a job with one fault, which comes in the first half of them."""

QUICK = 10.0
"""A fault whose bar is above these seconds is tried only as often as it must be."""

ENOUGH = 10
"""How often each class is tried at least, where there are enough faults for that."""

QUIET = Layout(pp=1, dp=2)
"""Layout of the undisturbed job. Every layout has to end with its bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One job and what happens to it, in the order of its steps. again: it is played for what another job missed."""

    trials: tuple[Trial, ...]
    again: bool = False

    @property
    def layout(self) -> Layout:
        """The one of all its trials."""
        return self.trials[0].layout

    def __str__(self) -> str:
        return f"{', '.join(trial.fault or trial.kind for trial in self.trials)} with {self.layout}"


def together(kind: str) -> bool:
    """Whether a fault of this kind may share its job with others: what happens to a whole job, or stays, may not."""
    row = KINDS[kind]
    return not (row.hogs or row.lies or row.hung or row.alone or row.lasts or row.late)


def steps_of(each: int) -> int:
    """Return how many steps a job must have that meets so many faults."""
    return FIRST + each * APART[1] + REST


def counts(kinds: Sequence[str], faults: int) -> dict[str, int]:
    """Return how often to try each kind, so that there are `faults` faults in all, and controls beside them.

    Every kind is tried `ENOUGH` times, or as often as the faults suffice for, at least once; what is left goes to the
    kinds found quickly that may share their jobs.
    """
    of_faults = [kind for kind in kinds if not KINDS[kind].control]
    least = max(1, min(ENOUGH, faults // max(1, len(of_faults))))
    made = dict.fromkeys(kinds, least)
    quick = [kind for kind in of_faults if KINDS[kind].bar <= QUICK and together(kind)]
    left = faults - least * len(of_faults)
    for number, kind in enumerate(quick):
        made[kind] += max(0, left // len(quick) + (number < left % len(quick)))
    return made


def draw(wanted: Mapping[str, int], seed: int, *, each: int = EACH, most: int = 4) -> tuple[Series, ...]:
    """Return the jobs that try each kind as often as is wanted. each: most faults of a job. most: nodes.

    The same arguments give the same jobs.
    """
    by_layout: dict[Layout, list[Trial]] = {}
    alone = []
    for kind, count in wanted.items():
        for trial in trials([kind], count, seed, steps=steps_of(each) if together(kind) else ALONE, most=most):
            if together(kind):
                by_layout.setdefault(trial.layout, []).append(trial)
            else:
                alone.append(Series(trials=(trial,)))
    jobs = []
    for layout in sorted(by_layout, key=str):
        order = random.Random(f"{seed} {layout}")
        given = by_layout[layout]
        order.shuffle(given)
        jobs += [Series(trials=_placed(given[first : first + each], order)) for first in range(0, len(given), each)]
    random.Random(f"{seed} jobs").shuffle(jobs)
    return (*jobs, *alone)


def _placed(given: Sequence[Trial], order: random.Random) -> tuple[Trial, ...]:
    """Return trials at steps one after another, controls last."""
    placed, step = [], FIRST
    for trial in sorted(given, key=lambda trial: KINDS[trial.kind].control):
        placed.append(replace(trial, step=step))
        step += order.randint(*APART)
    return tuple(placed)


def job(series: Series, steps: int) -> Setting:
    """Return the job of a series."""
    calm = setting(None, series.layout, steps)
    faults = [f"--fault={trial.fault}" for trial in series.trials]
    return replace(calm, options=(*calm.options, *faults), conf={**calm.conf, "flaps": "0"})


def play_series(
    series: Series, quiet: Callable[[int], Outcome], *, etcd: Etcd, workdir: Path, steps: int, clock: Clock = SYSTEM
) -> tuple[list[Result], list[Trial]]:
    """Play a job under `workdir`; return what became of its trials, and those that it ended before.

    quiet: returns the same job undisturbed, of so many steps; asked for when this one is over.
    """
    if not together(series.trials[0].kind):
        steps = setting(series.trials[0], series.layout, ALONE).steps
        try:
            result = play_trial(
                series.trials[0], lambda: quiet(steps), etcd=etcd, workdir=workdir, steps=steps, clock=clock
            )
            return [result], []
        except Unable as error:
            return [skipped(series.trials[0], str(error))], []
    outcome = play(job(series, steps), etcd=etcd, workdir=workdir, name="score-series", clock=clock)
    return read_series(series, outcome, quiet(steps), workdir)


def read_series(series: Series, outcome: Outcome, quiet: Outcome, workdir: Path) -> tuple[list[Result], list[Trial]]:
    """Return what became of the trials of a job, from what it left under `workdir`, and those that it ended before.

    What is said from one fault on belongs to it, until the next one. Where the job was given up, the last fault that
    happened is to blame; those that were over before are judged by the steps made until then.
    """
    given = series.trials
    at = [happened_at(workdir, trial.step) for trial in given]
    happened = [number for number, moment in enumerate(at) if not math.isnan(moment)]
    finished = outcome.picture.step == outcome.setting.steps
    # Of what did not happen in a job that ended early, the first one is to blame for that if nothing did.
    last = len(given) - 1 if finished else max(happened, default=0)
    results = []
    for number, trial in enumerate(given[: last + 1]):
        later = [at[one] for one in happened if one > number]
        begin = -math.inf if number == min(happened, default=0) else math.inf if math.isnan(at[number]) else at[number]
        result = read(trial, outcome, quiet, workdir, begin=begin, end=min(later, default=math.inf))
        if number < last and not finished:
            differences = _so_far(outcome, quiet)
            result = replace(result, same_bits=not differences, broken=tuple(differences))
        results.append(result)
    return results, list(given[last + 1 :])


def _so_far(outcome: Outcome, quiet: Outcome) -> list[str]:
    """Return how the steps that a job made differ from those of the undisturbed one."""
    made = outcome.picture.steps
    cut = replace(quiet, picture=replace(quiet.picture, steps=quiet.picture.steps[: len(made)]))
    return compare(replace(outcome, digest=quiet.digest), cut)


@dataclass(slots=True)
class _Work:
    """What lanes share. left: the jobs to play, by their numbers. results: of the jobs that were.

    quiet: undisturbed jobs, by their steps.
    """

    left: deque[tuple[int, Series]]
    quiet: dict[int, Future[Outcome]] = field(default_factory=dict)
    results: dict[int, list[Result]] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Stopped(Exception):
    """Somebody ended the work."""


class _Stoppable:
    """The system's clock, whose sleeps end with the work."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over
        self.monotonic, self.wall = SYSTEM.monotonic, SYSTEM.wall

    def sleep(self, seconds: float) -> None:
        if self._over.wait(seconds):
            raise _Stopped


def play_all(
    given: Sequence[Series],
    *,
    workdir: Path,
    steps: int,
    lanes: int = 1,
    heard: Callable[[Result], None] = lambda result: None,
) -> tuple[Result, ...]:
    """Play jobs under `workdir`, `lanes` of them at a time; `heard` is given each result as it comes.

    A lane has an etcd and a process that forks agents of its own. What a job ended before is played once more in
    another one. However this ends, nothing of it goes on.
    """
    work = _Work(left=deque(enumerate(given)))
    # A thread's own join may be told by Ctrl-C that a thread has ended which goes on (bpo-45274); a future is not.
    count = max(1, min(lanes, len(given)))
    with ThreadPoolExecutor(count, thread_name_prefix="lane") as pool:
        try:
            playing = [pool.submit(_lane, number, work, workdir, steps, heard) for number in range(count)]
            for lane in playing:
                lane.result()
        finally:
            work.over.set()
    return tuple(result for number in sorted(work.results) for result in work.results[number])


def _lane(number: int, work: _Work, workdir: Path, steps: int, heard: Callable[[Result], None]) -> None:
    clock = _Stoppable(work.over)
    try:
        with ExitStack() as stack:
            etcd = stack.enter_context(EtcdServer())
            # Agents that import torch each would keep a small machine busy for longer than the trials themselves.
            stack.enter_context(started_by(stack.enter_context(PreloadedServer())))

            def quiet(steps: int) -> Outcome:
                return _quiet(work, steps, etcd, workdir / f"quiet-{steps}", clock)

            if number == 0:
                quiet(steps)
            for place, series in _jobs(work):
                folder = workdir / f"{place}{'-again' if series.again else ''}"
                results, missed = play_series(series, quiet, etcd=etcd, workdir=folder, steps=steps, clock=clock)
                with work.lock:
                    if missed and not series.again:
                        work.left.append((place, Series(trials=tuple(missed), again=True)))
                    elif missed:
                        results += [_missed(trial) for trial in missed]
                    work.results.setdefault(place, []).extend(results)
                    for result in results:
                        heard(result)
    except _Stopped:
        pass
    except BaseException:
        work.over.set()
        raise


def _jobs(work: _Work) -> Iterator[tuple[int, Series]]:
    while not work.over.is_set():
        with work.lock:
            if not work.left:
                return
            one = work.left.popleft()
        yield one


def _quiet(work: _Work, steps: int, etcd: Etcd, workdir: Path, clock: Clock) -> Outcome:
    """Return the undisturbed job of so many steps, which the first lane that asks for it plays."""
    with work.lock:
        first = steps not in work.quiet
        future = work.quiet.setdefault(steps, Future())
    if first:
        calm = setting(None, QUIET, steps)
        future.set_result(play(calm, etcd=etcd, workdir=workdir, name="score-quiet", clock=clock))
    while not future.done():
        clock.sleep(0.1)
    return future.result()


def _missed(trial: Trial) -> Result:
    """Return the result of a trial that never came to pass."""
    why = f"{trial}: two jobs ended before it could happen"
    return Result(
        trial=trial, node="", happened=False, said=(), recovered=math.nan, steps_lost=0, same_bits=False, broken=(why,)
    )
