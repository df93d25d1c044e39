"""A fault while another one is dealt with, in a hearing, a conviction, a change for a slow node: as each alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from chaos.faults.device import Flip, SlowBlocks, Sticky
from chaos.faults.fault import Fault
from chaos.faults.moment import When
from chaos.faults.process import Kill, KillKeeper, KillTrainer
from chaos.schedules.schedule import Schedule
from chaos.score.kinds import KINDS, LONG, SETTLED
from chaos.score.playing import TRAIN_FAULTY
from chaos.score.trials import WITNESSES, pass_of
from chaos.storms.storm import Job, play_storm

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.long, pytest.mark.timeout(420)]

STEP = 8


def a_pass(kind: str) -> int:
    """Return a pass of step 8 that is compared with others."""
    return pass_of(KINDS[kind], STEP, WITNESSES)


def heard(event: str) -> When:
    """Return the moment at which any node says this first."""
    return When(event=event)


AUDITED = ("--steps=24", "--global-batch=16", "--layout=pp=1")
SLOWED = (f"--steps={LONG}", "--global-batch=16", "--layout=pp=2")


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        pytest.param(
            AUDITED,
            (
                Flip(rank=1, micro_batch=a_pass("flip"), when=When(step=STEP)),
                KillTrainer(node="node3", when=heard("audit.failed")),
            ),
            id="a trainer dies in a hearing",
        ),
        pytest.param(
            AUDITED,
            (
                Sticky(rank=1, micro_batch=a_pass("sticky"), when=When(step=STEP)),
                Kill(node="leader", when=heard("audit.failed")),
            ),
            id="the leader dies in a hearing",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            AUDITED,
            (
                Sticky(rank=1, micro_batch=a_pass("sticky"), when=When(step=STEP)),
                KillKeeper(node="rank1", when=heard("node.lying")),
            ),
            id="who is convicted dies at once",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            AUDITED,
            (
                Sticky(rank=1, micro_batch=a_pass("sticky"), when=When(step=STEP)),
                KillTrainer(node="stage0", when=heard("state.distrusted")),
            ),
            id="a trainer dies as the run goes back",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            SLOWED,
            (
                SlowBlocks(rank=1, factor=2.0, when=When(step=SETTLED)),
                KillTrainer(node="stage0", when=heard("layout.rebalanced")),
            ),
            id="a trainer dies in a change for a slow node",
            # Hundreds of steps, twice: on a busy machine a step takes most of a second.
            marks=[pytest.mark.slow, pytest.mark.timeout(1500)],
        ),
    ],
)
def test_a_second_fault_meets_the_cure_of_the_first(
    arguments: tuple[str, ...], faults: tuple[Fault, ...], tmp_path: Path
) -> None:
    """Every promise holds, with the bits of the undisturbed run, and the first one is still named."""
    common = ("--width=32", "--blocks=5", "--context=32", "--micro-batch=2", "--checkpoint-every=5")
    places = ("--out={out}", "--events={events}", "--store={store}")
    job = Job(script=str(TRAIN_FAULTY), arguments=(*arguments, *common, *places), nodes=4, seed=7)
    storm = play_storm(
        Schedule(faults=faults), job, workdir=tmp_path / "run", kept=tmp_path, console=Console(stderr=True)
    )
    logs = [f"--- {name}\n{log}" for name, log in storm.outcome.logs.items()]
    assert storm.kept, "\n".join((*storm.verdict.broken, *logs))
    assert storm.verdict.same_bits is True
    assert storm.outcome.undone == ()
