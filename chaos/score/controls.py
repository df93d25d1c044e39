"""Jobs in which nothing fails though it looks like it: nobody may be named, nothing be done, and no bit differ.

Each job carries several controls one after another, for some minutes; the undisturbed job that it is compared with
takes seconds. Those of single slow nodes are not among them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from chaos.faults.etcd import EtcdPause, EtcdRestart
from chaos.faults.fault import Fault
from chaos.faults.moment import When
from chaos.faults.orders import Join
from chaos.history.follow import Follower
from chaos.judging.oracle import judge
from chaos.machine.closing import ClosingStack
from chaos.machine.cluster import started_by
from chaos.machine.hogs import hogs
from chaos.machine.preloaded import PreloadedServer
from chaos.playing.outcome import Outcome
from chaos.playing.play import play
from chaos.playing.setting import Setting
from chaos.scripts import mark_of
from chaos.servers.etcd import EtcdServer
from chaos.servers.proxied_store import proxied_store
from chaos.servers.s3_proxy import ALWAYS, Do, Harm
from elastic3d.clock import SYSTEM, Clock
from elastic3d.values import Layout

TRAIN_STRAINED = Path(__file__).parents[1] / "scripts" / "train_strained.py"

ALARMS = (
    "rank.stuck",
    "training.stalled",
    "node.slow",
    "layout.rebalanced",
    "audit.failed",
    "node.lying",
    "state.distrusted",
    "step.redone",
    "exam.failed",
    "state.altered",
    "snapshot.altered",
    "vote.split",
    "update.wrong",
)
"""Events that say that something is wrong with a rank or a node, or that something was done about it."""

EXPECTED = ("start", "join")
"""What a generation of a control may be formed for."""

LATE = 1.0
"""Seconds by which every request to the slow store is late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One job. strains: KIND:RANK@STEP of `train_strained`. faults: what is done to it from outside.

    hogs: processes per processor that compute beside it; it and they share one processor then. slow: its store answers
    every request late. pace: seconds between two steps, which the undisturbed job does without. uneven: samples differ
    in length.
    """

    name: str
    steps: int
    strains: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    hogs: int = 0
    slow: bool = False
    pace: float = 0.0
    uneven: bool = False
    layout: Layout | None = field(default_factory=lambda: Layout(pp=1, dp=2))

    def setting(self, *, disturbed: bool) -> Setting:
        """Return the job, or the same one undisturbed."""
        own = [f"--strain={strain}" for strain in self.strains] + [f"--pace={self.pace}"] if disturbed else []
        return Setting(
            nodes=2,
            steps=self.steps,
            layout=self.layout if disturbed else None,
            width=32,
            blocks=5,
            context=32,
            global_batch=7 if self.uneven else 14,
            micro_batch=1 if self.uneven else 2,
            options=("--checkpoint-every=20", *own, *(["--uneven"] if self.uneven else [])),
            script=TRAIN_STRAINED,
        )


WAITS = Control(
    name="waits",
    strains=(
        "compile:1@0",
        "stall:0@4",
        "gc:1@7",
        "stop:0@9",
        "gil:1@11",
        "eval:0@13",
        "stall:1@16",
        "gc:0@19",
        "stop:1@21",
        "gil:0@23",
        "stall:0@26",
        "eval:1@29",
        "stall:1@32",
    ),
    steps=36,
)
OUTSIDE = Control(
    name="outside",
    faults=(
        EtcdPause(seconds=12.0, when=When(step=10)),
        EtcdRestart(seconds=8.0, when=When(step=32)),
        Join(when=When(step=48)),
        Join(when=When(step=62)),
    ),
    slow=True,
    pace=1.0,
    layout=Layout(pp=1),
    steps=90,
)
CROWDED = Control(name="crowded", hogs=3, uneven=True, steps=60)
CONTROLS = (WAITS, OUTSIDE, CROWDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calm:
    """What became of a control. seconds: that it took. alarms: what was said or done though nothing was wrong.

    broken: other promises that were not kept, those about bits among them.
    """

    control: Control
    seconds: float
    alarms: tuple[str, ...]
    broken: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing was said, nothing done, and no bit differs."""
        return not self.alarms and not self.broken


def play_control(control: Control, quiet: Outcome, *, workdir: Path, clock: Clock = SYSTEM) -> Calm:
    """Play a control under `workdir`, with servers of its own. quiet: the same job undisturbed."""
    began = SYSTEM.monotonic()
    with ClosingStack() as stack:
        if control.hogs:
            stack.enter_context(one_processor())
        etcd = stack.enter_context(EtcdServer())
        stack.enter_context(started_by(stack.enter_context(PreloadedServer())))
        setting = control.setting(disturbed=True)
        if control.slow:
            late = [Harm(do=Do.DELAY, times=ALWAYS, seconds=LATE)]
            setting = replace(setting, store=stack.enter_context(proxied_store(late))[0])
        stack.enter_context(hogs(control.hogs))
        outcome = play(setting, control.faults, etcd=etcd, workdir=workdir, name="control", clock=clock)
    missing = [strain for strain in control.strains if not (workdir / "out" / mark_of(_step(strain))).exists()]
    return Calm(
        control=control,
        seconds=SYSTEM.monotonic() - began,
        alarms=alarms(outcome, workdir),
        # Its strains, its hogs and its slow store are not in the outcome; `alarms` has all that was said, whatever of.
        broken=(*judge(outcome, quiet).broken, *(f"{strain} did not happen" for strain in missing)),
    )


def alarms(outcome: Outcome, workdir: Path) -> tuple[str, ...]:
    """Return what a job said of ranks and nodes, and what generations were formed because of them."""
    said = [
        f"{event.name}: {event.fields.get('fault') or event.fields.get('finding') or ''} "
        f"{event.fields.get('detail') or ''}".strip()
        for event in Follower(workdir / "events").poll()
        if event.name in ALARMS
    ]
    formed = [
        f"generation {view.number} was formed for {view.cause}: {view.detail}"
        for view in outcome.picture.generations
        if view.cause not in EXPECTED
    ]
    return (*said, *formed)


def _step(strain: str) -> int:
    return int(strain.rpartition("@")[2])


@contextmanager
def one_processor() -> Iterator[None]:
    """Have this thread, and what it starts, run on one processor only: those of others are left alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
