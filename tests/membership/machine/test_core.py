"""What transcripts do not show: events that come late, twice, or in an order that etcd and the network allow."""

from __future__ import annotations

import dataclasses

import pytest

from elastic3d.errors import LayoutError
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.machine.core import Core
from elastic3d.membership.machine.leader import COMMIT_LIMIT
from elastic3d.membership.machine.reach import STANDING
from elastic3d.membership.machine.situation import Planner
from elastic3d.membership.machine.trainers import TrainersPhase
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import Claim, End, MemberRecord, Out, Report, SavedStep, Tomb, decode
from elastic3d.membership.transactions import transaction
from elastic3d.planner import Plan
from elastic3d.values import Cause, Generation, Layout, ModelProfile, Node
from tests.membership.keys import Keys
from tests.membership.story import Story


def test_late_news_of_an_unwatched_peer_is_ignored() -> None:
    """The silence of a former neighbour is not reported: nobody would report its end."""
    story = Story()
    story.tell("> start a b c d e f\n> run 3")
    assert [peer.id for peer in story.watched["a"].peers] == ["b@b2", "c@c3"]
    assert story.watched["a"].expected == ("f@f6", "e@e5")
    story.to("a", e.PeerHeard(id="d@d4", alive=False))
    assert story.cores["a"].report.silent == ()
    story.to("a", e.PeerHeard(id="c@c3", alive=False))
    assert story.cores["a"].report.silent == ("c@c3",)
    story.tell("> kill b\n> run 3")
    assert [peer.id for peer in story.watched["a"].peers] == ["c@c3", "d@d4"]


NODES = [Node(name=name, incarnation=f"{name}1", address="h", slots=(), heartbeat_port=1) for name in "abc"]


PROFILE = ModelProfile(blocks=8, parameters=1, micro_batches=8, micro_batch=1, digest="job")


def any_number(nodes: int, *_: object) -> Plan:
    return Plan(layout=Layout(), nodes=nodes)


def member(
    name: str,
    *,
    leader: str = "a",
    maximum: int = 3,
    profile: ModelProfile | None = None,
    planner: Planner = any_number,
    raised: tuple[str, ...] = (),
) -> Core:
    """Return a core that knows a, b, c as registered and active in generation 1. raised: where, in the tries before."""
    records = {node.name: MemberRecord(node=node, profile=profile) for node in NODES}
    core = Core(records[name], Policy(maximum=maximum, tries=2, beside=bool(raised)), planner)
    members = tuple(
        e.MemberPut(record=record, order=i + 1, revision=i + 1) for i, record in enumerate(records.values())
    )
    job = profile.job if profile is not None else ""
    generation = Generation(
        number=1,
        attempt=1,
        cause=Cause.ERROR if raised else Cause.START,
        nodes=tuple(NODES),
        job=job,
        tries=bool(raised),
        tried_at=0,
        raised=raised,
    )
    sealed = e.GenerationPut(generation=generation, revision=8)
    lead = e.LeaderPut(claim=Claim(name=leader, incarnation=f"{leader}1"), revision=5)
    core.handle([e.Listed(tier=e.Tier.BOARD, items=(lead, sealed), revision=9, gap=False)], 0.0)
    core.handle([e.Registered(revision=9), e.Listed(tier=e.Tier.ROSTER, items=members, revision=9, gap=False)], 0.0)
    return core


def refused(name: str) -> list[e.Event]:
    return [e.PeerRefused(id=f"{name}@{name}1", evidence="refused")]


def buried(name: str, how: Out, by: str) -> e.TombPut:
    return e.TombPut(id=f"{name}@{name}1", tomb=Tomb(incarnation=f"{name}1", how=how, by=by), revision=10)


def test_a_refused_connection_after_a_clean_leave_is_no_death() -> None:
    """The tomb says how a node went; that its port refuses afterwards is expected."""
    core = member("a", leader="c")
    core.handle([buried("b", Out.LEFT, "b")], 1.0)
    assert not [a for a in core.handle(refused("b"), 1.1) if isinstance(a, acts.Bury)]


def test_a_dead_leader_with_a_tomb_is_succeeded_at_once() -> None:
    """Its key would stand until its lease ends; whoever finds the port refused takes the key over by its revision."""
    core = member("b", leader="a")
    core.handle([buried("a", Out.DEAD, "c")], 1.0)
    assert acts.Campaign(expected=5) in core.handle(refused("a"), 1.1)


def test_a_leader_has_one_write_under_way_during_an_eviction() -> None:
    """Whatever else is written meanwhile."""
    core = member("a")
    asked = core.handle(refused("b"), 1.0)
    bury = next(action for action in asked if isinstance(action, acts.Bury))
    gone = e.TombPut(id=bury.id, tomb=bury.tomb, revision=10)
    sealed = [action for action in core.handle([gone], 1.1) if isinstance(action, acts.Seal)]
    assert len(sealed) == 1
    assert not [a for a in core.handle([e.WriteDone(write=bury, ok=True)], 1.2) if isinstance(a, acts.Seal)]
    again = core.handle([e.WriteDone(write=sealed[0], ok=False)], 1.3)
    assert not [a for a in again if isinstance(a, acts.Seal)], "the watch gets a moment to report why"
    later = core.alarm(1.3)
    assert later == pytest.approx(1.4)
    assert [a for a in core.handle([e.Tick()], later) if isinstance(a, acts.Seal)]


def test_no_generation_is_sealed_with_a_node_whose_tomb_is_under_way() -> None:
    """Its port refuses the leader just when a trainer fails: it would end as soon as the tomb is there."""
    core = member("a")
    failed = Report(incarnation="c1", failed="1.1", detail="killed")
    actions = core.handle([*refused("b"), e.ReportPut(id="c@c1", report=failed, revision=10)], 1.0)
    assert [action.id for action in actions if isinstance(action, acts.Bury)] == ["b@b1"]
    (seal,) = [action for action in actions if isinstance(action, acts.Seal)]
    assert [node.name for node in seal.generation.nodes] == ["a", "c"]


def test_without_nodes_that_stand_apart_is_planned_once() -> None:
    """Whatever is heard while a layout needs them: a plan for many nodes takes part of a second."""
    planned: list[int] = []

    def all_three(nodes: int, *_: object) -> Plan:
        planned.append(nodes)
        if nodes < len(NODES):
            raise LayoutError("it takes three")
        return Plan(layout=Layout(), nodes=nodes)

    core = member("a", profile=PROFILE, planner=all_three)
    for step in range(1, 5):
        apart = Report(incarnation="b1", unreachable=("c@c1",), step=step)
        core.handle([e.ReportPut(id="b@b1", report=apart, revision=20 + step)], float(step))
    once = len(planned)
    assert set(planned) == {2}
    # Somebody else is there: it is asked anew.
    more = Node(name="d", incarnation="d1", address="h", slots=(), heartbeat_port=1)
    record = MemberRecord(node=more, profile=PROFILE)
    core.handle([e.MemberPut(record=record, order=9, revision=30)], 5.0)
    assert planned[once:] == [3]
    assert once == 2  # once more for the words of the error


def test_without_a_node_whose_code_raises_each_time_is_planned_once() -> None:
    """Whatever the others report while they are heard, which may be thousands."""
    planned: list[int] = []

    def any_two(nodes: int, *_: object) -> Plan:
        planned.append(nodes)
        return Plan(layout=Layout(), nodes=nodes)

    core = member("a", profile=PROFILE, planner=any_two, raised=("b@b1",))
    error = Report(incarnation="b1", error="1.1", detail="its own words")
    core.handle([e.ReportPut(id="b@b1", report=error, revision=20)], 1.0)
    assert planned == [2]
    for number in range(1, 5):
        silent = Report(incarnation="c1", silent=("b@b1",), step=0, answered=str(number))
        core.handle([e.ReportPut(id="c@c1", report=silent, revision=20 + number)], 1.0 + number / 10)
    assert planned == [2]
    (out,) = [action for action in core.handle([e.Tick()], 3.5) if isinstance(action, acts.Bury)]
    assert (out.id, "in each of 2 tries" in out.tomb.detail) == ("b@b1", True)


def test_the_first_tomb_of_an_incarnation_stays() -> None:
    """A node leaves, and its refusing port is noticed before its tomb arrives: that makes no death of it."""
    keys = Keys()
    left = acts.Bury(id="c@c1", tomb=Tomb(incarnation="c1", how=Out.LEFT, by="c"))
    dead = acts.Bury(id="c@c1", tomb=Tomb(incarnation="c1", how=Out.DEAD, by="a"))
    assert keys.transact(transaction("/job/", NODES[2], left)) is not None
    assert keys.transact(transaction("/job/", NODES[0], dead)) is None
    assert decode(Tomb, keys.items["/job/board/tombs/c@c1"].value, "key").how is Out.LEFT


def test_a_member_whose_key_vanishes_registers_again() -> None:
    """A leader watches the roster, so nobody else has to tell it that its key was deleted by hand."""
    core = member("a")
    gone = e.MemberGone(id="a@a1", revision=20)
    assert acts.PutMember(record=core.record) in core.handle([gone], 1.0)
    assert not [a for a in core.handle([e.Registered(revision=21), gone], 1.1) if isinstance(a, acts.PutMember)]


def test_an_unregistered_leader_sweeps_garbage_that_blocks_it() -> None:
    """The garbage is under its own tomb: it may register only once that is gone, and only the leader sweeps."""
    core = member("a")
    key = "board/tombs/a@a1"
    asked = core.handle([e.Unregistered(), e.Garbage(key=key, revision=10)], 1.0)
    assert acts.Sweep(key=key, revision=10, token=5) in asked
    again = core.handle([e.WriteDone(write=asked[-1], ok=True), e.TombGone(id="a@a1", revision=11)], 1.1)
    assert acts.PutMember(record=core.record) in again


def test_events_of_one_batch_are_decided_together() -> None:
    """A batch is applied whole before any decision: two deaths make one generation."""
    core = member("a")
    dead = [
        e.TombPut(id=f"{name}@{name}1", tomb=Tomb(incarnation=f"{name}1", how=Out.DEAD), revision=10) for name in "bc"
    ]
    seals = [action for action in core.handle(dead, 1.0) if isinstance(action, acts.Seal)]
    assert [[node.name for node in seal.generation.nodes] for seal in seals] == [["a"]]
    assert seals[0].history.left == ("b", "c")


@pytest.mark.parametrize(
    ("gone", "back"),
    [(e.EtcdImpaired(reason="full"), e.EtcdImpaired(reason="")), (e.EtcdLost(since=1.1), e.EtcdBack())],
    ids=["full", "away"],
)
def test_trainers_may_lose_each_other_during_an_etcd_outage(gone: e.Event, back: e.Event) -> None:
    """A member that knows of a death has `Policy.peer_lost` to report it once etcd accepts writes again.

    Otherwise the dead node would be sealed into one more generation, for its tomb and that generation are written at
    once.
    """

    def listed() -> list[e.Event]:
        members = [e.MemberPut(record=MemberRecord(node=n), order=i, revision=i) for i, n in enumerate(NODES, 1)]
        report = e.ReportPut(id="b@b1", report=Report(incarnation="b1", peer_lost="1.1"), revision=10)
        return [e.Listed(tier=e.Tier.ROSTER, items=(*members, report), revision=10, gap=False)]

    core = member("a")
    core.handle(listed(), 1.0)
    core.handle([gone], 1.1)
    asked = [*core.handle([e.Tick()], 30.0), *core.handle([back, *listed(), e.Registered(revision=11)], 40.0)]
    assert not [action for action in asked if isinstance(action, acts.Seal)]
    assert not [a for a in core.handle([e.Tick()], 44.9) if isinstance(a, acts.Seal)]
    (seal,) = (action for action in core.handle([e.Tick()], 45.1) if isinstance(action, acts.Seal))
    assert seal.generation.cause is Cause.FAILURE


def test_the_cause_of_lost_peers_has_the_trainers_errors() -> None:
    """A generation formed because trainers lost each other quotes what their collectives said."""
    story = Story()
    story.tell("> start a b c\n> run 3")
    key = story.generation.key
    story.to("b", e.TrainerLostPeer(key=key, detail="rank 1: connection timed out, remote=[10.0.0.3]:41"))
    story.tell("> lost a\n> run 6")
    said = "trainers lost each other, and nobody died (b: rank 1: connection timed out, remote=[10.0.0.3]:41)"
    assert (story.generation.cause, story.generation.detail) == (Cause.FAILURE, said)


def test_an_idle_member_asks_for_no_tick() -> None:
    """If nothing is pending, nobody has to be woken: a quiet job costs no time.

    One whose trainers make steps is woken when they have stood still for long, and not before.
    """
    story = Story()
    story.tell("> policy maximum=3\n> start a b c d\n> run 5\n> step 7")
    woken = [core.alarm(story.now) for core in story.cores.values()]
    assert woken == [pytest.approx(story.now + STANDING)] * 3 + [None]
    story = Story()
    story.tell("> restart-mode\n> start a b c\n> run 5")
    assert [core.alarm(story.now) for core in story.cores.values()] == [None, None, None]


def finishing(core: Core, now: float, saved: SavedStep | None) -> list[acts.Action]:
    """Report from all three nodes that `main` returned and that they wrote this step."""
    reports = [
        e.ReportPut(id=node.id, report=Report(incarnation=node.incarnation, finished="1.1", saved=saved), revision=20)
        for node in NODES[1:]
    ]
    own: list[e.Event] = [e.Saved(saved=saved)] if saved is not None else []
    core._trainers._phase["1.1"] = TrainersPhase.RUNNING
    return core.handle([*own, e.MainFinished(key="1.1"), *reports], now)


def test_the_end_of_a_generation_that_is_over_does_not_replace_that_of_the_next() -> None:
    """A keeper that says late that the former has finished takes nothing back of what it said of this one."""
    core = member("a")
    finishing(core, 1.0, None)
    core.handle([e.MainFinished(key="0.1")], 1.1)
    assert core.report.finished == "1.1"


def ends(asked: list[acts.Action]) -> list[End]:
    return [action.end for action in asked if isinstance(action, acts.PutEnd)]


LAST = SavedStep(step=9, made_in=1, attempt=1, world=3)


def test_a_job_ends_when_its_last_step_is_committed() -> None:
    """All have finished, but the store has not confirmed the commit yet: the job does not end before that."""
    core = member("a")
    asked = finishing(core, 1.0, LAST)
    assert acts.Commit(saved=LAST, number=1) in asked
    assert ends(asked) == []
    assert ends(core.handle([e.Settled(saved=dataclasses.replace(LAST, step=8))], 1.5)) == []
    assert ends(core.handle([e.Settled(saved=LAST)], 2.0)) == [End(failed=False)]


def test_a_job_without_a_store_ends_at_once() -> None:
    """Nobody saved anything, so there is nothing to wait for."""
    assert ends(finishing(member("a"), 1.0, None)) == [End(failed=False)]


def test_an_uncommitted_last_step_ends_the_job_with_an_error() -> None:
    """It says whether the store refused or never answered, and what to do."""
    refused, silent = member("a"), member("a")
    finishing(refused, 1.0, LAST)
    (end,) = ends(refused.handle([e.Settled(saved=LAST, error="rank 2 wrote another step")], 2.0))
    assert end.failed
    assert "its last step is not in a checkpoint: rank 2 wrote another step" in end.detail
    finishing(silent, 1.0, LAST)
    assert ends(silent.handle([e.Tick()], COMMIT_LIMIT)) == []
    (end,) = ends(silent.handle([e.Tick()], 1.1 + COMMIT_LIMIT))
    assert end.failed


def test_a_safe_step_is_recorded_for_good() -> None:
    """The leader records it as soon as it knows; every later generation carries it on, whoever forms it."""
    core = member("a")
    running = core.view.generation
    assert running is not None
    assert not [
        a for a in core.handle([e.StepReported(step=1, etcd_away=False, safe=-1)], 1.0) if isinstance(a, acts.Mend)
    ]
    asked = core.handle([e.StepReported(step=2, etcd_away=False, safe=1)], 1.1)
    (mend,) = (action for action in asked if isinstance(action, acts.Mend))
    assert mend.generation == dataclasses.replace(running, reached=1)
    # The holder of rank 0 reports it too, since another may lead.
    assert [action.report.safe for action in asked if isinstance(action, acts.PutReport)] == [1]
    echo = e.GenerationPut(generation=mend.generation, revision=11)
    asked = core.handle([e.WriteDone(write=mend, ok=True), echo, e.StepReported(step=3, etcd_away=False, safe=2)], 1.2)
    assert not [action for action in asked if isinstance(action, acts.Mend | acts.PutReport | acts.Stop | acts.Prepare)]
    (seal,) = (a for a in core.handle([buried("b", Out.DEAD, "c")], 1.3) if isinstance(a, acts.Seal))
    assert seal.generation.reached == 2


def rolled_back(*items: e.OfBoard) -> e.Listed:
    return e.Listed(tier=e.Tier.BOARD, items=items, revision=3, gap=True, rolled_back=True)


def test_an_emptied_etcd_is_filled_again_by_the_members() -> None:
    """All register again, the leader writes the generation, and news of low revisions counts."""
    core = member("a")
    asked = core.handle([rolled_back()], 1.0)
    assert {acts.PutMember, acts.PutReport} <= {type(action) for action in asked}
    asked = core.handle([e.Registered(revision=4)], 1.1)
    assert acts.Campaign(expected=0) in asked
    claim = Claim(name="a", incarnation="a1")
    core.handle([e.LeaderPut(claim=claim, revision=5), e.WriteDone(write=asked[-1], ok=True)], 1.2)  # type: ignore[arg-type]
    asked = core.handle([e.Listed(tier=e.Tier.ROSTER, items=(), revision=5, gap=True, rolled_back=True)], 1.3)
    assert [action for action in asked if isinstance(action, acts.Mend)] == [
        acts.Mend(generation=core.view.generation, token=5, previous=0)  # type: ignore[arg-type]
    ]


def test_an_older_generation_of_a_backup_is_overwritten() -> None:
    """The backup has a garbled record and the end of an earlier job; the leader writes the newer generation over it."""
    core = member("a")
    older = Generation(number=0, attempt=1, cause=Cause.START, nodes=())
    items = (
        e.LeaderPut(claim=Claim(name="a", incarnation="a1"), revision=1),
        e.GenerationPut(generation=older, revision=2),
        e.EndPut(end=End(failed=True), revision=2),
    )
    asked = core.handle([rolled_back(*items)], 1.0)
    assert not core.exited
    assert core.view.generation.number == 1  # type: ignore[union-attr]
    asked = core.handle([e.Registered(revision=4)], 1.1)
    mend = [action for action in asked if isinstance(action, acts.Mend)]
    assert [(action.generation.number, action.previous) for action in mend] == [(1, 2)]


def restored_with_a_former_incarnation() -> tuple[Core, e.MemberPut]:
    """Return a leader that has written its generation into a backup again, and who is registered there as b."""
    core = member("a")
    lead = e.LeaderPut(claim=Claim(name="a", incarnation="a1"), revision=1)
    core.handle([rolled_back(lead)], 1.0)
    former = e.MemberPut(record=MemberRecord(node=dataclasses.replace(NODES[1], incarnation="b0")), order=2, revision=2)
    others = [e.MemberPut(record=MemberRecord(node=node), order=3, revision=3) for node in (NODES[0], NODES[2])]
    listed = e.Listed(tier=e.Tier.ROSTER, items=(former, *others), revision=4, gap=True, rolled_back=True)
    asked = core.handle([e.Registered(revision=4), listed], 1.1)
    assert not [action for action in asked if isinstance(action, acts.Bury)]
    (mend,) = (action for action in asked if isinstance(action, acts.Mend))
    assert core.view.generation is not None
    written = e.GenerationPut(generation=core.view.generation, revision=5)
    assert not core.handle([e.WriteDone(write=mend, ok=True), written], 1.2)
    return core, former


def test_a_former_incarnation_in_a_backup_replaces_nobody() -> None:
    """It was registered when the backup was made; its successor registers again, and is the newer one."""
    core, _ = restored_with_a_former_incarnation()
    again = e.MemberPut(record=MemberRecord(node=NODES[1]), order=6, revision=6)
    (bury,) = [action for action in core.handle([again], 1.3) if isinstance(action, acts.Bury)]
    assert (bury.id, bury.tomb.how) == ("b@b0", Out.REPLACED)


def test_who_may_be_a_backups_takes_part_once_the_other_is_out() -> None:
    """It may as well be a successor that registered as etcd came back: then the one in the generation is dead."""
    core, former = restored_with_a_former_incarnation()
    asked = core.handle([buried("b", Out.DEAD, "c")], 1.3)
    (seal,) = (action for action in asked if isinstance(action, acts.Seal))
    assert former.record.node in (*seal.generation.nodes, *seal.generation.spares)


def test_a_member_ahead_of_the_others_after_a_rollback_rejoins() -> None:
    """The others never saw the newest generation: its member is no longer one of theirs, and joins again."""
    core = member("b")
    newer = Generation(number=2, attempt=2, cause=Cause.JOIN, nodes=tuple(NODES))
    core.handle([e.GenerationPut(generation=newer, revision=12)], 1.0)
    core.handle([rolled_back()], 2.0)
    older = Generation(number=1, attempt=1, cause=Cause.START, nodes=tuple(NODES))
    asked = core.handle([e.GenerationPut(generation=older, revision=4)], 2.1)
    exits = [action for action in asked if isinstance(action, acts.Exit)]
    assert [action.rejoin for action in exits] == [True]


@pytest.mark.parametrize("job", [True, False])
def test_a_node_with_another_encryption_setting_is_refused(job: bool) -> None:
    """It could talk to nobody: it is told what to do before anybody counts on it."""
    core = Core(
        MemberRecord(node=NODES[0], encrypted=job),
        Policy(beside=False),
        lambda nodes, record, present, speeds=(): Plan(layout=Layout(), nodes=nodes),
    )
    members = tuple(
        e.MemberPut(record=MemberRecord(node=node, encrypted=encrypted), order=number, revision=number)
        for number, (node, encrypted) in enumerate(zip(NODES[:2], (job, not job), strict=True), 1)
    )
    lead = e.LeaderPut(claim=Claim(name="a", incarnation="a1"), revision=5)
    core.handle([e.Listed(tier=e.Tier.BOARD, items=(lead,), revision=9, gap=False)], 0.0)
    listed = e.Listed(tier=e.Tier.ROSTER, items=members, revision=9, gap=False)
    (bury,) = [a for a in core.handle([e.Registered(revision=9), listed], 0.0) if isinstance(a, acts.Bury)]
    assert (bury.id, bury.tomb.how) == ("b@b1", Out.REFUSED)
    assert "give cert= and key= to every node of the run, or to none" in bury.tomb.detail


def test_a_generation_that_begins_further_back_reports_its_own_steps() -> None:
    """What a lost generation had come to is no measure of whether those after it make progress."""
    core = member("a")
    core._trainers._phase["1.1"] = TrainersPhase.RUNNING
    core.handle([e.StepReported(step=9, etcd_away=False, safe=-1)], 1.0)
    assert core.report.step == 9
    again = dataclasses.replace(core.view.generation, number=2)  # type: ignore[type-var]
    core._trainers._phase["2.1"] = TrainersPhase.RUNNING
    core.handle([e.GenerationPut(generation=again, revision=12)], 1.1)
    core._trainers._phase[again.key] = TrainersPhase.RUNNING
    core.handle([e.StepReported(step=3, etcd_away=False, safe=-1)], 1.2)
    assert core.report.step == 3
    core.handle([e.StepReported(step=2, etcd_away=False, safe=-1)], 1.3)
    assert core.report.step == 3
