"""Who is slow, on timelines that the planner plays: whoever takes longer for the same work, and nobody else."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.health import noise as noises
from elastic3d.health import sheet
from elastic3d.health.sheet import StepSheet
from elastic3d.health.slow_node import SlowKind, SlowNode, SpeedFinding
from elastic3d.health.speeds import Speeds
from elastic3d.planner.placement import place_of
from elastic3d.planner.schedules import rank_of_stage
from elastic3d.planner.timeline import StageCost, play
from elastic3d.values import Layout, Schedule

ROUNDS = 8
UNEVEN = (5.0, 4.0, 4.0, 3.0)
HEAVY_HEAD = (1.0, 1.0, 1.0, 1.4)


def layout(pp: int, dp: int = 1) -> Layout:
    return Layout(pp=pp, dp=dp, schedule=Schedule.ONE_F_ONE_B if pp > 1 else None)


@dataclass(kw_only=True)
class Job:
    """A job whose steps are played, eight at a time. work: of each stage; slow: factor of each node, by name.

    unit: seconds of one unit of work, forward. blocks: of each stage, where blocks are alike; () where they are not.
    beside: share of a slow node's passes that is before and after its blocks, and takes no longer. noise: of one rank's
    eight steps, by its place on pp. data: seconds of waiting for the loader, by node.
    """

    layout: Layout
    work: Sequence[float]
    unit: float = 0.02
    blocks: Sequence[int] = ()
    beside: float = 0.0
    slow: dict[str, float] = field(default_factory=dict)
    data: dict[str, float] = field(default_factory=dict)
    noise: Callable[[int], float] = lambda pp: 0.01
    speeds: Speeds = field(default_factory=lambda: Speeds(1.15))
    nodes: tuple[str, ...] = ()
    said: list[SpeedFinding] = field(default_factory=list)
    at: int = 0
    seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.begin(self.nodes or tuple(f"n{rank}" for rank in range(self.layout.world)))

    def begin(self, nodes: Sequence[str], key: str = "1.0") -> None:
        self.nodes = tuple(nodes)
        self.speeds.begin(key, self.layout, self.nodes)

    def run(self, seconds: float, *, longer: float = 1.0) -> None:
        """Make steps for so many seconds. longer: how many times as long the first row takes everywhere."""
        until = self.seconds + seconds
        while self.seconds < until:
            sheets = self.row(longer)
            longer = 1.0
            for vote in range(self.at + 1, self.at + sheet.EVERY + 1):
                rows = [sheets[rank].row for rank in sheet.speakers(vote, self.layout.world)]
                said = self.speeds.heard(vote, rows)
                if said is not None:
                    self.said.append(said)
            self.at += sheet.EVERY
            self.seconds += sheet.EVERY * sheets[0].total

    def row(self, longer: float = 1.0) -> list[StepSheet]:
        pp, dp = self.layout.pp, self.layout.dp
        busy, ends = {}, {}
        factors = [
            self.slow.get(node, 1.0) * max(0.1, self.draw.gauss(1, self.noise(place_of(rank, self.layout).pp))) * longer
            for rank, node in enumerate(self.nodes)
        ]
        for column in range(dp):
            costs = []
            for stage in range(self.layout.stages):
                factor = factors[rank_of_stage(self.layout, stage) * dp + column]
                each = self.work[stage] * self.unit * (1 + (1 - self.beside) * (factor - 1))
                costs.append(StageCost(forward=each, input=each, weight=each))
            for index, works in enumerate(play(self.layout, ROUNDS, costs)):
                rank = index * dp + column
                busy[rank], ends[rank] = sum(one.end - one.start for one in works), works[-1].end
        data = [
            self.data.get(node, 0.001) if place_of(rank, self.layout).pp in (0, pp - 1) else 0.0
            for rank, node in enumerate(self.nodes)
        ]
        total = max(ends[rank] + data[rank] for rank in ends) + 0.01
        return [
            StepSheet(
                work=self.work[place_of(rank, self.layout).pp],
                rounds=ROUNDS,
                forward=busy[rank] / 3,
                backward=2 * busy[rank] / 3,
                data=data[rank],
                update=0.01,
                wait_pp=total - busy[rank] - data[rank] - 0.01,
                block=self.block(place_of(rank, self.layout).pp, factors[rank]),
                read=1e7 * data[rank],
            )
            for rank in range(self.layout.world)
        ]

    def block(self, stage: int, factor: float) -> float:
        """What a pass of one block takes: a unit of work of those of which the rest is before and after the blocks."""
        if not self.blocks:
            return 0.0
        # A third of what a rank computes is measured less well than all of it.
        return self.unit * factor * max(0.1, self.draw.gauss(1, self.noise(stage)))

    @property
    def slow_now(self) -> Mapping[str, SlowNode]:
        return self.speeds.slow

    @property
    def ever(self) -> set[str]:
        return {node.id for said in self.said for node in said.entered}


@settings(max_examples=20, deadline=None)
@given(
    work=st.sampled_from([UNEVEN, HEAVY_HEAD, (1.0, 1.0, 1.0, 1.0), (3.0, 1.0), (1.0,), (1.0, 2.0)]),
    dp=st.sampled_from([1, 2, 4]),
    unit=st.sampled_from([0.01, 0.05]),
    noise=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 99),
)
def test_nobody_is_slow_where_nobody_is(work: tuple[float, ...], dp: int, unit: float, noise: float, seed: int) -> None:
    """However unevenly stages are cut, whatever the noise, and though all become slower together."""
    job = Job(layout=layout(len(work), dp), work=work, unit=unit, noise=lambda pp: noise, seed=seed)
    long = max(80.0, 5 * sheet.EVERY * job.row()[0].total)
    job.run(long)
    job.slow = dict.fromkeys(job.nodes, 1.5)
    job.run(long)
    assert not job.ever
    assert job.said or job.layout.world == 1
    assert all(not said.slow for said in job.said)


@pytest.mark.parametrize("work", [(3.0, 1.0), (1.0, 1.0, 1.0, 1.0)])
def test_much_noise_names_nobody_more_often_than_is_said(work: tuple[float, ...]) -> None:
    """Three hours of training: by chance somebody is named once in `SELDOM` seconds at most, so once here at most."""
    names = 0
    for seed in range(40):
        job = Job(layout=layout(len(work), 2), work=work, unit=0.05, noise=lambda pp: 0.1, seed=seed)
        job.run(280)
        names += len(job.ever)
    assert names <= 1


def test_three_windows_that_are_alike_by_chance_make_nobody_slow() -> None:
    """A row takes twelve seconds, so that three are enough; of n12 they happen to be long, by almost the same."""
    job = Job(layout=layout(4, 4), work=UNEVEN, unit=0.01, noise=lambda pp: 0.1, seed=98)
    job.row()
    job.run(80)
    assert job.said
    assert not job.ever


def named(dp: int, noise: float, jobs: int) -> int:
    """Return in how many short jobs of long steps a node is named though none is slow."""
    total = 0
    for seed in range(jobs):
        job = Job(layout=layout(1, dp), work=(1.0,), unit=0.06, noise=lambda pp: noise, seed=seed)
        job.run(100)
        total += bool(job.ever)
    return total


@pytest.mark.parametrize("noise", [0.1, 0.2])
def test_few_long_windows_name_nobody_though_they_differ_much(noise: float) -> None:
    """In three hundred jobs of eight windows, or eight hours of training, of which a third of an alarm is allowed."""
    assert named(4, noise, jobs=300) == 0


def test_a_multiple_for_noise_that_is_known_would_name_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: five times the standard error, from however few windows that is known."""
    assert named(2, 0.2, jobs=150) == 0
    monkeypatch.setattr(noises, "student", lambda chance, freedom: 5.0)
    assert named(2, 0.2, jobs=150) > 0


@pytest.mark.parametrize("seed", [64, 136])
def test_what_a_stage_usually_takes_is_noisy_too(seed: int) -> None:
    """It is known from few windows, and whatever it is off by is in all that are compared with it."""
    job = Job(layout=layout(2), work=(1.0, 1.0), noise=lambda pp: 0.2, seed=seed)
    job.run(160)
    assert not job.ever


def test_two_nodes_know_no_more_of_the_noise_than_one() -> None:
    """What they differ by is one number; n1's first three windows are short by chance, so that later ones seem late."""
    job = Job(layout=layout(2), work=(1.0, 1.0), noise=lambda pp: 0.2, seed=68)
    job.run(200)
    assert not job.ever


@settings(max_examples=20, deadline=None)
@given(
    work=st.sampled_from([UNEVEN, HEAVY_HEAD, (1.0, 1.0, 1.0, 1.0), (3.0, 1.0), (1.0,)]),
    dp=st.sampled_from([2, 4]),
    unit=st.sampled_from([0.01, 0.05]),
    factor=st.sampled_from([1.3, 1.5, 3.0]),
    data=st.data(),
)
def test_the_slow_node_is_named_within_a_minute(
    work: tuple[float, ...], dp: int, unit: float, factor: float, data: st.DataObject
) -> None:
    """From the first step on, beside others that do the same work; its factor is what it is."""
    job = Job(layout=layout(len(work), dp), work=work, unit=unit)
    culprit = data.draw(st.sampled_from(job.nodes))
    job.slow[culprit] = factor
    row = sheet.EVERY * job.row()[0].total
    job.run(max(60.0, 5 * row))
    assert job.ever == {culprit}
    node = job.slow_now[culprit]
    assert node.kind is SlowKind.COMPUTE
    assert node.rho == pytest.approx(factor, rel=0.1)
    assert node.ranks == (job.nodes.index(culprit),)


def test_a_tenth_is_no_slow_node() -> None:
    """What the option leaves is nobody's business."""
    job = Job(layout=layout(2, 2), work=(1.0, 1.0), slow={"n1": 1.1})
    job.run(200)
    assert not job.ever


@pytest.mark.parametrize("work", [UNEVEN, HEAVY_HEAD])
@pytest.mark.parametrize("rank", range(4))
def test_alone_with_its_place_a_node_is_named_that_becomes_slow(work: tuple[float, ...], rank: int) -> None:
    """Where least waiting would name another one."""
    job = Job(layout=layout(4), work=work)
    job.run(60)
    job.slow[f"n{rank}"] = 1.3
    job.run(70)
    assert job.ever == {f"n{rank}"}


def test_inner_stages_of_one_size_are_compared_with_each_other() -> None:
    """One of them is found to be slow from the first step on, without data parallelism."""
    job = Job(layout=layout(5), work=(5.0, 4.0, 4.0, 4.0, 3.0), unit=0.005, slow={"n2": 1.3})
    job.run(60)
    assert job.ever == {"n2"}


ALONE = {
    "a block more": ((3.0, 2.0), (3, 2)),
    "a heavy head": ((2.0, 4.5), (2, 3)),
    "few blocks": ((4.0, 1.2), (4, 1)),
}
"""Stages that one node each holds: their work, in that of a block, and their blocks."""


@pytest.mark.parametrize("factor", [1.3, 2.0])
@pytest.mark.parametrize("culprit", ["n0", "n1"])
@pytest.mark.parametrize("stages", ALONE)
def test_of_two_stages_the_node_is_named_whose_blocks_take_longer(stages: str, culprit: str, factor: float) -> None:
    """Nobody else holds its stage; a third of what it computes is before and after its blocks, and is not slow."""
    work, blocks = ALONE[stages]
    job = Job(layout=layout(2), work=work, blocks=blocks, unit=0.002, noise=lambda pp: 0.03)
    job.run(20)
    job.slow[culprit], job.beside = factor, 0.33
    job.run(60)
    assert job.ever == {culprit}
    assert job.slow_now[culprit].kind is SlowKind.COMPUTE
    assert job.slow_now[culprit].rho == pytest.approx(factor, rel=0.1)
    job.slow.clear()
    job.run(120)
    assert not job.slow_now
    assert job.ever == {culprit}


@pytest.mark.parametrize("culprit", ["n0", "n1"])
@pytest.mark.parametrize("stages", ALONE)
def test_of_two_stages_a_node_is_named_that_is_slow_from_the_first_step_on(stages: str, culprit: str) -> None:
    """A block is the same work everywhere. Once it is well it is well, and the other one is not slow instead."""
    work, blocks = ALONE[stages]
    job = Job(layout=layout(2), work=work, blocks=blocks, unit=0.004, slow={culprit: 1.8}, noise=lambda pp: 0.03)
    job.run(60)
    assert job.ever == {culprit}
    assert job.slow_now[culprit].rho == pytest.approx(1.8, rel=0.1)
    job.begin(job.nodes, "2.0")
    job.run(90)
    assert set(job.slow_now) == {culprit}
    assert job.slow_now[culprit].rho == pytest.approx(1.8, rel=0.1)
    job.slow.clear()
    job.run(120)
    assert not job.slow_now
    assert job.ever == {culprit}


@pytest.mark.parametrize("factor", [1.0, 1.1])
@pytest.mark.parametrize("stages", ALONE)
def test_unequal_stages_are_no_fault(stages: str, factor: float) -> None:
    """For ten minutes on a busy host, nor is a node that takes a tenth longer, nor are all that do together."""
    work, blocks = ALONE[stages]
    job = Job(layout=layout(2), work=work, blocks=blocks, unit=0.004, slow={"n1": factor}, noise=lambda pp: 0.07)
    job.run(600)
    job.slow = {"n0": 1.5, "n1": 1.5 * factor}
    job.run(200)
    assert not job.ever


def test_a_busy_host_that_favours_who_waits_more_makes_nobody_slow() -> None:
    """As measured on two processors with a load of six: in most rows blocks of one stage take a third longer."""
    job = Job(layout=layout(2), work=(3.0, 2.0), blocks=(3, 2), unit=0.004, noise=lambda pp: 0.07)
    plain = job.block
    job.block = lambda stage, factor: plain(stage, factor) * (1.0 if stage else 1.3)  # type: ignore[method-assign]
    job.run(600)
    assert not job.ever


def test_blocks_that_pass_in_no_time_are_not_compared() -> None:
    """Waking up after a wait takes as long as they do: a stage that waits more has slower ones."""
    job = Job(layout=layout(2), work=(1.0, 1.0), blocks=(1, 1), unit=0.0005)
    plain = job.block
    job.block = lambda stage, factor: plain(stage, factor) * (1.8 if stage else 1.0)  # type: ignore[method-assign]
    job.run(100)
    assert not job.ever
    job.unit = 0.004
    job.begin(job.nodes, "2.0")
    job.run(100)
    assert job.ever == {"n1"}


def test_one_long_step_is_nothing() -> None:
    """Nor is one long row; it is one window of several, however long."""
    job = Job(layout=layout(1, 2), work=(1.0,), unit=0.1)
    job.run(60)
    for _ in range(5):
        job.slow["n1"] = 5.0
        job.run(1)
        job.slow.clear()
        job.run(60)
    assert not job.ever


def test_one_of_four_long_windows_may_be_amiss() -> None:
    """Each takes eight seconds and more: the node need not be slow in three on end, as others' waits may hide it."""
    job = Job(layout=layout(1, 2), work=(1.0,), unit=0.05)
    job.run(200)
    for factor in (1.5, 1.5, 1.0, 1.5):
        assert not job.ever
        job.slow["n1"] = factor
        job.run(1)
    assert job.ever == {"n1"}


def test_a_node_is_well_again_once_it_has_been_for_twice_as_long() -> None:
    """It is told once that a node is slow, and once that it is not."""
    job = Job(layout=layout(2, 2), work=(1.0, 1.0), slow={"n3": 1.5})
    job.run(60)
    job.slow["n3"] = 1.1
    job.run(60)
    assert "n3" in job.slow_now, "better, but neither slow nor well"
    job.slow.clear()
    job.run(20)
    assert "n3" in job.slow_now
    job.run(40)
    assert not job.slow_now
    assert [[node.id for node in said.entered] for said in job.said if said.entered] == [["n3"]]
    assert [[node.id for node in said.left] for said in job.said if said.left] == [["n3"]]


def test_what_is_known_of_a_node_holds_in_the_next_generation() -> None:
    """Alone with another place it is still slow, since that place is not found to be slow instead; then it is well."""
    job = Job(layout=layout(2), work=(1.0, 2.0))
    job.run(60)
    job.slow["n0"] = 1.5
    job.run(60)
    assert job.ever == {"n0"}
    job.begin(("n2", "n0"), "2.0")
    job.run(90)
    assert set(job.slow_now) == {"n0"}
    assert job.said[-1].key == "2.0"
    job.slow.clear()
    job.run(90)
    assert not job.slow_now
    assert job.ever == {"n0"}


def known_slow(rho: float) -> SlowNode:
    return SlowNode(id="n1", rho=rho, kind=SlowKind.COMPUTE, since=3)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("rho", [1.35, 2.5])
def test_who_is_slow_by_the_record_is_so_to_one_that_joins(rho: float, pp: int) -> None:
    """Though what the node's place takes on one that is well was never seen; and no more once it is well."""
    job = Job(layout=layout(pp), work=(7.0, 5.0, 5.0, 6.0)[:pp], unit=0.01, slow={"n1": rho})
    job.speeds.begin("2.0", job.layout, job.nodes, [known_slow(rho)])
    job.run(240)
    assert {id: round(node.rho, 1) for id, node in job.slow_now.items()} == {"n1": pytest.approx(rho, abs=0.06)}
    job.slow.clear()
    job.run(240)
    assert not job.slow_now


@pytest.mark.parametrize("rho", [1.35, 2.5])
def test_who_was_slow_by_the_record_and_is_well_is_seen_to_be_where_blocks_are_alike(rho: float) -> None:
    """Its blocks take no longer than others', so that its place is not taken for a lighter one than it is."""
    job = Job(layout=layout(2), work=(7.0, 5.0), unit=0.01, blocks=(6, 6))
    job.speeds.begin("2.0", job.layout, job.nodes, [known_slow(rho)])
    job.run(120)
    assert [set(said.slow) for said in job.said] == [{"n1"}, set()]


def test_what_a_keeper_has_seen_counts_more_than_the_record() -> None:
    """That has it as it was when the generation was formed."""
    job = Job(layout=layout(1, 3), work=(1.0,), slow={"n1": 1.5})
    job.run(60)
    job.speeds.begin("2.0", job.layout, job.nodes, [known_slow(1.2)])
    assert job.speeds.slow["n1"].rho > 1.4


def test_nodes_that_change_places_show_who_was_slow_from_the_start() -> None:
    """What a place takes is known from the generation in which another node had it."""
    job = Job(layout=layout(2), work=(1.0, 1.0), slow={"n1": 1.4})
    job.run(60)
    assert not job.ever, "nobody can tell"
    job.begin(("n1", "n0"), "2.0")
    job.run(60)
    assert job.ever == {"n1"}


def test_each_generation_is_told_even_if_nobody_is_slow() -> None:
    """Whoever acts on it learns that all are well."""
    job = Job(layout=layout(1, 2), work=(1.0,))
    job.run(40)
    job.begin(job.nodes, "2.0")
    job.run(40)
    assert [(said.key, dict(said.slow)) for said in job.said] == [("1.0", {}), ("2.0", {})]


def test_a_slow_loader_is_of_kind_data() -> None:
    """It lengthens the step; who waits for it is not slow."""
    job = Job(layout=layout(2, 2), work=(1.0, 1.0), data={"n1": 0.3})
    job.run(60)
    assert {id: node.kind for id, node in job.slow_now.items()} == {"n1": SlowKind.DATA}
    assert "s for its data loader, which reads 3 MB of object storage for it, in" in job.slow_now["n1"].detail
    everywhere = Job(layout=layout(2, 2), work=(1.0, 1.0), data={f"n{rank}": 0.5 for rank in range(4)})
    everywhere.run(60)
    assert not everywhere.ever, "a store that is slow for all is no slow node"


def test_the_noise_of_one_place_hides_no_slow_node_of_another() -> None:
    """Half of the ranks have a stage of which every row takes another time."""
    job = Job(layout=layout(2, 4), work=(1.0, 1.0), slow={"n1": 1.3}, noise=lambda pp: 0.2 if pp else 0.01)
    job.run(90)
    assert job.ever == {"n1"}


def test_the_noise_of_all_places_together_would_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: the spread is that of all places, which are cut unevenly."""

    def job() -> Job:
        return Job(layout=layout(2, 2), work=(3.0, 1.0), slow={"n1": 1.3})

    right, wrong = job(), job()
    right.run(90)
    assert right.ever == {"n1"}
    monkeypatch.setattr(Speeds, "_by_chance", lambda self, id, kind, windows, since: _over_all(self))
    wrong.run(90)
    assert not wrong.ever


def test_a_step_that_one_rank_ends_late_is_made_up_for_in_the_next_row() -> None:
    """Rows end at each rank's own time: what one has too much, the next row has too little, in most of them."""
    job = Job(layout=layout(1, 3), work=(1.0,), slow={"n1": 1.3})
    whole, late = job.row, [0.0]

    def ragged(longer: float = 1.0) -> list[StepSheet]:
        first, *others = whole(longer)
        before, late[0] = late[0], job.draw.choice([0.0, 0.0, 0.1]) * first.total
        return [replace(first, copy=first.copy + late[0], wait_pp=first.wait_pp - before), *others]

    job.row = ragged  # type: ignore[method-assign]
    job.run(60)
    assert job.ever == {"n1"}


def test_noise_that_all_ranks_share_hides_no_slow_node() -> None:
    """A busy machine has all of them compute for half as long again in some rows."""
    job = Job(layout=layout(1, 3), work=(1.0,), slow={"n1": 1.3}, noise=lambda pp: 0.05)
    for _ in range(60):
        job.run(1, longer=job.draw.uniform(1.0, 1.6))
    assert job.ever == {"n1"}


@pytest.mark.parametrize("culprit", ["n0", "n1"])
def test_of_two_stages_on_a_busy_host_the_slow_node_is_named(culprit: str) -> None:
    """What both take changes with the host, up and down."""
    for seed in range(20):
        job = Job(layout=layout(2), work=(3.0, 2.0), blocks=(3, 2), unit=0.01, noise=lambda pp: 0.04, seed=seed)
        load = 0.0
        for second in range(100):
            load = 0.9 * load + job.draw.gauss(0, 0.1)
            job.slow = {culprit: 1.3} if second >= 20 else {}
            job.run(1, longer=exp(load))
        assert job.ever == {culprit}


@pytest.mark.parametrize("seed", range(4))
def test_a_busy_host_hides_no_slow_node(seed: int) -> None:
    """As measured on two processors with a load of five: rows of one rank differ by a tenth, as the others' do."""
    job = Job(layout=layout(1, 3), work=(1.0,), unit=0.006, slow={"n1": 1.3}, noise=lambda pp: 0.07, seed=seed)
    job.run(60)
    assert job.ever == {"n1"}


@pytest.mark.parametrize("factor", [1.0, 1.1])
@pytest.mark.parametrize("dp", [2, 3])
def test_on_a_busy_host_nobody_is_slow(factor: float, dp: int) -> None:
    """For ten minutes, with as much noise, nor one that takes a tenth longer."""
    job = Job(layout=layout(1, dp), work=(1.0,), slow={"n1": factor}, noise=lambda pp: 0.1)
    job.run(600)
    assert not job.ever


def _over_all(speeds: Speeds) -> float:
    took = [log(one.busy / one.rounds) for one in speeds._windows[-1].sheets]
    return 1.4826 * median(abs(one - median(took)) for one in took)


def test_times_that_do_not_add_up_say_nothing() -> None:
    """A rank whose record has lost a twentieth of its time has no verdict, and lets no other have one."""
    job = Job(layout=layout(1, 2), work=(1.0,), slow={"n1": 1.5})
    whole = job.row

    def lossy(longer: float = 1.0) -> list[StepSheet]:
        first, second = whole(longer)
        return [replace(first, wait_pp=first.wait_pp - 0.05 * first.total), second]

    job.row = lossy  # type: ignore[method-assign]
    job.run(60)
    assert not job.said


@given(world=st.integers(1, 40))
def test_all_rows_ride_within_eight_votes(world: int) -> None:
    """Each rank's once, in a vote that has room for it."""
    ridden = [rank for step in range(9, 9 + sheet.EVERY) for rank in sheet.speakers(step, world)]
    assert sorted(ridden) == list(range(world))
    assert all(len(sheet.speakers(step, world)) <= sheet.places(world) for step in range(8))
    assert all(
        sheet.speaks(rank, step) == (rank in sheet.speakers(step, world)) for rank in range(world) for step in range(8)
    )
