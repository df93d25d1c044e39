"""Whose connection is slow, on timelines that the planner plays: the endpoint that all slow groups share."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.health import blame, sheet
from elastic3d.health.sheet import StepSheet
from elastic3d.health.slow_node import SlowKind
from elastic3d.health.speeds import Speeds
from elastic3d.planner.timeline import StageCost, play
from elastic3d.values import Layout, Schedule

ROUNDS = 8


@dataclass(kw_only=True)
class Exchanges:
    """A job whose transfers are played. links: seconds that each transfer of a node's takes more; compute: factors."""

    layout: Layout
    links: dict[int, float] = field(default_factory=dict)
    compute: dict[int, float] = field(default_factory=dict)
    everywhere: float = 0.0
    noise: float = 0.01
    slots: int = 1
    speeds: Speeds = field(default_factory=lambda: Speeds(1.15))
    at: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(1)
        self.speeds.begin("1.0", self.layout, [f"n{rank // self.slots}" for rank in range(self.layout.world)])

    def run(self, rows: int) -> None:
        for _ in range(rows):
            sheets = self.row()
            for vote in range(self.at + 1, self.at + sheet.EVERY + 1):
                self.speeds.heard(vote, [sheets[rank].row for rank in sheet.speakers(vote, self.layout.world)])
            self.at += sheet.EVERY

    def row(self) -> list[StepSheet]:
        pp, dp = self.layout.pp, self.layout.dp
        hop = {rank: 0.002 + self.everywhere + self.links.get(rank, 0.0) for rank in range(self.layout.world)}
        busy, passes = {}, {}
        for column in range(dp):
            ranks = [index * dp + column for index in range(pp)]
            each = [0.02 * self.compute.get(r, 1.0) * max(0.5, self.draw.gauss(1, self.noise)) for r in ranks]
            costs = [StageCost(forward=one, input=one, weight=one) for one in each]
            for rank, works in zip(ranks, play(self.layout, ROUNDS, costs, max(hop[r] for r in ranks)), strict=True):
                busy[rank] = sum(one.end - one.start for one in works)
                passes[rank] = works[-1].end
        met: dict[int, float] = {}
        for stage in range(pp):
            ranks = [stage * dp + column for column in range(dp)]
            took = ROUNDS * max(hop[r] for r in ranks) if dp > 1 else 0.0
            met |= dict.fromkeys(ranks, max(passes[r] for r in ranks) + took)
        total = max(met.values()) + 0.01
        return [
            StepSheet(
                work=1.0,
                rounds=ROUNDS,
                forward=busy[rank] / 3,
                backward=2 * busy[rank] / 3,
                update=0.01,
                wait_pp=passes[rank] - busy[rank],
                wait_dp=met[rank] - passes[rank],
                wait_other=total - 0.01 - met[rank],
            )
            for rank in range(self.layout.world)
        ]

    @property
    def found(self) -> dict[str, SlowKind]:
        return {id: node.kind for id, node in self.speeds.slow.items()}


def layout(pp: int, dp: int) -> Layout:
    return Layout(pp=pp, dp=dp, schedule=Schedule.ONE_F_ONE_B if pp > 1 else None)


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from([(2, 2), (2, 3), (4, 2), (3, 3)]),
    noise=st.sampled_from([0.0, 0.02]),
    data=st.data(),
)
def test_the_endpoint_of_slow_connections_is_named(shape: tuple[int, int], noise: float, data: st.DataObject) -> None:
    """Whatever its place, and by its connections, not for its passes."""
    job = Exchanges(layout=layout(*shape), noise=noise)
    job.run(10)
    assert not job.found
    culprit = data.draw(st.integers(0, job.layout.world - 1))
    job.links[culprit] = 0.05
    job.run(20)
    assert job.found == {f"n{culprit}": SlowKind.LINK}
    assert job.speeds.slow[f"n{culprit}"].ranks == (culprit,)


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 3), (1, 4), (4, 1), (1, 2)])
def test_a_network_that_is_slow_for_all_names_nobody(shape: tuple[int, int]) -> None:
    """Nor two nodes whose connections become slow at the same time."""
    job = Exchanges(layout=layout(*shape))
    job.run(10)
    job.everywhere = 0.05
    job.run(20)
    assert not job.found
    job.everywhere = 0.0
    job.links = {0: 0.05, job.layout.world - 1: 0.05}
    job.run(20)
    assert not job.found


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (1, 2), (2, 1)])
def test_where_all_are_in_one_group_nobody_is_named(shape: tuple[int, int]) -> None:
    """It cannot be told whose connection it is."""
    job = Exchanges(layout=layout(*shape))
    job.run(10)
    job.links[0] = 0.05
    job.run(20)
    assert not job.found


def test_a_node_that_computes_slowly_has_no_slow_connection() -> None:
    """All others wait for it, and transfers take what they did."""
    job = Exchanges(layout=layout(2, 2))
    job.run(10)
    job.compute[1] = 1.5
    job.run(20)
    assert job.found == {"n1": SlowKind.COMPUTE}


def test_ranks_of_one_node_share_its_connection() -> None:
    """What they exchange among each other does not count."""
    job = Exchanges(layout=layout(2, 4), slots=2)
    job.run(10)
    job.links = {2: 0.05, 3: 0.05}
    job.run(20)
    assert job.found == {"n1": SlowKind.LINK}


def any_group(late: Mapping[blame.Group, float], nodes: Sequence[str]) -> dict[str, float]:
    """Blame who is in a slow group."""
    return {id: max(late[group] for group in late if rank in group) for rank, id in enumerate(nodes)}


def no_contradiction(late: Mapping[blame.Group, float], nodes: Sequence[str]) -> dict[str, float]:
    """Blame who is in slow groups only, whatever the others are."""
    return {id: min(late[group] for group in late if rank in group) for rank, id in enumerate(nodes)}


def test_planted_bugs_name_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is in one slow group; and everybody, where the network is slow for all."""

    def named(links: dict[int, float], everywhere: float) -> set[str]:
        job = Exchanges(layout=layout(2, 2))
        job.run(10)
        job.links, job.everywhere = links, everywhere
        job.run(20)
        return set(job.found)

    assert named({1: 0.05}, 0.0) == {"n1"}
    assert named({}, 0.05) == set()
    monkeypatch.setattr(blame, "endpoints", any_group)
    assert named({1: 0.05}, 0.0) > {"n1"}
    monkeypatch.setattr(blame, "endpoints", no_contradiction)
    assert named({}, 0.05) == {"n0", "n1", "n2", "n3"}


def test_the_least_wait_is_the_transfer() -> None:
    """And a pipeline's is what its first rank has beyond its passes, played without transfers."""
    job = Exchanges(layout=layout(2, 2), noise=0.0)
    taken = blame.transfers(job.layout, job.row())
    assert set(taken) == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert taken[0, 1] == taken[2, 3] == pytest.approx(ROUNDS * 0.002)
    job.links[1] = 0.05
    slower = blame.transfers(job.layout, job.row())
    assert slower[2, 3] == pytest.approx(taken[2, 3])
    assert slower[0, 2] == pytest.approx(taken[0, 2])
    assert slower[0, 1] == pytest.approx(ROUNDS * 0.052)
    assert slower[1, 3] > taken[1, 3] + 0.05
