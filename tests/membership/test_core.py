"""What a story does not show: news that comes late, twice, or in an order etcd and the network allow."""

from __future__ import annotations

from elastic3d.membership import events as e
from elastic3d.membership.core import Core
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import Claim, MemberRecord, Out, Tomb
from elastic3d.planner import Plan
from elastic3d.values import Cause, Generation, Layout, Node
from tests.membership.story import Story


def test_late_news_of_an_unwatched_peer_is_no_veto() -> None:
    """A heartbeat heard of a peer that is no longer watched must not keep it alive: nobody would say when it ends."""
    story = Story()
    story.tell("> start a b c d e\n> run 3")
    assert [peer[0] for peer in story.watched["a"]] == ["b", "c"]
    gone = story.cores["d"].record.node
    story.to("a", e.PeerHeard(name="d", incarnation=gone.incarnation, alive=True))
    story.tell("> vanish d\n> run 12")
    assert [node.name for node in story.sealed[-1].nodes] == ["a", "b", "c", "e"]


def test_an_earlier_incarnation_is_no_veto() -> None:
    """What was heard of a node's earlier incarnation says nothing of the one that came back under its name."""
    story = Story()
    story.tell("> policy lease=2\n> start a b c d\n> run 3\n> vanish b\n> start b\n> run 5")
    again = story.cores["b"].record.node
    assert again in story.sealed[-1].nodes
    # The new one is never heard: its host goes before the first heartbeat.
    for name in "acd":
        story.to(name, e.PeerHeard(name="b", incarnation=again.incarnation, alive=False))
        story.to(name, e.PeerHeard(name="b", incarnation="b2", alive=True))
    story.tell("> vanish b\n> run 8")
    assert [node.name for node in story.sealed[-1].nodes] == ["a", "c", "d"]


NODES = [Node(name=name, incarnation=f"{name}1", address="h", slots=(), heartbeat_port=1) for name in "abc"]


def member(name: str, *, leader: str = "a", maximum: int = 3) -> Core:
    """Return a core that knows a, b, c as registered and active in generation 1."""
    core = Core(
        MemberRecord(node=next(node for node in NODES if node.name == name)),
        Policy(maximum=maximum, beside=False),
        lambda nodes, record: Plan(layout=Layout(), nodes=nodes),
    )
    members = tuple(
        e.MemberPut(record=MemberRecord(node=node), order=i + 1, revision=i + 1) for i, node in enumerate(NODES)
    )
    generation = Generation(number=1, attempt=1, cause=Cause.START, nodes=tuple(NODES))
    sealed = e.GenerationPut(generation=generation, revision=8)
    lead = e.LeaderPut(claim=Claim(name=leader, incarnation=f"{leader}1"), revision=5)
    core.handle(e.Listed(items=(*members, lead, sealed), revision=9, gap=False), 0.0)
    return core


def refused(name: str) -> e.PeerRefused:
    return e.PeerRefused(name=name, incarnation=f"{name}1", evidence="refused")


def test_a_refusal_after_a_clean_leave_does_not_turn_it_into_a_death() -> None:
    """The tomb says how a node went; that its port refuses afterwards is no news."""
    core = member("a", leader="c")
    core.handle(e.TombPut(name="b", tomb=Tomb(incarnation="b1", how=Out.LEFT, by="b"), revision=10), 1.0)
    assert not [a for a in core.handle(refused("b"), 1.1) if isinstance(a, e.Bury)]


def test_a_leader_found_dead_is_succeeded_at_once_even_with_its_tomb_up() -> None:
    """Its key would stand until its lease ends; whoever finds the port refused takes the key over by its revision."""
    core = member("b", leader="a")
    core.handle(e.TombPut(name="a", tomb=Tomb(incarnation="a1", how=Out.DEAD, by="c"), revision=10), 1.0)
    assert e.Campaign(expected=5) in core.handle(refused("a"), 1.1)


def test_a_funeral_does_not_free_the_leader_for_a_second_write() -> None:
    """The leader has one write of its own under way at a time, whatever else is written meanwhile."""
    core = member("a")
    told = core.handle(refused("b"), 1.0)
    bury = next(action for action in told if isinstance(action, e.Bury))
    gone = e.TombPut(name="b", tomb=bury.tomb, revision=10)
    sealed = [action for action in core.handle(gone, 1.1) if isinstance(action, e.Seal)]
    assert len(sealed) == 1
    assert not [a for a in core.handle(e.WriteDone(write=bury, ok=True), 1.2) if isinstance(a, e.Seal)]
    again = core.handle(e.WriteDone(write=sealed[0], ok=False), 1.3)
    assert not [a for a in again if isinstance(a, e.Seal)], "the watch is given a moment to tell why"
    assert [a for a in core.handle(e.Tick(), 1.5) if isinstance(a, e.Seal)]
