"""The time of a step under each reduction, and beside plain torch: crews of ranks that take turns in pairs.

The crews of one comparison live at the same time and compute one after the other, a few steps each, over and over, so
that other load affects all alike; the result is the ratio of two crews' consecutive turns.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch.distributed as dist
from rich.table import Table
from torch._C._distributed_c10d import TCPStore

from chaos.bench.spread import spread
from chaos.bench.steppers import Step, Task, stepper
from elastic3d.clock import SYSTEM
from elastic3d.values import Layout

ROUNDS = (1, 2, 4, 8)
WARM_UP = 3
PATIENCE = 600.0
RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the model, and of a turn. turns: how often each crew has one. steps: in a turn."""

    width: int = 640
    depth: int = 10
    turns: int = 5
    steps: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Seconds per step of each turn, by crew; turns of one number followed one another."""

    title: str
    base: str
    seconds: dict[str, list[float]]

    def costs(self, crew: str) -> list[float]:
        """Return by how many percent each turn of a crew was longer than the base's."""
        pairs = zip(self.seconds[crew], self.seconds[self.base], strict=True)
        return [100 * (mine / base - 1) for mine, base in pairs]


def measure(size: Size, *, say: Callable[[str], None] = lambda text: None) -> list[Comparison]:
    """Return the reductions by rounds per step, then a step of ours beside torch by hand."""

    def task(layout: Layout, reduction: str, rounds: int, clip: bool = False) -> Task:
        return Task(layout=layout, reduction=reduction, rounds=rounds, width=size.width, depth=size.depth, clip=clip)

    tables = []
    each, once = Layout(pp=1, dp=RANKS, zero=2), Layout(pp=1, dp=RANKS, zero=1)
    for rounds in ROUNDS:
        crews = {
            "fast, each round": task(each, "fast", rounds),
            "fast, once a step": task(once, "fast", rounds),
            "ordered": task(each, "ordered", rounds),
        }
        tables.append(compare(f"{each}, rounds per step: {rounds}", crews, "fast, each round", size))
        say(tables[-1].title)
    for layout, clip in ((once, False), (once, True), (Layout(pp=2, dp=2, zero=1), True), (Layout(pp=4, dp=1), True)):
        rounds = 2 * layout.pp
        crews = {"torch by hand": task(layout, "", rounds, clip), "elastic3d, fast": task(layout, "fast", rounds, clip)}
        title = f"{layout}, rounds per step: {rounds}, {'clipped' if clip else 'not clipped'}"
        tables.append(compare(title, crews, "torch by hand", size))
        say(tables[-1].title)
    return tables


def tables(comparisons: Sequence[Comparison]) -> Iterator[Table]:
    """Yield the tables for people."""
    for comparison in comparisons:
        table = Table("", "seconds per step", f"against {comparison.base}", title=comparison.title)
        for crew, seconds in comparison.seconds.items():
            cost = "" if crew == comparison.base else spread(comparison.costs(crew), " %", 1)
            table.add_row(crew, spread(seconds, " s", 3), cost)
        yield table


def compare(title: str, tasks: dict[str, Task], base: str, size: Size) -> Comparison:
    """Let one crew per task take its turns."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    names = list(tasks)
    with _crews(list(tasks.values())) as crews:
        for crew in crews:
            _turn(crew, WARM_UP)
        for number in range(size.turns):
            # Every other time in reverse, so that no crew always follows the same other.
            for index in range(len(names)) if number % 2 else reversed(range(len(names))):
                seconds[names[index]].append(_turn(crews[index], size.steps))
    return Comparison(title=title, base=base, seconds=seconds)


def _turn(crew: list[Connection], steps: int) -> float:
    for pipe in crew:
        pipe.send(steps)
    answers: list[float] = []
    for pipe in crew:
        if not pipe.poll(PATIENCE):
            raise TimeoutError(f"a crew was not done with {steps} steps within {PATIENCE:g} s")
        answers.append(pipe.recv())
    return statistics.median(answers)


@contextlib.contextmanager
def _crews(tasks: Sequence[Task]) -> Iterator[list[list[Connection]]]:
    """Start the ranks of every task; they are gone when this returns."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["chaos.bench.steppers"])
    stores, processes, crews = [], [], []
    try:
        for task in tasks:
            stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            crew = []
            for rank in range(task.layout.world):
                mine, theirs = context.Pipe()
                process = context.Process(target=_rank, args=(task, rank, stores[-1].port, theirs), daemon=True)
                process.start()
                processes.append(process)
                theirs.close()
                crew.append(mine)
            crews.append(crew)
        yield crews
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _rank(task: Task, rank: int, port: int, pipe: Connection) -> None:
    step: Step = stepper(task, rank, port)
    with contextlib.suppress(EOFError):  # whoever counts the turns is gone
        while True:
            steps = pipe.recv()
            dist.barrier()
            began = SYSTEM.monotonic()
            for _ in range(steps):
                step()
            dist.barrier()
            pipe.send((SYSTEM.monotonic() - began) / steps)
