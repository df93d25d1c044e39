"""How a node, or its trainers alone, leave: until when, on whose word, and where what only it holds is brought.

A keeper is told by its cloud, by an operator through the leader, or by SIGTERM and SIGINT. torchrun passes a signal it
gets to every keeper of its node at once, each a process group of its own; so a second signal is one to a keeper that
has had one already. torchrun also sends SIGTERM to end the keepers of a node of which one has failed: that is no
notice, and needs no telling apart, for the first keeper hears the failed one's connection close, and leaves at once.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from elastic3d.clock import SYSTEM, Clock
from elastic3d.membership import actions as acts
from elastic3d.membership import events as m
from elastic3d.membership.records import SIGNAL, Notice
from elastic3d.values import Generation, Node

if TYPE_CHECKING:
    from elastic3d.worker.checkpoints.node_checkpoints import Checkpoints
    from elastic3d.worker.journal import Journal
    from elastic3d.worker.keeper.generations import Generations
    from elastic3d.worker.keeper.trainer_group import TrainerGroup

MARGIN = 2.0
"""Seconds before the deadline (a quarter of a short one) that are kept for leaving in order."""
HELD_PATIENCE = 2.0
"""Seconds a planned change waits for the last snapshot to be at the buddy, on a node that stays."""
LAST_PATIENCE = 10.0
"""The same for one that nobody takes over from memory, and that is written to the store."""
GOING_PATIENCE = 60.0
"""The same on a node that is to leave and was not told by when: it holds what is copied alone, and who told it to leave
lets it go when its time is over."""
CLOSE_PATIENCE = 10.0
"""Seconds that writes to the store have to end when a node that is in no hurry leaves."""


@dataclass(slots=True)
class Departure:
    """deadline: monotonic time by which the node has to be gone; None while nobody has said so.

    told: whether the node is to leave at all.
    """

    told: bool = False
    deadline: float | None = None
    at_once: bool = False
    _waits_until: float = 0.0
    _signals: Counter[int] = field(default_factory=Counter)

    def signalled(self, slot: int) -> bool:
        """Take note of a signal to the keeper of `slot`; return whether it is its second: leave at once."""
        self._signals[slot] += 1
        return self._signals[slot] > 1

    def within(self, seconds: float | None, now: float) -> bool:
        """Take note that the node is to be gone in `seconds`, None for at leisure; return whether that is news.

        The earliest deadline counts.
        """
        news, self.told = not self.told, True
        if seconds is not None and (self.deadline is None or now + seconds < self.deadline):
            self.deadline = now + seconds
            self._waits_until = self.deadline - min(MARGIN, seconds / 4)
        return news

    def over(self, now: float) -> bool:
        """Return whether the time is up."""
        return self.deadline is not None and now >= self.deadline

    def waits_until(self, since: float, ordinary: float) -> float:
        """Return until when to wait for what this node alone holds to be safe: `ordinary` seconds without deadline."""
        if self.at_once:
            return since
        return since + ordinary if self.deadline is None else self._waits_until


def refuge(me: Node, buddy: Node | None, running: Generation, to_come: Generation) -> Node | None:
    """Return who is to hold the snapshots of `me` where it leaves, with its buddy or having none; None: nobody need.

    A node that takes part already is preferred to one that comes.
    """
    staying = {node.id: node for node in (*to_come.nodes, *to_come.spares)}
    if me.id in staying or (buddy is not None and buddy.id in staying):
        return None
    here = [node for node in running.nodes if node.id in staying]
    able = [node for node in (*here, *staying.values()) if len(node.slots) == len(me.slots)]
    return able[0] if able else None


class LeaveRequest:
    """proposed: the membership to come, None while there is none. drain: seconds there are after a signal.

    tell: what the membership hears. checkpoints: None where there is no store.
    """

    def __init__(
        self,
        generations: Generations,
        checkpoints: Checkpoints | None,
        tell: Callable[[m.Event], None],
        *,
        journal: Journal,
        drain: float,
        clock: Clock = SYSTEM,
    ) -> None:
        self._generations, self._checkpoints, self._tell = generations, checkpoints, tell
        self._journal, self._drain_seconds, self._clock = journal, drain, clock
        self._departure = Departure()
        self._signal_heeded = False
        self.proposed: Generation | None = None

    @property
    def told(self) -> bool:
        """Whether the node is to leave."""
        return self._departure.told

    @property
    def pause(self) -> float | None:
        """Seconds after which to look again though nothing has happened; None for never."""
        if any(world.leaving_since is not None for world in self._generations.worlds.values()):
            return 0.02
        return 0.2 if self._departure.deadline is not None else None

    def ended(self, end: acts.Exit) -> acts.Exit:
        """Return how the node's part ends: whoever was to leave, and was put out before it had, has left as told."""
        if self.told and end.rejoin:
            return acts.Exit(failed=False, detail=f"left the job, put out before it could say so: {end.detail}")
        return end

    # Being told.

    def signalled(self, slot: int, number: int) -> None:
        """Heed the first signal as a notice; a second one to the same keeper ends it at once."""
        name = signal.Signals(number).name
        if self._departure.signalled(slot):
            self._at_once(f"a second {name}")
        elif not self._signal_heeded:
            self._signal_heeded = True
            self.heed(Notice(kind=SIGNAL, seconds=self._drain_seconds, detail=name))

    def heed(self, notice: Notice) -> None:
        """Have the node drained: the leader forms a membership without it."""
        self.drain(notice.seconds, f"{notice.kind}: {notice.detail}")
        self._tell(m.Noticed(notice=replace(notice, at=self._clock.wall())))

    def drain(self, seconds: float | None, detail: str) -> None:
        """Take note that the node is to be gone in `seconds`, at leisure where None."""
        if self._departure.within(seconds, self._clock.monotonic()):
            self._journal.emit("node.draining", seconds=seconds, detail=detail)

    def _at_once(self, why: str) -> None:
        """Leave with whatever the trainers are doing, once."""
        if not self._departure.at_once:
            self._departure.at_once = True
            self._journal.emit("node.leaving", detail=why)
            self._tell(m.LeaveAsked())

    # Bringing to safety what only this node holds.

    def take_refuge(self, me: Node) -> None:
        """Have the snapshots copied to a node that stays, where this one leaves with its buddy, or without one.

        A membership that was given up leaves them where they were before it: who was to come may be dead.
        """
        generations = self._generations
        running = generations.running
        if running is None:
            return
        if self.proposed is not None:
            host = refuge(me, generations.buddy, running, self.proposed)
            if host is not None:
                generations.keep_with(host)
        elif generations.buddy != generations.own_buddy and generations.trainers(running.key):
            generations.keep_with(generations.own_buddy)

    def ask_leave(self, key: str) -> None:
        """Have the trainers of a generation leave at a step boundary."""
        world = self._generations.worlds.get(key)
        if world is not None:
            # With nobody to take over the job stops, or waits for nodes that may not come.
            world.last = self._checkpoints is not None and (self.proposed is None or not self.proposed.nodes)
        for slot, trainer in self._generations.trainers(key):
            slot.ask_leave(trainer)

    def flushed(self, slot: int, step: int) -> None:
        """Take note that a slot's part of a step is in the store, or will not be."""
        for world in self._generations.worlds.values():
            if world.leaving_since is not None and world.flushing and world.step == step:
                world.flushed.add(slot)

    def look(self) -> None:
        """Tell the others that trainers left, once what they left is safe, or waiting does not help."""
        now = self._clock.monotonic()
        for key, world in list(self._generations.worlds.items()):
            if world.leaving_since is None or not world.over:
                continue
            if world.last and not world.flushing:
                self._flush(world)
            going = GOING_PATIENCE if self._departure.told else HELD_PATIENCE
            patience = LAST_PATIENCE if world.last else going
            if world.left_safely() or now > self._departure.waits_until(world.leaving_since, patience):
                del self._generations.worlds[key]
                self._tell(m.Left(key=key, step=world.step))
        if self._departure.over(now):
            self._at_once("its time to leave is up")

    def close_patience(self) -> float:
        """Return how many seconds writes to the store still have when the node's part ends well."""
        now = self._clock.monotonic()
        return max(0.0, self._departure.waits_until(now, CLOSE_PATIENCE) - now)

    def _flush(self, world: TrainerGroup) -> None:
        """Write what the trainers left to the store: no checkpoint may have been due at that step."""
        assert self._checkpoints is not None
        world.flushing = True
        world.flushed |= self._checkpoints.flush(world.step, world.generation)
