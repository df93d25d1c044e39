"""A trial as a real job on this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from chaos.faults.fault import Fault, node_name
from chaos.faults.moment import When
from chaos.faults.network import Delay
from chaos.faults.orders import Join
from chaos.faults.process import Slow
from chaos.machine.hogs import hogs
from chaos.machine.hung_files import HungFiles
from chaos.machine.network import Network
from chaos.playing.outcome import Outcome
from chaos.playing.play import play
from chaos.playing.setting import Etcd, Setting
from chaos.score.kinds import KINDS, LINKED, LONG, Kind
from chaos.score.reading import read
from chaos.score.results import Result
from chaos.score.trials import BLOCKS, GLOBAL_BATCH, MICRO_BATCH, SEED, Trial
from chaos.servers.etcd import EtcdServer
from elastic3d.clock import SYSTEM, Clock
from elastic3d.values import Layout

TRAIN_FAULTY = Path(__file__).parents[1] / "scripts" / "train_faulty.py"

LATER = 10
"""Steps of a job after the last one in which its fault can be found."""


class Unable(Exception):
    """This machine lacks what a trial needs."""


def setting(trial: Trial | None, layout: Layout, steps: int) -> Setting:
    """Return the job of a trial, or with None the same one to which nothing happens."""
    fault = trial.fault if trial is not None else ""
    kind = KINDS[trial.kind] if trial is not None else Kind()
    # What happens late in a job needs some steps more.
    steps = steps if trial is None else max(steps, _least(trial))
    return Setting(
        nodes=layout.world - kind.joins,
        steps=steps,
        seed=SEED,
        # Whoever lies is left out, and the others go on.
        layout=Layout(pp=layout.pp) if kind.lies else layout,
        width=32,
        blocks=BLOCKS,
        context=32,
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        options=("--checkpoint-every=5", *([f"--fault={fault}"] if fault else []), *kind.options),
        script=TRAIN_FAULTY,
    )


def _least(trial: Trial) -> int:
    """Return how many steps a trial's job must have."""
    kind = KINDS[trial.kind]
    return LONG if kind.lasts else LINKED if kind.late else trial.step + kind.steps + LATER


def quota(share: float, ranks: int) -> float:
    """Return which part of a processor a rank may use, to have `share` of what each of so many ranks has here.

    Where there are fewer processors than ranks, nobody has a whole one, and a quota above everybody's part slows down
    nobody.
    """
    return share * min(1.0, len(os.sched_getaffinity(0)) / ranks)


def play_trial(
    trial: Trial, quiet: Callable[[], Outcome], *, etcd: Etcd, workdir: Path, steps: int, clock: Clock = SYSTEM
) -> Result:
    """Play a trial under `workdir` and return what became of it. quiet: the same job undisturbed, of any layout.

    Where samples are to be left out, that is another one, played here: it leaves them out from its beginning. Unable
    where this machine lacks what it needs.
    """
    kind, made = KINDS[trial.kind], setting(trial, trial.layout, steps)
    node = node_name(trial.rank // made.slots)
    share = quota(kind.share, trial.layout.world)
    faults: list[Fault] = [Slow(node=node, share=share, when=When(step=trial.step))] if share else []
    faults += [Join(when=When(step=trial.step))] if kind.joins else []
    if kind.late:
        faults.append(Delay(node=node, late=kind.late, seconds=math.inf, when=When(step=trial.step)))
    with ExitStack() as stack:
        stack.enter_context(hogs(kind.hogs))
        if kind.late:
            try:
                network = stack.enter_context(Network())
            except OSError as error:
                raise Unable(f"nodes cannot be hosts of their own here: {error}") from error
            etcd = stack.enter_context(EtcdServer(also=network.address))
            made = replace(made, network=network)
        if kind.hung:
            try:
                files = stack.enter_context(HungFiles(workdir / "hung"))
            except OSError as error:
                raise Unable(f"no FUSE file system can be mounted here: {error}") from error
            made = replace(made, options=(*made.options, f"--hung={files.folder}"))
        outcome = play(made, faults, etcd=etcd, workdir=workdir, name=f"score-{trial.kind}", clock=clock)
        if kind.data:
            calm = setting(None, Layout(pp=1, dp=2), made.steps)
            without = [f"--exclude={first}:{stop}" for first, stop in trial.samples]
            calm = replace(calm, options=(*calm.options, *without))
            other = play(calm, etcd=etcd, workdir=workdir / "without", name="score-without", clock=clock)
            return read(trial, outcome, other, workdir)
    return read(trial, outcome, quiet(), workdir)
