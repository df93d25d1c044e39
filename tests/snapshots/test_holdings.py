"""The rules of the safe step, alone and under any interleaving of copies, acknowledgements, votes and deaths."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from elastic3d.errors import StateError
from elastic3d.snapshots.holdings import BufferState, Cadence, Holdings, Mark, Origin, Replicas


def take(holdings: Holdings, mark: Mark, *, checkpoint: bool = False) -> None:
    """Write a snapshot into some granted buffer."""
    holdings.grant()
    index = holdings.places().index(BufferState.GRANTED)
    holdings.written(index, mark, checkpoint=checkpoint)


def hold(holdings: Holdings, mark: Mark) -> None:
    """Replicate a snapshot."""
    holdings.begin(mark)
    holdings.end(mark, held=True)


def begun() -> Holdings:
    """Holdings of generation 1, from step 0."""
    holdings = Holdings()
    holdings.restored(1, None)
    return holdings


def test_the_safe_step_and_later_snapshots_are_kept() -> None:
    """A vote frees only those older than the safe step."""
    holdings = begun()
    for step in (1, 2, 3):
        take(holdings, Mark(1, step))
        hold(holdings, Mark(1, step))
    holdings.safe(Mark(1, 2))
    assert holdings.marks() == [Mark(1, 2), Mark(1, 3)]
    assert holdings.held == 3


def test_snapshots_are_replicated_in_order() -> None:
    """A rank that holds a step holds every taken step before it."""
    holdings = begun()
    take(holdings, Mark(1, 1))
    take(holdings, Mark(1, 2))
    assert holdings.next_to_replicate() == Mark(1, 1)
    holdings.begin(Mark(1, 1))
    holdings.end(Mark(1, 1), held=False)
    assert holdings.next_to_replicate() == Mark(1, 1)
    hold(holdings, Mark(1, 1))
    assert holdings.next_to_replicate() == Mark(1, 2)


def test_a_refused_snapshot_is_not_sent_again_until_the_buddy_changes() -> None:
    """A buddy that knows a newer generation will not change its mind."""
    holdings = begun()
    take(holdings, Mark(1, 1))
    holdings.begin(Mark(1, 1))
    holdings.end(Mark(1, 1), held=False, refused=True)
    assert holdings.next_to_replicate() is None
    holdings.buddy_changed()
    assert holdings.next_to_replicate() == Mark(1, 1)


def test_a_new_buddy_gets_the_snapshots_of_the_former_one() -> None:
    """A safe snapshot must be in two places again and is reported when it is: a leaving node waits for that."""
    holdings = begun()
    take(holdings, Mark(1, 1))
    hold(holdings, Mark(1, 1))
    holdings.buddy_changed()
    assert holdings.next_to_replicate() == Mark(1, 1)
    assert holdings.held == -1
    holdings.begin(Mark(1, 1))
    assert holdings.end(Mark(1, 1), held=True)
    assert holdings.held == 1


def test_a_dead_trainers_unfinished_buffer_is_freed() -> None:
    """Written ones stay."""
    holdings = begun()
    take(holdings, Mark(1, 1))
    holdings.trainer_gone()
    assert holdings.marks() == [Mark(1, 1)]
    assert holdings.places().count(BufferState.FREE) == 3


def test_a_trainer_that_is_gone_late_gives_its_buffers_back() -> None:
    """One that was killed ends when the kernel has ended it; its buffers come back then, and no others."""
    holdings = Holdings()
    holdings.restored(1, None)
    holdings.grant(1)
    holdings.written(0, Mark(1, 1), checkpoint=False)
    holdings.restored(2, Mark(1, 1))
    assert holdings.grant(2) == []
    holdings.want(2)
    holdings.trainer_gone(1)
    free = holdings.grant(2)
    assert len(free) == 3
    holdings.trainer_gone(1)
    assert holdings.places().count(BufferState.GRANTED) == 3
    holdings.written(free[0], Mark(2, 2), checkpoint=False)


def test_a_generation_keeps_its_predecessors_safe_step_until_it_has_its_own() -> None:
    """The restored snapshot stays through votes without a safe step, and goes with the first that has one."""
    holdings = begun()
    for step in (1, 2, 3):
        take(holdings, Mark(1, step))
    holdings.restored(2, Mark(1, 2))
    assert holdings.marks() == [Mark(1, 2)]
    take(holdings, Mark(2, 3))
    take(holdings, Mark(2, 4))
    assert Mark(1, 2) in holdings.marks()
    hold(holdings, Mark(2, 3))
    holdings.safe(Mark(2, 3))
    assert holdings.marks() == [Mark(2, 3), Mark(2, 4)]


def test_nothing_is_dropped_before_the_new_generation_has_restored() -> None:
    """Between a death and the next restore every snapshot may be the one that all still have."""
    holdings = begun()
    for step in (1, 2, 3):
        take(holdings, Mark(1, step))
    holdings.trainer_gone()
    assert len(holdings.marks()) == 3


def test_a_final_snapshot_replaces_one_that_is_not_yet_safe() -> None:
    """At a planned change there is no more vote to wait for; the safe step stays."""
    holdings = begun()
    for step in (1, 2, 3, 4):
        take(holdings, Mark(1, step))
        if step == 1:
            hold(holdings, Mark(1, 1))
            holdings.safe(Mark(1, 1))
    assert holdings.grant() == []
    holdings.begin(Mark(1, 2))
    holdings.want()
    assert holdings.marks() == [Mark(1, 1), Mark(1, 2), Mark(1, 4)]  # 2 is being sent
    assert len(holdings.grant()) == 1


def test_a_final_snapshot_waits_while_all_are_being_sent() -> None:
    """A buffer is never handed out while the replicator reads it."""
    holdings = Holdings(2)
    holdings.restored(1, None)
    for step in (1, 2):
        take(holdings, Mark(1, step))
        holdings.begin(Mark(1, step))
    holdings.want()
    assert holdings.grant() == []
    holdings.end(Mark(1, 2), held=False)
    assert len(holdings.grant()) == 1


def test_a_pinned_snapshot_is_kept_until_it_is_released() -> None:
    """An upload's snapshot stays through votes and generations, and one more buffer makes up for it."""
    holdings = begun()
    take(holdings, Mark(1, 1), checkpoint=True)
    holdings.pin(1)
    for step in (2, 3, 4):
        take(holdings, Mark(1, step))
        hold(holdings, Mark(1, step))
        holdings.safe(Mark(1, step))
    holdings.restored(2, Mark(1, 4))
    assert holdings.marks() == [Mark(1, 1), Mark(1, 4)]
    holdings.release()
    assert holdings.marks() == [Mark(1, 4)]


def test_one_pin_at_a_time() -> None:
    """A second upload waits for the first; a checkpoint that nobody writes gives way to the next."""
    holdings = begun()
    take(holdings, Mark(1, 1), checkpoint=True)
    take(holdings, Mark(1, 2), checkpoint=True)
    holdings.safe(Mark(1, 2))
    assert holdings.marks() == [Mark(1, 2)]
    holdings.pin(2)
    take(holdings, Mark(1, 3), checkpoint=True)
    with pytest.raises(StateError, match="try again"):
        holdings.pin(3)
    with pytest.raises(StateError, match="no longer in memory"):
        holdings.pin(1)
    holdings.unpin(2)  # in use: stays
    holdings.safe(Mark(1, 3))
    assert Mark(1, 2) in holdings.marks()


def test_a_lent_snapshot_is_kept_until_every_borrower_has_given_it_back() -> None:
    """It stays through votes, generations and a final snapshot that wants its buffer."""
    holdings = begun()
    take(holdings, Mark(1, 1))
    assert holdings.lend(Mark(1, 1)) == holdings.lend(Mark(1, 1))
    for step in (2, 3, 4):
        take(holdings, Mark(1, step))
    holdings.restored(2, None)
    holdings.want()
    assert holdings.marks() == [Mark(1, 1)]
    holdings.take_back(Mark(1, 1))
    assert holdings.marks() == [Mark(1, 1)]
    holdings.take_back(Mark(1, 1))
    assert holdings.marks() == []


def test_nothing_arrives_where_a_dropped_replica_is_still_lent() -> None:
    """Its buffer serves again when it is given back."""
    replicas = Replicas()
    origin = Origin(generation=1, rank=3)
    lent = replicas.begin(origin, 1, [1])
    assert lent is not None
    assert replicas.complete(lent)
    replicas.lend(lent)
    replicas.restored(2, None)
    assert replicas.held() == []
    other = replicas.begin(Origin(generation=2, rank=3), 2, [2])
    assert other not in (None, lent)
    replicas.take_back(lent)
    assert replicas.begin(Origin(generation=2, rank=3), 3, [2, 3]) == lent


def test_replicas_of_an_older_generation_are_refused() -> None:
    """A cut-off rank of the past can neither place a snapshot nor finish one."""
    replicas = Replicas()
    late = replicas.begin(Origin(generation=4, rank=0), 9, [9])
    assert late is not None
    replicas.refuse_below(5)
    assert replicas.begin(Origin(generation=4, rank=0), 10, [10]) is None
    assert not replicas.complete(late)
    assert replicas.held() == []


def test_a_spare_drops_what_the_generation_it_follows_needs_no_more() -> None:
    """It hears no votes, and many generations of others may pass: it keeps what the newest one would go back to."""
    replicas = Replicas()
    base = None
    for generation in range(1, 10):
        for step in (1, 2):
            origin = Origin(generation=generation, rank=0)
            replicas.follow(generation, base)
            buffer = replicas.begin(origin, step, [1, 2])
            assert buffer is not None
            assert replicas.complete(buffer)
            held = {Mark(one.generation, step) for one, step, _ in replicas.held()}
            own = {Mark(generation, older) for older in range(1, step + 1)}
            assert held == own | ({base} - {None})
        base = Mark(generation, 1)
    held = replicas.held()
    replicas.refuse_below(10)
    replicas.follow(10, None)
    assert replicas.held() == held, "once it trains itself, votes say what is needed"


def test_a_buddy_drops_only_what_its_origin_has_dropped() -> None:
    """It needs no more buffers than the origin, however long it goes on."""
    replicas = Replicas()
    origin = Origin(generation=1, rank=3)
    buffers = set()
    for step in range(1, 50):
        buffer = replicas.begin(origin, step, [s for s in (step - 2, step - 1, step) if s > 0])
        assert buffer is not None
        buffers.add(buffer)
        assert replicas.complete(buffer)
    assert sorted(step for _, step, _ in replicas.held()) == [47, 48, 49]
    assert len(buffers) <= 4


# A model of the whole: nodes with one rank each, the buddy of a rank on the next node.


@dataclass
class Node:
    """A keeper with its holdings and, in a generation, a trainer."""

    name: int
    holdings: Holdings = field(default_factory=Holdings)
    replicas: Replicas = field(default_factory=Replicas)
    cadence: Cadence = field(default_factory=Cadence)
    rank: int = -1
    told_held: int = -1  # what the trainer has been told
    votes_heard: int = 0  # votes the keeper has been told of
    copying: int = -1
    restored: bool = False
    steps: int = 0
    lent: Mark | None = None  # at home, to the trainer that restores from it
    lent_replicas: list[int] = field(default_factory=list)

    def borrow(self, mark: Mark | None) -> None:
        """Let the trainer read all that this node has of a snapshot."""
        if mark is not None and mark in self.holdings.marks():
            self.holdings.lend(mark)
            self.lent = mark
        for origin, step, buffer in self.replicas.held():
            if Mark(origin.generation, step) == mark:
                self.replicas.lend(buffer)
                self.lent_replicas.append(buffer)

    def give_back(self) -> None:
        """The trainer has read it, or is dead."""
        if self.lent is not None:
            assert self.holdings.find(self.lent) is not None, "a lent snapshot was dropped"
            self.holdings.take_back(self.lent)
            self.lent = None
        while self.lent_replicas:
            self.replicas.take_back(self.lent_replicas.pop())


class Cluster:
    """Generations of a few nodes, one small event at a time, in any order; what was once safe must stay restorable."""

    def __init__(self, nodes: int) -> None:
        self.generation = 0
        self.nodes = [Node(name) for name in range(nodes)]
        self.names = nodes
        self.safe: Mark | None = None
        self.votes: list[int] = []
        self.owners: dict[int, list[Node]] = {}
        self.seal()

    def seal(self) -> None:
        """Begin a generation with the present nodes; its ranks restore one by one."""
        self.generation += 1
        self.votes = []
        self.base = self.restorable()
        if self.safe is not None:
            assert self.base is not None, f"{self.safe} was safe and nothing is restorable"
            assert self.base >= self.safe, f"{self.safe} was safe and only {self.base} is restorable"
        self.owners[self.generation] = list(self.nodes)
        for rank, node in enumerate(self.nodes):
            node.holdings.trainer_gone()
            node.replicas.refuse_below(self.generation)
            node.cadence = Cadence()
            node.rank, node.told_held, node.votes_heard, node.copying = rank, -1, 0, -1
            node.restored, node.steps = False, self.base.step if self.base else 0
            node.give_back()
            node.borrow(self.base)

    def restorable(self) -> Mark | None:
        """The newest snapshot of which every rank's part is at a living node."""
        holders: dict[Mark, set[int]] = {}
        for node in self.nodes:
            for mark in node.holdings.marks():
                owner = next((r for r, n in enumerate(self.owners[mark.generation]) if n is node), None)
                assert owner is not None
                holders.setdefault(mark, set()).add(owner)
            for origin, step, _ in node.replicas.held():
                holders.setdefault(Mark(origin.generation, step), set()).add(origin.rank)
        whole = [mark for mark, ranks in holders.items() if len(ranks) == len(self.owners[mark.generation])]
        return max(whole, default=None)

    def restore(self, node: Node) -> None:
        """Let a trainer finish loading its state."""
        if not node.restored:
            node.restored = True
            node.give_back()
            node.holdings.restored(self.generation, self.base)
            node.replicas.restored(self.generation, self.base)

    def step(self) -> None:
        """Let all ranks vote, step, and decide alike whether to take a snapshot."""
        if not all(node.restored and node.copying < 0 for node in self.nodes):
            return
        safe = min(node.told_held for node in self.nodes)
        self.votes.append(safe)
        if safe >= 0:
            self.safe = Mark(self.generation, safe)
        takes = set()
        for node in self.nodes:
            node.cadence.voted(safe)
            node.steps += 1
            takes.add(node.cadence.take())
            if node.cadence.take():
                node.cadence.taken(node.steps)
                node.copying = node.steps
        assert len(takes) == 1
        assert len({node.steps for node in self.nodes}) == 1

    def hear_vote(self, node: Node) -> bool:
        """Report a vote to a keeper."""
        if node.votes_heard == len(self.votes):
            return False
        safe = self.votes[node.votes_heard]
        node.votes_heard += 1
        if safe >= 0:
            node.holdings.safe(Mark(self.generation, safe))
            node.replicas.settled(self.generation)
        return True

    def finish_copy(self, node: Node, pin: bool) -> None:
        """Complete a trainer's copy: messages arrive in order, so the keeper has received earlier votes."""
        if node.copying >= 0:
            while self.hear_vote(node):
                pass
            node.holdings.grant()
            assert BufferState.GRANTED in node.holdings.places(), "no buffer for a snapshot that all ranks take"
            take(node.holdings, Mark(self.generation, node.copying), checkpoint=pin)
            node.copying = -1

    def replicate(self, node: Node, arrives: bool) -> None:
        """Send a snapshot to the buddy, or lose it on the way."""
        mark = node.holdings.next_to_replicate()
        if mark is None or mark.generation != self.generation:
            return
        buddy = self.nodes[(self.nodes.index(node) + 1) % len(self.nodes)]
        node.holdings.begin(mark)
        held = True
        if buddy is not node:
            keep = [m.step for m in node.holdings.marks() if m.generation == mark.generation]
            buffer = buddy.replicas.begin(Origin(generation=mark.generation, rank=node.rank), mark.step, keep)
            assert buffer is not None
            assert buffer not in buddy.lent_replicas, "a lent replica is overwritten"
            if arrives:
                held = buddy.replicas.complete(buffer)
            else:
                buddy.replicas.abort(buffer)
                held = False
        node.holdings.end(mark, held=held)

    def tell_held(self, node: Node) -> None:
        """Report held snapshots to a trainer; the message may be late."""
        if node.restored:
            node.told_held = max(node.told_held, node.holdings.held)

    def die(self, node: Node) -> None:
        """Kill a node and add a new one, so that the number of nodes stays the same.

        Not before the last death is recovered from: otherwise node and buddy may be gone together.
        """
        if self.safe is not None and self.safe.generation != self.generation:
            return
        self.nodes.remove(node)
        self.nodes.append(Node(self.names))
        self.names += 1
        self.seal()

    def trainers_die(self) -> None:
        """Kill all trainers but no keeper: a fault without a death."""
        self.seal()

    def check(self) -> None:
        """Check the invariants at every moment, not only when they are needed."""
        if self.safe is not None:
            newest = self.restorable()
            assert newest is not None, self.safe
            assert newest >= self.safe, (newest, self.safe)


@settings(max_examples=400, deadline=None, phases=(Phase.generate,))  # a shorter history says no more
@given(nodes=st.integers(2, 4), seed=st.integers(0, 2**32), haste=st.sampled_from((0.2, 0.5, 0.8)))
def test_a_safe_step_stays_restorable(nodes: int, seed: int, haste: float) -> None:
    """Under random interleavings of copies, replicas, acknowledgements, votes and deaths.

    haste: how often replication gets a turn, against all else; below one half it is slower than the steps.
    """
    random, cluster = Random(seed), Cluster(nodes)
    for _ in range(250):
        node = random.choice(cluster.nodes)
        dice = random.random()
        if dice < 0.01:
            cluster.die(node)
        elif dice < 0.015:
            cluster.trainers_die()
        elif random.random() < haste:
            cluster.replicate(node, arrives=random.random() < 0.8)
            if random.random() < 0.7:
                cluster.tell_held(node)
        else:
            random.choice((cluster.restore, cluster.hear_vote))(node)
            cluster.finish_copy(node, pin=random.random() < 0.2)
            cluster.step()
        cluster.check()
