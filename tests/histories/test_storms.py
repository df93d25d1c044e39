"""Schedules on a script that is not ours: every fault of the catalogue can be made, and what is promised then holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from chaos.faults.catalogue import KINDS, feasible, lacking
from chaos.faults.clock import ClockJump
from chaos.faults.code import RaisedByNewcomer
from chaos.faults.data import LEAST, Spike
from chaos.faults.device import Update
from chaos.faults.etcd import EtcdCertificate, EtcdFull, EtcdMemberRestart, EtcdPassword, EtcdPause, EtcdSlow
from chaos.faults.fault import Fault, Need, OfNode, Place
from chaos.faults.memory import AllSnapshotFlips, SnapshotFlip, Squeeze
from chaos.faults.moment import Phase, When
from chaos.faults.network import Cut, Delay, HalfOpen, Loss, Narrow, Reset
from chaos.faults.orders import Drain, Join
from chaos.faults.process import Continue, Kill, KillLoader, KillTrainer, Stop
from chaos.faults.script import InScript
from chaos.faults.store import StoreBusy, StoreStale
from chaos.playing.setting import TRAIN_GPT
from chaos.schedules.schedule import Schedule
from chaos.score.kinds import KINDS as SCORED
from chaos.score.playing import TRAIN_FAULTY
from chaos.score.trials import WITNESSES, pass_of, rechecked
from chaos.storms.storm import Job, Storm, keep, kept_storm, play_storm
from checkpointing import open_checkpoint, open_store, verify
from elastic3d.errors import UsageError
from tests.chaos.pages import Page

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420)]

SMALL = ("--width=32", "--blocks=5", "--context=32", "--global-batch=16", "--micro-batch=2", "--checkpoint-every=5")
QUICK = (
    *("--steps=40", "--width=16", "--blocks=3", "--context=16", "--global-batch=8", "--micro-batch=2"),
    *("--checkpoint-every=5", "--pause=0.15", "--seed={seed}"),
)
EIGHT = When(step=8)


@pytest.fixture(scope="session")
def quiet_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which undisturbed runs are kept."""
    return tmp_path_factory.mktemp("quiet")


def played(job: Job, schedule: Schedule, kept: Path, folder: Path) -> Storm:
    """Return what became of a schedule, of which every promise held."""
    storm = play_storm(schedule, job, workdir=folder, kept=kept, console=Console(stderr=True))
    logs = [f"--- {name}\n{log}" for name, log in storm.outcome.logs.items()]
    assert storm.kept, "\n".join((*storm.verdict.broken, *logs))
    assert storm.verdict.same_bits is True
    assert storm.outcome.unmet == ()
    assert {fault for fault, _ in storm.outcome.made} == {*schedule.faults} - {fault for fault, _ in storm.skipped}
    return storm


@pytest.mark.long
def test_a_storm_of_several_faults_and_its_replay(quiet_runs: Path, tmp_path: Path) -> None:
    """A trainer dies in the recovery from a node's death, and a node comes: the bits of the undisturbed run.

    The script is run as it is, and what is kept of the run is the same schedule and job.
    """
    job = Job(script=str(TRAIN_GPT), arguments=QUICK, nodes=3, seed=7)
    faults = (
        Kill(node="node1", when=EIGHT),
        KillTrainer(node="stage0", when=When(generation=2, phase=Phase.STARTED)),
        Join(when=When(event="peer.lost")),
    )
    storm = played(job, Schedule(faults=faults), quiet_runs, tmp_path)
    causes = [view.cause for view in storm.outcome.picture.generations]
    assert causes[:2] == ["start", "death"]
    assert len(causes) > 2
    folder = keep(storm, job, tmp_path / "out", tmp_path)
    assert kept_storm(folder) == (Schedule(faults=faults), job)
    words = Page((folder / "report.html").read_text()).words
    assert "Every promise held: after 3 faults the job ended with the bits of a run that nothing happened to" in words
    assert f"elastic3d chaos replay {folder}" in words


@pytest.mark.long
@pytest.mark.netns
def test_a_node_whose_cable_is_pulled(quiet_runs: Path, tmp_path: Path) -> None:
    """Each node is a host of its own. The others go on without it, and it comes back: the same bits.

    The store, which is busy now and then, is an object store that hosts reach.
    """
    if why := lacking(Need.HOSTS):
        pytest.skip(why)
    job = Job(script=str(TRAIN_GPT), arguments=QUICK, nodes=3, seed=7)
    schedule = Schedule(faults=(StoreBusy(when=When(step=3), times=3), Cut(node="node1", when=EIGHT, seconds=6.0)))
    storm = played(job, schedule, quiet_runs, tmp_path)
    first, second = storm.outcome.picture.generations[:2]
    assert (first.cause, second.cause) == ("start", "death")
    assert "node1" not in second.nodes


@pytest.mark.long
@pytest.mark.netns
def test_bad_cables_cost_time_and_no_step(quiet_runs: Path, tmp_path: Path) -> None:
    """One is late, one loses packets, one is slow: no generation is formed for that.

    One is where connections are reset, and where they carry nothing any more; of the same nodes.
    """
    if why := lacking(Need.HOSTS):
        pytest.skip(why)
    job = Job(script=str(TRAIN_GPT), arguments=QUICK, nodes=3, seed=7)
    faults = (
        Delay(node="node1", when=EIGHT, seconds=2.0, late=0.02),
        Loss(node="node2", when=When(step=12), seconds=2.0),
        Narrow(node="node0", when=When(step=16), seconds=2.0),
        Reset(node="stage0", when=When(step=24)),
        HalfOpen(node="node1", when=When(step=32)),
    )
    storm = played(job, Schedule(faults=faults), quiet_runs, tmp_path)
    generations = storm.outcome.picture.generations
    assert [view.cause for view in generations] == ["start", "failure", "stuck"]
    assert all(len(view.nodes) == 3 for view in generations)


@pytest.mark.slow
def test_what_is_done_to_etcd_may_overlap(quiet_runs: Path, tmp_path: Path) -> None:
    """It is filled and stopped, and gets another password, and back in order; then a node is drained."""
    job = Job(script=str(TRAIN_GPT), arguments=QUICK, nodes=3, seed=7)
    faults = (
        EtcdFull(when=EIGHT, seconds=1.0),
        EtcdPause(when=EIGHT, seconds=4.0),
        EtcdPassword(when=EIGHT, seconds=1.0),
        Drain(node="node1", when=When(step=12)),
    )
    storm = played(job, Schedule(faults=faults), quiet_runs, tmp_path)
    assert [view.cause for view in storm.outcome.picture.generations] == ["start", "drain"]


@pytest.mark.slow
def test_a_job_trains_on_while_its_etcd_is_slow_or_without_a_certificate(quiet_runs: Path, tmp_path: Path) -> None:
    """With new certificates, the nodes' too, a node that dies is noticed, and a new one is let in."""
    job = Job(script=str(TRAIN_GPT), arguments=QUICK, nodes=3, seed=7)
    faults = (
        EtcdSlow(when=EIGHT, seconds=4.0),
        EtcdCertificate(when=When(step=12), seconds=2.0),
        Kill(node="node1", when=When(step=20)),
        Join(when=When(step=24)),
    )
    storm = played(job, Schedule(faults=faults), quiet_runs, tmp_path)
    assert [view.cause for view in storm.outcome.picture.generations] == ["start", "death", "join"]


@pytest.mark.slow
def test_clocks_that_jump(quiet_runs: Path, tmp_path: Path) -> None:
    """The leader's by an hour forwards, others' back: no generation for that, nobody is named, all is saved.

    So many steps later a trainer dies, and with the clocks two hours apart all go on from memory.
    """
    if why := lacking(Need.COMPILER):
        pytest.skip(why)
    job = Job(script=str(TRAIN_GPT), arguments=("--steps=40", *SMALL, "--pause=0.15", "--seed={seed}"), nodes=3, seed=7)
    faults = (
        ClockJump(node="leader", when=EIGHT, seconds=3600.0),
        *(ClockJump(node=f"node{number}", when=When(step=10), seconds=-3600.0) for number in range(2)),
        KillTrainer(node="rank0", when=When(step=28)),
    )
    storm = played(job, Schedule(faults=faults), quiet_runs, tmp_path)
    picture = storm.outcome.picture
    assert [(view.cause, view.restored_from) for view in picture.generations] == [
        ("start", "none"),
        ("failure", "memory"),
    ]
    assert picture.accused == ()
    assert {round((event.fields["at"] - event.at) / 3600) for event in storm.events} >= {0, -1}
    # What was written by wrong clocks is told in the right order.
    assert [step.number for step in sorted(picture.steps, key=lambda step: step.at)] == [*range(1, 41)]
    store = open_store(storm.outcome.store, write=False)
    assert open_checkpoint(store).step == 40
    assert [finding for finding in verify(store) if finding.checkpoints] == []


@pytest.mark.long
def test_a_node_whose_memory_is_squeezed(quiet_runs: Path, tmp_path: Path) -> None:
    """One of three has too little for what blocks keep: its trainer is killed until they are computed again.

    Its keeper lives on, with its snapshots.
    """
    if why := lacking(Need.GROUP):
        pytest.skip(why)
    job = Job(script=str(Path(__file__).parent / "scripts" / "squeezed.py"), arguments=("5", "0.3"), nodes=3, seed=7)
    squeeze = Squeeze(node="node1", when=When(step=2), room=150.0)
    storm = played(job, Schedule(faults=(squeeze,)), quiet_runs, tmp_path)
    generations = storm.outcome.picture.generations
    assert [view.cause for view in generations] == ["start", "out_of_memory", "out_of_memory"]
    assert [view.restored_from for view in generations] == ["none", "memory", "memory"]
    assert all({*view.nodes} == {"node0", "node1", "node2"} for view in generations)
    (notice,) = storm.notices
    assert (notice.detector, notice.after is not None) == ("memory.short", True)


@pytest.mark.long
def test_bits_that_flip_in_a_nodes_snapshots(quiet_runs: Path, tmp_path: Path) -> None:
    """Every tile of one node is damaged as all read theirs: copies elsewhere are used, and no more is done again."""
    flips = SnapshotFlip(node="node1", when=EIGHT)
    storm = played(
        Job(script=str(TRAIN_GPT), arguments=QUICK, nodes=3, seed=7), Schedule(faults=(flips,)), quiet_runs, tmp_path
    )
    generations = storm.outcome.picture.generations
    assert [view.restored_from for view in generations] == ["none", "memory"]
    assert generations[1].steps_repeated <= 2
    (notice,) = storm.notices
    assert (notice.detector, notice.after is not None) == ("copy.damaged", True)


@pytest.mark.slow
def test_bits_that_flip_in_all_snapshots_before_there_is_a_checkpoint(quiet_runs: Path, tmp_path: Path) -> None:
    """The job ends on all nodes and says which step was lost, and nothing begins again in silence."""
    job = Job(script=str(TRAIN_GPT), arguments=(*QUICK, "--checkpoint-every=30"), nodes=3, seed=7)
    flips = AllSnapshotFlips(when=EIGHT)
    storm = played(job, Schedule(faults=(flips,)), quiet_runs, tmp_path)
    assert 8 <= storm.outcome.picture.step < 30
    assert storm.outcome.picture.checkpoints == ()
    assert set(storm.outcome.exit_codes.values()) == {1}


def one_of(kind: type[Fault]) -> tuple[Fault, ...]:
    """Return a fault of a kind at step 8, and what it needs to have happened before."""
    if kind is Continue:
        return Stop(node="node1", when=EIGHT), Continue(node="node1", when=When(event="generation.sealed", count=4))
    if kind is RaisedByNewcomer:
        return RaisedByNewcomer(when=EIGHT), Join(when=EIGHT)
    fault = dataclasses.replace(kind.drawn(Random(kind.WORD), nodes=4, steps=80), when=EIGHT)
    if kind is StoreStale:
        # A node lists the store when it has committed for the first time, and then after minutes.
        return fault, Kill(node="leader", when=EIGHT)
    if isinstance(fault, OfNode):
        fault = dataclasses.replace(fault, node="node1")
    if isinstance(fault, Spike):
        return (dataclasses.replace(fault, when=When(step=LEAST)),)
    if isinstance(fault, Update):
        return (dataclasses.replace(fault, rank=1, when=When(step=rechecked(EIGHT.step))),)
    if isinstance(fault, InScript):
        audited = any(option.startswith("--audit") for option in fault.OPTIONS)
        micro_batch = pass_of(SCORED[kind.WORD], EIGHT.step, WITNESSES) if audited else 1
        fault = dataclasses.replace(fault, rank=1, micro_batch=micro_batch)
    if isinstance(fault, EtcdMemberRestart):
        fault = dataclasses.replace(fault, members=1)
    return (fault,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.WORD)
def test_every_fault_of_the_catalogue_can_be_made(kind: type[Fault], quiet_runs: Path, tmp_path: Path) -> None:
    """Alone, in a job of four nodes; what is promised for it holds. What this machine lacks is named."""
    slots = 2 if kind.WORD == "kill-companion" else 1
    # Lies are found where three others do the same, and a broken connection where a group has two ends. A fifth node is
    # a spare of two stages, whose code never runs.
    layout = "pp=1" if kind.ABOUT.place is Place.DEVICE or kind is RaisedByNewcomer else "pp=2"
    arguments = ("--steps=80", *SMALL, f"--layout={layout}", "--out={out}", "--events={events}", "--store={store}")
    if kind is KillLoader:
        arguments += ("--workers=1",)
    job = Job(script=str(TRAIN_FAULTY), arguments=arguments, nodes=4 // slots, slots=slots, seed=7)
    schedule = Schedule(faults=one_of(kind))
    _, skipped = feasible(schedule.faults, slots=slots, faulty=True)
    if skipped:
        with pytest.raises(UsageError, match="nothing is left of the schedule"):
            play_storm(schedule, job, workdir=tmp_path, kept=quiet_runs, console=Console(stderr=True))
    else:
        played(job, schedule, quiet_runs, tmp_path)
