"""What health costs a step: pairs of steps with and without it, one after the other in one world.

Ranks record what they are at, beat five times a second, and are watched by a process each, as their keepers do. Within
the same processes all of it is taken away for every other step: `Unrecorded` is what a script has under `health="off"`.
Neighbouring steps make a pair, in turns of either order, so that other load affects both alike. What a rank writes in a
step is also written again by itself, many times over, which gives its microseconds without any noise.

Audits are measured in a second world, in which they come as often as an eighth of the time pays for, at places drawn by
the seed; what one of them costs more than its neighbour is spread over the steps from one to the next that a run whose
budget is 1 % comes to.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import mmap
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch._C._distributed_c10d import TCPStore

from chaos.bench.gpt import GPT, Sentences, loss_fn
from chaos.bench.spread import spread
from chaos.bench.steppers import MICRO_BATCH, RATE
from elastic3d.clock import SYSTEM
from elastic3d.health import audit
from elastic3d.health.audit_schedule import begun
from elastic3d.health.options import Watching
from elastic3d.health.record import BEAT, SIZE, ProgressPage, ProgressWriter
from elastic3d.health.watch import SlotWatch
from elastic3d.port import Unrecorded
from elastic3d.training import Run
from elastic3d.training.standalone import StandalonePort
from elastic3d.values import Layout
from elastic3d.worker.processes.process import die_with_parent

LAYOUT = Layout(pp=1, dp=2, zero=1)
"""A rank for each core of a small machine."""

ROUNDS = 4
BUDGET = 0.01
OFTEN = 1 / 8
"""The budget of the world in which audits are measured."""

WARM_UP = 4
REPLAYS = 2000
"""How often what a step records is recorded again."""

PATIENCE = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Of one rank: calls of the recorder in a step, and microseconds of a step for them, for beats, and for watching.

    A step's share of the beats and of the watch's processor time goes by the seconds of a median step.
    """

    calls: int
    record: float
    beat: float
    watch: float

    @property
    def total(self) -> float:
        """Microseconds of a rank's processor for a step; the watch is another process's."""
        return self.record + self.beat


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of steps, paired, and the recording of each rank. audits: the plain step, and the audited one beside it.

    every: steps from one audit to the next under `BUDGET`, once a run knows that cost. parameters: of the model.
    """

    parameters: int
    on: tuple[float, ...]
    off: tuple[float, ...]
    recording: tuple[Recording, ...]
    plain: tuple[float, ...] = ()
    audited: tuple[float, ...] = ()
    every: int = 0

    @property
    def costs(self) -> list[float]:
        """By how many percent each step was longer with health."""
        return [100 * (on / off - 1) for on, off in zip(self.on, self.off, strict=True)]

    @property
    def audits(self) -> list[float]:
        """By how many percent audits make all steps longer under `BUDGET`, by each pair."""
        return [100 * (more / plain - 1) / self.every for plain, more in zip(self.plain, self.audited, strict=True)]


def measure(*, width: int, depth: int = 10, pairs: int, say: Callable[[str], None] = lambda text: None) -> Cost:
    """Make `pairs` pairs of steps with and without health, and as many of audited and other ones."""
    count = ROUNDS * LAYOUT.dp
    with _world(width, depth, budget=0.0) as ranks:
        parameters = max(_answer(rank) for rank in ranks)
        say(f"cost of health: {parameters / 1e6:.0f} M parameters, {pairs} pairs of steps")
        on, off = _paired(ranks, pairs)
        ask = statistics.median(off)
        for rank in ranks:
            rank.send(("recording", ask))
        recording = tuple(_answer(rank) for rank in ranks)
    plan = audit.plan(LAYOUT, budget=BUDGET, blocks=depth, counts=(count,), nodes=range(LAYOUT.world))
    with _world(width, depth, budget=OFTEN) as ranks:
        for rank in ranks:
            _answer(rank)
        say(f"cost of audits: {pairs} of them, one in {plan.every} steps with {BUDGET:.0%} if they cost their rounds")
        plain, audited = _audited(ranks, pairs)
    cost = statistics.median(more / step - 1 for step, more in zip(plain, audited, strict=True))
    known = begun(plan, budget=BUDGET, step=0, known=max(0.0, cost) / plan.share)
    return Cost(
        parameters=parameters,
        on=tuple(on),
        off=tuple(off),
        recording=recording,
        plain=tuple(plain),
        audited=tuple(audited),
        every=known.newest.every,
    )


def tables(cost: Cost) -> list[Table]:
    """Return the ratio of the pairs, and the microseconds of recording."""
    title = f"health: cost of a step, {cost.parameters / 1e6:.0f} M parameters, {LAYOUT}, {ROUNDS} micro-batches a rank"
    steps = Table("", "seconds per step", "more", title=title)
    steps.add_row("off", spread(cost.off, " s", 3), "")
    steps.add_row("on", spread(cost.on, " s", 3), spread(cost.costs, " %", 2))
    if cost.audited:
        steps.add_row("a step that is not audited", spread(cost.plain, " s", 3), "")
        audits = f"{spread(cost.audits, ' %', 2)} of all steps, one in {cost.every} audited"
        steps.add_row('an audited one, audit="1%"', spread(cost.audited, " s", 3), audits)
    rows = Table("", "µs per rank-step", title="health: recording")
    rows.add_row(
        f"record, {max(r.calls for r in cost.recording)} calls", spread([r.record for r in cost.recording], "", 0)
    )
    rows.add_row("beat", spread([r.beat for r in cost.recording], "", 0))
    rows.add_row("both", spread([r.total for r in cost.recording], "", 0))
    rows.add_row("the keeper's watch", spread([r.watch for r in cost.recording], "", 0))
    return [steps, rows]


def as_json(cost: Cost) -> dict[str, Any]:
    """Return all pairs."""
    return asdict(cost)


def pairs_of(seconds: Sequence[float], marked: Sequence[bool]) -> tuple[list[float], list[float]]:
    """Return (plain, marked) of each marked step and the plain one beside it: the one after it, else the one before."""
    plain, special = [], []
    for number, mark in enumerate(marked):
        beside = [at for at in (number + 1, number - 1) if 0 <= at < len(marked) and not marked[at]]
        if mark and beside:
            plain.append(seconds[beside[0]])
            special.append(seconds[number])
    return plain, special


def _paired(ranks: Sequence[Connection], pairs: int) -> tuple[list[float], list[float]]:
    order = [on for number in range(pairs) for on in ((True, False) if number % 2 else (False, True))]
    seconds = [_step(ranks, on)[0] for on in [True] * WARM_UP + order][WARM_UP:]
    made = list(zip(order, seconds, strict=True))
    return [took for on, took in made if on], [took for on, took in made if not on]


def _audited(ranks: Sequence[Connection], audits: int) -> tuple[list[float], list[float]]:
    for _ in range(WARM_UP):
        _step(ranks, True)
    made: list[tuple[float, bool]] = []
    while sum(audited for _, audited in made) < audits or made[-1][1]:
        made.append(_step(ranks, True))
    return pairs_of([took for took, _ in made], [audited for _, audited in made])


def _step(ranks: Sequence[Connection], on: bool) -> tuple[float, bool]:
    for rank in ranks:
        rank.send(("step", on))
    answers = [_answer(rank) for rank in ranks]
    return max(took for took, _ in answers), answers[0][1]


def _answer(rank: Connection) -> Any:
    if not rank.poll(PATIENCE):
        raise TimeoutError(f"a rank was not done with a step within {PATIENCE:g} s")
    return rank.recv()


@contextlib.contextmanager
def _world(width: int, depth: int, *, budget: float) -> Iterator[list[Connection]]:
    """Start the ranks of a world; they are gone when this returns."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["chaos.bench.health_cost"])
    processes, ranks = [], []
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        for rank in range(LAYOUT.world):
            mine, theirs = context.Pipe()
            arguments = (rank, store.port, theirs, width, depth, budget)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            processes.append(process)
            theirs.close()
            ranks.append(mine)
        yield ranks
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


class _Switch:
    """All of health on one rank: the recorder and its beat, and the process that watches them."""

    def __init__(self) -> None:
        self.page = ProgressPage()
        self.watcher = _watcher(self.page)
        self.writer = ProgressWriter(memoryview(mmap.mmap(self.page.page, SIZE)))
        self.on = True

    def turn(self, on: bool) -> None:
        if on != self.on:
            self.on = on
            # What a script has under health="off", in the place where everything that records has got it already.
            self.writer.__class__ = ProgressWriter if on else Unrecorded  # type: ignore[assignment]
            os.kill(self.watcher, signal.SIGCONT if on else signal.SIGSTOP)

    def beat(self) -> None:
        while True:
            if self.on:
                self.writer.beat(caught=True)
            SYSTEM.sleep(BEAT)


def _watcher(page: ProgressPage) -> int:
    """Fork a process that watches this one, before it has any thread; return its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent(parent)
    watch = SlotWatch(watching=Watching(act=False), silent=lambda *_: None, moving=lambda _: None)
    watch.begin(1, pid=parent, rank=0, generation="1.0", page=page)
    watch.run()
    os._exit(0)


def _rank(rank: int, port: int, pipe: Connection, width: int, depth: int, budget: float) -> None:
    switch = _Switch()
    host = StandalonePort()
    host.progress = switch.writer
    host.assignment = replace(
        host.assignment,
        rank=rank,
        world=LAYOUT.world,
        layout=LAYOUT,
        node=f"node{rank}",
        store_host="127.0.0.1",
        store_port=port,
        store_prefix="bench",
        audit=budget,
        sheets=True,
    )
    run = Run(host)
    model = run.shard(lambda: GPT(width=width, depth=depth), blocks="blocks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, foreach=True)
    global_batch = ROUNDS * LAYOUT.dp * MICRO_BATCH
    batches = run.batches(Sentences(), global_batch=global_batch, micro_batch=MICRO_BATCH)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    taken = iter(batches.until(step=1 << 30))

    def step() -> bool:
        batch = next(taken)
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
        return len(batch.micro_batches) > ROUNDS

    threading.Thread(target=switch.beat, daemon=True).start()
    pipe.send(sum(parameter.numel() for parameter in model.parameters()))
    with contextlib.suppress(EOFError):  # whoever counts the steps is gone
        while True:
            what, value = pipe.recv()
            if what == "recording":
                pipe.send(_recording(switch, step, value))
                continue
            switch.turn(value)
            before = switch.page.ticked()[0]
            dist.barrier()
            began = SYSTEM.monotonic()
            audited = step()
            dist.barrier()
            took = SYSTEM.monotonic() - began
            assert (switch.page.ticked()[0] > before) == switch.on, "a step without health was recorded"
            pipe.send((took, audited))


def _recording(switch: _Switch, step: Callable[[], bool], seconds: float) -> Recording:
    """Keep what a step records, and record it again by itself."""
    switch.turn(True)
    calls: list[Callable[[], object]] = []
    within = [False]
    kept = ProgressWriter(memoryview(bytearray(SIZE)))
    writer = switch.writer
    names = [name for name in vars(Unrecorded) if not name.startswith("_")]

    def hear(name: str) -> Callable[..., Any]:
        whole = getattr(writer, name)

        def heard(*arguments: Any, **more: Any) -> Any:
            # Methods call one another: what the outermost does includes the others.
            outermost, within[0] = not within[0], True
            if outermost:
                calls.append(functools.partial(getattr(kept, name), *arguments, **more))
            try:
                return whole(*arguments, **more)
            finally:
                within[0] = not outermost

        return heard

    watched = _cpu(switch.watcher), SYSTEM.monotonic()
    for name in names:
        setattr(writer, name, hear(name))
    step()
    for name in names:
        delattr(writer, name)
    for _ in range(2):
        step()
    used, passed = _cpu(switch.watcher) - watched[0], SYSTEM.monotonic() - watched[1]
    gc.disable()
    began = time.thread_time()
    for _ in range(REPLAYS):
        for call in calls:
            call()
    record = (time.thread_time() - began) / REPLAYS
    began = time.thread_time()
    for _ in range(REPLAYS):
        kept.beat(caught=True)
    beat = (time.thread_time() - began) / REPLAYS
    gc.enable()
    return Recording(
        calls=len(calls),
        record=1e6 * record,
        beat=1e6 * beat * max(1.0, seconds / BEAT),
        watch=1e6 * used / passed * seconds if passed else math.nan,
    )


def _cpu(pid: int) -> float:
    """Return the seconds of processor time that a process's main thread has had."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
