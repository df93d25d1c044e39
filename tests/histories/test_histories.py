"""Whatever happens to a job, its bits are those of the undisturbed run.

Real torchrun agents, a real etcd, a small GPT on real text; every history is judged by the same oracle as the demo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.faults.etcd import EtcdPause, EtcdRestart
from chaos.faults.fault import Fault
from chaos.faults.moment import When
from chaos.judging.oracle import judge
from chaos.machine.cluster import start_fresh, started_by
from chaos.playing.outcome import Outcome
from chaos.playing.play import play
from chaos.playing.setting import Setting
from chaos.schedules.scenario import parse_join, parse_kill
from chaos.servers.etcd import EtcdServer
from elastic3d.accounting.goodput import goodput
from elastic3d.accounting.node_spans import node_spans
from elastic3d.accounting.spans import Category
from elastic3d.accounting.trace import trace
from elastic3d.cli.events_folder import read_run
from elastic3d.values import Layout
from tests.accounting.written import assert_nested
from tests.histories.conftest import Quiet

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420)]

# Small, so that a step takes some tens of milliseconds, with a pause, since the job would be over within a second, and
# who watches it may wait for as long on a busy machine; three blocks and five micro-batches divide by no even number.
SMALL = Setting(
    steps=24,
    width=32,
    blocks=3,
    context=32,
    global_batch=10,
    micro_batch=2,
    options=("--checkpoint-every=5", "--pause=0.05"),
    patience=120.0,
)
# Enough blocks for four stages, or for two that have two chunks each.
FIVE = dataclasses.replace(SMALL, blocks=5)
# When a proposal is ready, or an outage is over, the job must still be training; it leaves the machine to others often.
LONG = dataclasses.replace(SMALL, steps=48, options=(*SMALL.options, "--pause=0.25"))


def faults(*texts: str) -> list[Fault]:
    """Return faults as the demo's command line has them: `@8` is a join, `1@8` a kill."""
    return [parse_join(text) if text.startswith("@") else parse_kill(text) for text in texts]


FIRST = {
    "a kill and a join at one step": ["3@10", "@10"],
}

MORE = {
    "the leader's node is killed": ["leader@8"],
    "a second kill during the first recovery": ["1@8", "2@g2"],
}

MOST = {
    "killed at the first step": ["2@1"],
    "a join nobody made room for": ["@8"],
    "nothing happens": [],
    "a node is killed": ["1@8"],
    "the node with stage 0 is killed": ["stage0@8"],
    "killed at the last step but one": ["3@23"],
    "a kill, then a join": ["1@6", "@12"],
    "two kills one after the other": ["0@6", "stage0@14"],
}


def held(outcome: Outcome, undisturbed: Outcome) -> Outcome:
    """Assert that `outcome` kept every promise, with every fault made in time, and return it."""
    verdict = judge(outcome, undisturbed)
    logs = [f"--- {name}\n{log}" for name, log in outcome.logs.items()]
    assert verdict.kept, "\n".join((*verdict.broken, *logs))
    assert verdict.same_bits is True
    assert outcome.late == ()
    return outcome


@pytest.mark.parametrize(
    "history",
    [
        *(pytest.param(history, id=name) for name, history in FIRST.items()),
        *(pytest.param(history, id=name, marks=pytest.mark.long) for name, history in MORE.items()),
        *(pytest.param(history, id=name, marks=pytest.mark.slow) for name, history in MOST.items()),
    ],
)
def test_any_history_ends_with_the_same_bits(
    history: list[str], job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """Deaths and joins at any step change nothing but time."""
    asked = faults(*history)
    outcome = held(play(SMALL, asked, etcd=job_etcd, workdir=tmp_path / "job"), quiet(SMALL))
    causes = [view.cause for view in outcome.picture.generations]
    assert causes[0] == "start"
    if not asked:
        assert causes == ["start"]


@pytest.mark.slow
def test_leaves_end_with_the_same_bits(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Whole leaves go to other nodes: five of two micro-batches each, over four, three and four nodes."""
    leaves = dataclasses.replace(SMALL, global_batch=20, options=(*SMALL.options, "--leaf=2"))
    outcome = held(play(leaves, faults("1@6", "@12"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(leaves))
    assert len(outcome.picture.generations) > 1


def test_one_death_costs_at_most_one_step(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """State comes from memory, and no step before the newest snapshot is repeated.

    Agents start as a person starts them, each an interpreter of its own; other histories fork theirs.
    """
    with started_by(start_fresh):
        outcome = play(SMALL, faults("1@8"), etcd=job_etcd, workdir=tmp_path / "job")
    held(outcome, quiet(SMALL))
    second = outcome.picture.generations[1]
    assert second.cause == "death"
    assert second.restored_from == "memory"
    assert second.steps_repeated <= 1
    assert "node1" not in second.nodes


def test_a_join_costs_no_step(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """A planned change happens at a step boundary, and the new node takes part."""
    outcome = held(play(LONG, faults("1@6", "@12"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(LONG))
    last = outcome.picture.generations[-1]
    assert (last.cause, last.steps_repeated, last.restored_from) == ("join", 0, "memory")
    assert "node4" in last.nodes
    assert_accounted(outcome, tmp_path / "job" / "events")


def assert_accounted(outcome: Outcome, events: Path) -> None:
    """Assert that the account of a job's time, read from its files, agrees with what was done to it."""
    read = read_run(events)
    spans = node_spans(read.run)
    account = goodput(read.run_id, read.run, spans, read.clocks)
    views = outcome.picture.generations
    assert [one.cause for one in account.generations] == [view.cause for view in views]
    assert [one.steps_repeated for one in account.generations] == [view.steps_repeated for view in views]
    assert account.steps == len(outcome.picture.steps)
    assert [clock.ahead for clock in account.clocks] == [0] * len(account.nodes)
    assert account.by_category[Category.UNKNOWN] < account.held / 100
    assert 0.0 < account.goodput < 1.0
    for one in account.generations[1:]:
        assert one.microseconds > 0
    assert_nested(list(trace(read.run, spans)))


def test_losing_a_node_and_its_buddy_restores_from_the_store(
    job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """Three of four nodes die at once, some node and its buddy among them: the newest checkpoint is used."""
    asked = faults("0@10", "1@10", "2@10")
    # A generation without a majority of its predecessor still has one of its members, so it does not wait long.
    outcome = held(play(SMALL, asked, etcd=job_etcd, workdir=tmp_path / "job"), quiet(SMALL))
    assert outcome.picture.generations[-1].restored_from == "store"
    assert outcome.picture.generations[-1].nodes == ("node3",)


@pytest.mark.long
def test_losing_a_zone_needs_no_checkpoint(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Two of four nodes die at once. They shared a zone, so neither was the other's buddy, and memory is enough."""
    zones = ("zone:a", "zone:a", "zone:b", "zone:b")
    setting = dataclasses.replace(SMALL, layout=Layout(pp=1), labels=zones)
    outcome = held(play(setting, faults("0@10", "1@10"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(SMALL))
    last = outcome.picture.generations[-1]
    assert (set(last.nodes), last.restored_from) == ({"node2", "node3"}, "memory")


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(layout, marks=pytest.mark.slow) for layout in (Layout(pp=1), Layout(pp=2, zero=2))), Layout(pp=4)],
    ids=str,
)
def test_any_layout_ends_with_the_same_bits(layout: Layout, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """A fixed layout, a death in it, and the planner's own choice give one digest."""
    setting = dataclasses.replace(FIVE, layout=layout)
    # A pipeline of four stages needs all four nodes.
    asked = faults() if layout.pp == 4 else faults("2@8")
    held(play(setting, asked, etcd=job_etcd, workdir=tmp_path / "job"), quiet(FIVE))


@pytest.mark.long
def test_two_slots_per_node_end_with_the_same_bits(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """With two trainers per node and a whole node lost: the bits of one trainer per node."""
    setting = dataclasses.replace(SMALL, nodes=3, slots=2)
    held(play(setting, faults("1@8"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(SMALL))


@pytest.fixture
def own_etcd() -> Iterator[EtcdServer]:
    """Run an etcd that may be broken."""
    with EtcdServer() as server:
        yield server


ETCD_FAULTS = [
    pytest.param(EtcdPause(seconds=5.0, when=When(step=8)), id="stopped for 5 s, past every lease"),
    pytest.param(EtcdRestart(seconds=0.5, when=When(step=8)), id="killed and started again", marks=pytest.mark.slow),
    pytest.param(EtcdRestart(seconds=5.0, when=When(step=8)), id="away for 5 s", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("fault", ETCD_FAULTS)
def test_a_job_survives_the_loss_of_etcd(fault: Fault, own_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Training goes on and the generation stays, even when every lease has expired meanwhile."""
    outcome = held(play(LONG, [fault], etcd=own_etcd, workdir=tmp_path / "job"), quiet(LONG))
    assert [view.cause for view in outcome.picture.generations] == ["start"]
