"""Which nodes this member's node cannot connect to while its trainers stand still.

Heartbeats go along the ring, and trainers talk to more nodes than a ring has neighbours. One dead connection between
two nodes that everybody else reaches does not look like a death to anybody: the trainers of both would wait to meet, or
wait in a collective, until their process groups give up. So a member whose trainers do not move tries the ports of the
other active nodes (`acts.Probe`). A connection needs both directions, and a port that refuses counts as reached: its
host answers.

A node that failed `TWICE` in a row is named in the report (`Report.unreachable`), until it has been reached for
`Policy.reach_again` seconds, or a step was made that needed both nodes. While trainers move no node is tried for their
sake: what they do proves more.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from itertools import islice

from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.generation_index import index_of
from elastic3d.membership.machine.trainers import Trainers, TrainersPhase
from elastic3d.membership.machine.view import View
from elastic3d.membership.policy import Policy
from elastic3d.values import Generation, Node

MEETING = 3.0
"""Seconds that trainers may take to build and to meet before the other nodes are tried. A try does no harm."""

STANDING = 10.0
"""Seconds without a step after which running trainers stand still."""

STEPS = 3.0
"""How many times the generation's longest step has to pass without one, if that is longer."""

TWICE = 2
"""Tries in a row that have to fail: one may meet a full queue or a lost packet."""

AGAIN = 0.5
"""Seconds between a try that failed and the next."""

EVERY = 5.0
"""Seconds between two tries while a node is reported unreachable, and at first if all are reached."""

SELDOM = 60.0
"""Most seconds between two tries, doubled each time all were reached: trainers may stand still for good reasons."""

MOST = 128
"""Most nodes of one generation tried at a time, and most that failed before; a larger job tries others next time."""

UNANSWERED = 30.0
"""Seconds after which a try whose outcome was never reported is made again."""

GONE = 600.0
"""Seconds after which a node that cannot be reached, and takes no part any more, is not tried again."""


@dataclass(slots=True)
class _Unreachable:
    """A node that is reported unreachable. reached_since, outside_since: None while it is not so."""

    peer: acts.RingPeer
    reached_since: float | None = None
    outside_since: float | None = None


@dataclass(slots=True)
class _Stand:
    """This node's trainers of one generation: in `phase` since `since`, or since their last step. longest: a step's."""

    phase: TrainersPhase
    since: float
    longest: float = 0.0
    stepped: bool = False


@dataclass(slots=True)
class Reach:
    """What the node `id` knows of the nodes it can connect to."""

    id: str
    _unreachable: dict[str, _Unreachable] = field(default_factory=dict)
    _failed: dict[str, tuple[acts.RingPeer, int]] = field(default_factory=dict)
    _stands: dict[str, _Stand] = field(default_factory=dict)
    _tried: dict[str, acts.RingPeer] = field(default_factory=dict)
    _asked_at: float | None = None
    _next_at: float = 0.0
    _pause: float = EVERY
    _turn: int = 0
    _reported: tuple[str, ...] = ()

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Ids of the nodes that this one cannot connect to, sorted."""
        return tuple(sorted(self._unreachable))

    def stepped(self, generation: Generation, now: float) -> None:
        """Take in that the trainers of a generation made a step: its nodes reach each other."""
        stand = self._stands.get(generation.key)
        if stand is not None:
            if stand.stepped:
                stand.longest = max(stand.longest, now - stand.since)
            stand.since, stand.stepped = now, True
        if self._failed or self._unreachable:
            self._failed.clear()
            for id in [id for id in self._unreachable if id in index_of(generation).node_ranks]:
                del self._unreachable[id]

    def probed(self, event: e.Probed, now: float) -> None:
        """Take in the outcome of a try."""
        tried, self._tried, self._asked_at = self._tried, {}, None
        for id in event.reached:
            self._failed.pop(id, None)
            known = self._unreachable.get(id)
            if known is not None and known.reached_since is None:
                known.reached_since = now
        for id in event.failed:
            known = self._unreachable.get(id)
            if known is not None:
                known.reached_since = None
                continue
            if id not in tried:
                continue
            count = self._failed[id][1] + 1 if id in self._failed else 1
            self._failed[id] = (tried[id], count)
            if count >= TWICE:
                del self._failed[id]
                self._unreachable[id] = _Unreachable(peer=tried[id])
        if self._failed:
            self._next_at = now + AGAIN
        else:
            self._next_at = now + (EVERY if self._unreachable else self._pause)
            self._pause = min(2 * self._pause, SELDOM)

    def follow(self, view: View, trainers: Trainers, policy: Policy, lost: str, alarm: Alarm) -> list[acts.Action]:
        """Return which nodes to try, and which are unreachable if that changed.

        lost: the key of the generation whose trainers lost a peer, "" for none.
        """
        self._forget(view, policy, alarm)
        still = self._standing(view, trainers, lost, alarm)
        if not still:
            # Forget failures without consequences; the next standstill is looked into at once.
            self._failed.clear()
            self._pause = EVERY
            if not self._unreachable:
                self._next_at = alarm.now
        actions: list[acts.Action] = []
        if (still or self._unreachable) and self._may_try(alarm):
            self._tried = self._chosen(still, view.tombs)
            if self._tried:
                self._asked_at = alarm.now
                actions.append(acts.Probe(peers=tuple(self._tried.values())))
            else:
                self._next_at = alarm.now + SELDOM
        if self._reported != self.unreachable:
            self._reported = self.unreachable
            actions.append(acts.Unreachable(ids=self._reported))
        return actions

    def _may_try(self, alarm: Alarm) -> bool:
        if self._asked_at is not None:
            return alarm.due(self._asked_at + UNANSWERED)
        return alarm.due(self._next_at)

    def _standing(self, view: View, trainers: Trainers, lost: str, alarm: Alarm) -> list[Generation]:
        """Return the generations whose trainers here stand still."""
        still: list[Generation] = []
        keys = []
        for generation in (view.generation, view.coming):
            phase = trainers.phase(generation.key) if generation is not None else None
            if generation is None or phase is None:
                continue
            keys.append(generation.key)
            stand = self._stands.get(generation.key)
            if stand is None or stand.phase is not phase:
                stand = self._stands[generation.key] = _Stand(phase, alarm.now)
            if generation.key == lost:
                patience = 0.0
            elif phase in (TrainersPhase.PREPARING, TrainersPhase.PREPARED):
                patience = MEETING
            else:
                patience = max(STANDING, STEPS * stand.longest)
            if alarm.due(stand.since + patience):
                still.append(generation)
        if len(self._stands) > len(keys):
            self._stands = {key: stand for key, stand in self._stands.items() if key in keys}
        return still

    def _chosen(self, still: list[Generation], out: Container[str]) -> dict[str, acts.RingPeer]:
        """Return the nodes to try now: those that failed, and as many others as allowed, different ones each time."""
        chosen = {id: known.peer for id, known in islice(self._unreachable.items(), MOST)}
        for id in chosen:
            # Move it behind those that are to be tried the next time.
            self._unreachable[id] = self._unreachable.pop(id)
        chosen |= {id: peer for id, (peer, _) in islice(self._failed.items(), MOST)}
        most = 0
        for generation in still:
            # Beginning after itself, so that not all nodes try the same ones; in a large job only some cost anything.
            nodes, here = generation.nodes, index_of(generation).node_ranks.get(self.id, 0)
            most = max(most, len(nodes) - 1)
            for step in range(min(len(nodes) - 1, MOST)):
                node = nodes[(here + 1 + (self._turn + step) % (len(nodes) - 1)) % len(nodes)]
                chosen.setdefault(node.id, _peer(node))
        self._turn = self._turn + MOST if most > MOST else 0
        return {id: peer for id, peer in chosen.items() if id != self.id and id not in out}

    def _forget(self, view: View, policy: Policy, alarm: Alarm) -> None:
        """Forget nodes that were reached for long enough, that are out, or that are long gone."""
        if not self._unreachable:
            return
        here = view.ring.index
        for id, known in list(self._unreachable.items()):
            known.outside_since = None if id in here else known.outside_since or alarm.now
            again = known.reached_since is not None and alarm.due(known.reached_since + policy.reach_again)
            gone = known.outside_since is not None and alarm.due(known.outside_since + GONE)
            if again or gone or id in view.tombs:
                del self._unreachable[id]


def _peer(node: Node) -> acts.RingPeer:
    return acts.RingPeer(id=node.id, address=node.address, port=node.heartbeat_port)
