"""Slow nodes: planned changes for their sake, what each waits for, and that nothing is followed to and fro."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.machine.balance import cost_of
from elastic3d.membership.machine.own_speeds import OwnSpeeds
from elastic3d.membership.machine.view import View
from elastic3d.membership.records import MemberRecord, Proposal, Report, decode, encode
from elastic3d.membership.slowness import Slowness, SpeedReport
from elastic3d.membership.stalls import VerdictKind
from elastic3d.pace import Pace
from elastic3d.values import Cause, Generation, Layout, Node, Slot
from tests.membership.story import Story
from tests.planner.machines import costs, profile

FOUR = "> policy minimum=2 maximum=4\n> layout pp=4\n> start a b c d\n> run 5"
SPARE = "> policy minimum=2 maximum=4\n> layout pp=4\n> start a b c d e\n> run 5"


class Noting(Story):
    """A story that keeps what its leaders found. verdicts: of slow nodes."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.verdicts: list[acts.Concluded] = []
        for text in texts:
            self.tell(text)

    def act(self, name: str, action: acts.Action) -> None:
        if isinstance(action, acts.Concluded):
            assert action.verdict.kind is VerdictKind.SLOW
            self.verdicts.append(action)
        super().act(name, action)

    @property
    def shape(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """The cause, the nodes in rank order, and the cuts of each generation."""
        return [
            (str(g.cause), "".join(n.name for n in g.nodes), g.layout.cuts if g.layout else ()) for g in self.sealed
        ]


def test_a_spare_takes_a_slow_nodes_place() -> None:
    """In its rank, by a change that all leave for at a boundary; the slow one stays as a spare, behind all others."""
    story = Noting(SPARE, "> lags b 1.5\n> run 300")
    assert story.shape == [("start", "abcd", ()), ("balance", "aecd", ())]
    assert "switch to 2 (balance)" in "\n".join(story.lines)
    assert [node.name for node in story.sealed[-1].spares] == ["b"]
    assert story.sealed[-1].paces == (Pace(place="b", rho=1.5, kind="compute", uses=1.0),)
    story.tell("> start f\n> run 5\n> kill c\n> run 20")
    assert story.shape[-1] == ("death", "aefd", ())


class Costed(Noting):
    """A story whose planner knows the costs of a model with so many micro-batches, of one stage with ZeRO-3."""

    def __init__(self, micro_batches: int, *texts: str) -> None:
        super().__init__()
        self.costs, self.profile = costs(), profile(blocks=4, micro_batches=micro_batches)
        for text in ("> policy minimum=2 maximum=4\n> layout pp=1", *texts):
            self.tell(text)


@pytest.mark.parametrize("slow", "abcd")
def test_a_spare_takes_a_slow_nodes_place_where_costs_are_known(slow: str) -> None:
    """Also that of the last rank, without which the others would be faster: a node less is for a person to decide."""
    story = Costed(24, "> start a b c d e\n> run 5", f"> lags {slow} 2\n> run 600")
    assert story.shape == [("start", "abcd", ()), ("balance", "abcd".replace(slow, "e"), ())]
    assert [(one.verdict.fault, one.verdict.act) for one in story.verdicts] == [("swap", True)]


@pytest.mark.parametrize("slow", "acd")
def test_a_generation_is_formed_of_as_many_nodes_wherever_a_slow_one_stands(slow: str) -> None:
    """No spare waits while fewer nodes train because the last one is slow, to come in by a change right after."""
    story = Costed(24, "> start a b c d e\n> run 5", f"> lags {slow} 2\n> run 20\n> kill b\n> run 600")
    assert story.shape == [("start", "abcd", ()), ("death", "aecd", ())]


@pytest.mark.parametrize("slow", "acdf")
def test_a_slow_node_is_left_out_where_not_all_are_needed(slow: str) -> None:
    """Twelve micro-batches take five nodes as long as four."""
    story = Costed(
        12, "> policy maximum=6\n> start a b c d e f\n> run 5", f"> lags {slow} 2\n> run 20\n> kill b\n> run 20"
    )
    assert [len(generation.nodes) for generation in story.sealed] == [6, 4]
    assert [node.name for node in story.sealed[-1].spares] == [slow]


def test_without_a_spare_a_slow_nodes_stage_gets_fewer_blocks_until_it_is_well() -> None:
    """And then the same change goes back; neither puts anybody out."""
    story = Noting(FOUR, "> lags b 2.5\n> run 300")
    assert [cause for cause, _, _ in story.shape] == ["start", "balance"]
    _, order, cuts = story.shape[-1]
    bounds = (0, *cuts, 8)
    at = order.index("b")
    assert bounds[at + 1] - bounds[at] == 1
    assert sorted(order) == list("abcd")
    story.tell("> well b\n> run 1800")
    assert story.shape[-1] == ("balance", order, ())
    assert [one.verdict.fault for one in story.verdicts] == ["recut", "back"]
    assert all(one.verdict.act and one.verdict.after < one.verdict.before for one in story.verdicts)
    assert [line.partition(":")[0] for line in story.verdicts[0].verdict.rungs] == ["recut"]


def test_without_stages_a_slow_node_gets_fewer_micro_batches_until_it_is_well() -> None:
    """All stay in their ranks; that beats going on without it, which is only told beside it."""
    story = Noting(
        "> policy minimum=2 maximum=4\n> layout pp=1 zero=2\n> start a b c d\n> run 5\n> lags b 2\n> run 300"
    )
    assert [cause for cause, _, _ in story.shape] == ["start", "balance"]
    layout = story.sealed[-1].layout
    assert layout is not None
    assert story.shape[-1][1] == "abcd"
    assert layout.shares[1] == min(layout.shares) < min(layout.shares[2:])
    story.tell("> well b\n> run 1800")
    assert story.sealed[-1].layout == replace(layout, shares=())
    assert [one.verdict.fault for one in story.verdicts] == ["shares", "back"]
    assert all(one.verdict.act and one.verdict.after < one.verdict.before for one in story.verdicts)
    assert "it gets fewer micro-batches of each step" in story.verdicts[0].verdict.detail
    assert [line.partition(":")[0] for line in story.verdicts[0].verdict.rungs] == ["shares", "evict"]


def test_what_would_be_slower_is_said_to_be() -> None:
    """By how much, as of what is quicker; what changes nothing saves nothing."""
    story = Noting(SPARE.replace("pp=4", "pp=1 zero=2"), "> lags b 1.2\n> run 300")
    recut, _, evict = story.verdicts[0].verdict.rungs
    assert recut == "recut: steps of 57.6 s, 0% less: not worth a change"
    assert evict == "evict: steps of 72 s, 25% more: not worth a change"


def test_a_spare_is_better_than_fewer_micro_batches() -> None:
    """And the layout is for equal nodes then."""
    story = Noting(
        "> policy minimum=2 maximum=3\n> layout pp=1 zero=2\n> start a b c d\n> run 5\n> lags b 2\n> run 300"
    )
    assert story.shape == [("start", "abc", ()), ("balance", "adc", ())]
    layout = story.sealed[-1].layout
    assert layout is not None
    assert layout.shares == ()


@pytest.mark.parametrize("kind", ["data", "host", "link"])
def test_less_work_does_not_help_a_node_with_slow_data_or_connections(kind: str) -> None:
    """Another node does; without one the others would be as fast without it, which is only reported."""
    assert Noting(SPARE, f"> lags b 2.5 {kind}\n> run 300").shape[-1] == ("balance", "aecd", ())
    assert len(Noting(FOUR, f"> lags b 2.5 {kind}\n> run 3600").sealed) == 1


def test_a_change_waits_until_it_would_have_paid() -> None:
    """A node that is slow for a shorter time changes nothing."""
    story = Noting(SPARE, "> lags b 1.5\n> run 100\n> well b\n> run 1000\n> lags b 1.5\n> run 100")
    assert len(story.sealed) == 1
    story.tell("> run 60")
    assert len(story.sealed) == 2


def test_a_change_costs_no_more_than_the_generation_took_to_begin() -> None:
    """Until one was measured: a job that began within seconds does not wait for half a minute's worth of lost time."""
    report = SpeedReport(key="1.1", slow=SLOW, step_seconds=2.0)
    assert cost_of(report, 30.0) == 30.0
    assert cost_of(replace(report, start_seconds=4.0), 30.0) == 4.0
    assert cost_of(replace(report, start_seconds=400.0), 30.0) == 30.0
    assert cost_of(replace(report, start_seconds=4.0, change_seconds=50.0), 30.0) == 50.0
    assert cost_of(replace(report, start_seconds=0.2), 30.0) == 1.0


def test_a_node_that_is_slow_now_and_then_is_not_followed() -> None:
    """Each change for its sake doubles the price of the next one: in an hour of flapping there are few."""
    flapping = "> lags b 2.5\n> run 120\n> well b\n> run 120\n" * 15
    story = Noting(FOUR, flapping)
    assert 2 <= len(story.sealed) - 1 <= 4, story.shape


def test_changes_stay_within_the_jobs_budget() -> None:
    """They count as re-formings, and wait as newcomers do."""
    story = Noting("> policy budget=1 change_cost=1", FOUR, "> lags b 2.5\n> run 300\n> well b\n> run 600")
    assert len(story.sealed) == 2
    story.tell("> run 3600")
    assert len(story.sealed) == 3


def test_what_gains_little_is_left_alone() -> None:
    """With 8 blocks on 4 stages no cut helps a node that takes 1.3 times as long."""
    assert len(Noting(FOUR, "> lags b 1.3\n> run 3600").sealed) == 1


def test_to_go_on_without_a_node_is_only_reported() -> None:
    """Once for each generation; so is everything where nothing is to be done."""
    story = Noting("> policy minimum=2 maximum=3\n> layout dp=0\n> start a b c\n> run 5\n> lags b 4\n> run 3600")
    assert len(story.sealed) == 1
    assert [one.verdict.fault for one in story.verdicts] == ["evict"]
    assert not story.verdicts[0].verdict.act
    story = Noting("> policy balance=0", SPARE, "> lags b 1.5\n> run 3600")
    assert len(story.sealed) == 1
    assert [(one.verdict.fault, one.verdict.act) for one in story.verdicts] == [("swap", False)]


def test_a_proposed_change_is_withdrawn_when_its_node_is_well_again() -> None:
    """While the trainers for it are built."""
    story = Noting(SPARE, "> lags b 1.5\n> run 140.2\n> well b\n> run 60")
    assert "propose 2 (balance)" in "\n".join(story.lines)
    assert "a: withdraw" in "\n".join(story.lines)
    assert len(story.sealed) == 1


def test_a_change_that_cannot_be_prepared_waits_longer_each_time() -> None:
    """Trainers that are not ready in time are not built every few seconds."""
    story = Noting("> policy prepare=0.1", SPARE, "> lags b 1.5\n> run 3600")
    proposed = [line for line in story.lines if "propose" in line]
    assert len(story.sealed) == 1
    assert 2 <= len(proposed) <= 5


def test_a_later_leader_goes_on_from_the_record() -> None:
    """What was known of slow machines is in it, for a leader who sees no steps, and for plans after a loss."""
    story = Noting(SPARE, "> lags a 1.5\n> run 300")
    assert story.shape[-1][:2] == ("balance", "ebcd")
    story.tell("> lags c 3\n> kill a\n> run 1800")
    last = story.sealed[-1]
    assert last.cause is Cause.BALANCE
    assert {pace.place: pace.rho for pace in last.paces if pace.slow}["c"] == 3.0
    story.tell("> kill d\n> start f\n> run 30")
    assert story.sealed[-1].layout is not None
    assert story.sealed[-1].layout.cuts, "a generation formed for another reason forgot that a node is slow"


class Newcomer(Noting):
    """Node e was not there when b became slow: its keeper says what it has from the record, `SlowNodes.begin`."""

    def find_slow(self, name: str) -> None:
        core = self.cores.get(name)
        running = core.running if core is not None else None
        if name != "e" or running is None:
            super().find_slow(name)
            return
        paces = {pace.place: pace for pace in running.paces if pace.slow}
        slow = {
            node.id: Slowness(rho=pace.rho, kind=pace.kind, since=running.reached)
            for node in running.nodes
            if (pace := paces.get(node.place)) is not None
        }
        self.to(name, e.NodesSlow(key=running.key, step=self.steps, slow=slow))


def test_what_was_found_of_slow_nodes_outlives_the_node_of_rank_0() -> None:
    """It alone said so; the leader's own trainers saw the same. The layout does not go back under the next one."""
    story = Newcomer(
        "> policy minimum=2 maximum=4\n> layout pp=2 dp=2\n> start a b c d\n> run 5\n> lags b 1.4\n> run 300"
    )
    assert story.shape == [("start", "abcd", ())]
    story.tell("> start e\n> run 0.05\n> kill a\n> run 1800")
    assert story.shape[1:] == [("death", "ebcd", (3,))]
    assert [(pace.place, pace.rho) for pace in story.sealed[-1].paces] == [("b", 1.4)]


def test_the_way_back_counts_also_where_another_change_was_made_for_a_slow_node() -> None:
    """As when a node died while one was slow: the next generation had fewer blocks for it, at no price."""
    story = Noting("> policy minimum=2 maximum=4\n> layout dp=1\n> start a b c d\n> run 5\n> lags b 4\n> run 10")
    story.tell("> kill d\n> run 10")
    assert [(cause, bool(cuts)) for cause, _, cuts in story.shape] == [("start", False), ("death", True)]
    story.tell("> well b\n> run 600")
    assert story.shape[-1][0] == "balance"
    assert [(pace.place, pace.rho, pace.uses) for pace in story.sealed[-1].paces] == [("b", 1.0, 1.0)]


def test_nothing_changes_where_torchrun_restarts_the_workers() -> None:
    """There are no boundaries."""
    story = Noting("> restart-mode\n> policy minimum=2 maximum=4\n> start a b c d e\n> run 5\n> lags b 3\n> run 3600")
    assert len(story.sealed) == 1


A, B = (Node(name=name, incarnation="1", address="h", slots=(Slot(tile_port=1),)) for name in "ab")
SEALED = Generation(number=4, attempt=17, cause=Cause.START, nodes=(A, B))
SLOW = {B.id: Slowness(rho=1.4, kind="link", since=7)}


def test_what_is_known_of_slow_machines_is_read_as_it_was_written() -> None:
    """In a generation's record and in a report; a record without says nothing of them, as before."""
    formed = replace(SEALED, layout=Layout(pp=2, dp=1), paces=(Pace(place="b", rho=1.4, kind="link", uses=0.5),))
    assert decode(Generation, encode(formed), "the/key") == formed
    assert b"paces" not in encode(SEALED)
    report = Report(incarnation="1", speeds=SpeedReport(key="4.17", slow=SLOW, step_seconds=0.5))
    assert decode(Report, encode(report), "the/key") == report


@pytest.mark.parametrize(("me", "speaks"), [(A, True), (B, False)])
def test_the_node_of_rank_0_speaks_for_all(me: Node, speaks: bool) -> None:
    """Of the sealed generation alone, with what steps take and what the last planned change cost."""
    view, own = View(MemberRecord(node=me)), OwnSpeeds()
    view.generation = SEALED
    for step in range(10):
        own.stepped(view, SEALED.key, step * 2.0)
    coming = replace(SEALED, number=5, attempt=18)
    view.proposal = Proposal(generation=coming)
    for at in (20.0, 23.0, 26.0):
        own.stepped(view, SEALED.key, at)
    view.proposal, view.generation = None, coming
    own.stepped(view, coming.key, 36.0)
    own.stepped(view, coming.key, 38.0)
    own.hear(e.NodesSlow(key=coming.key, step=9, slow=SLOW))
    # 16 s since the proposal was seen, less those of 3 steps.
    said = SpeedReport(key=coming.key, slow=SLOW, step_seconds=2.0, change_seconds=10.0)
    assert own.said(view) == (said if speaks else None)
    own.hear(e.NodesSlow(key=SEALED.key, step=9, slow=SLOW))
    assert own.said(view) is None


def test_the_node_of_rank_0_says_how_long_the_generation_took_to_begin() -> None:
    """From its record to its first step."""
    view, own = View(MemberRecord(node=A)), OwnSpeeds()
    view.generation, view.sealed_at = SEALED, 100.0
    for at in (107.0, 108.0, 109.0):
        own.stepped(view, SEALED.key, at)
    own.hear(e.NodesSlow(key=SEALED.key, step=3, slow=SLOW))
    assert own.said(view) == SpeedReport(key=SEALED.key, slow=SLOW, step_seconds=1.0, start_seconds=7.0)
