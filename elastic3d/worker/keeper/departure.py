"""How a node, or only its trainers, leave: by when, at whose request, and where the state that only it holds goes.

The request comes from the cloud, from an operator through the leader, or as SIGTERM or SIGINT. torchrun passes a signal
on to every keeper of its node at once, each a process group of its own; a signal is therefore a second one only if it
reaches a keeper that has already had one. torchrun also sends SIGTERM to end a node's keepers after one of them has
failed. That is no notice, and need not be told apart: the first keeper sees the failed one's connection close, and
leaves at once.
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
    from elastic3d.worker.checkpoints.uploader import TilesUploaded, WriteFailed
    from elastic3d.worker.journal import Journal
    from elastic3d.worker.keeper.generations import Generations

MARGIN = 2.0
"""Seconds before the deadline (a quarter of a short one) that are reserved for an orderly exit."""
HELD_PATIENCE = 2.0
"""Seconds for which a planned change waits until the buddy has the last snapshot, on a node that stays."""
LAST_PATIENCE = 10.0
"""The same for a last snapshot that goes to the store, since no node takes it over from memory."""
GOING_PATIENCE = 60.0
"""The same on a node that has to leave and has no deadline: it alone holds what is being copied, and whoever asked it
to leave ends it when they have waited long enough."""
LAST_REST = 1.0
"""The most seconds after which such a write that failed is tried again."""
CLOSE_PATIENCE = 10.0
"""Seconds that writes to the store have to end when a node leaves without a deadline."""


@dataclass(slots=True)
class Departure:
    """deadline: monotonic time by which the node has to be gone; None while nobody has said so.

    leaving: whether the node has been asked to leave.
    """

    leaving: bool = False
    deadline: float | None = None
    at_once: bool = False
    _waits_until: float = 0.0
    _signals: Counter[int] = field(default_factory=Counter)

    def signalled(self, slot: int) -> bool:
        """Take note of a signal to the keeper of `slot`; return whether it is its second: leave at once."""
        self._signals[slot] += 1
        return self._signals[slot] > 1

    def within(self, seconds: float | None, now: float) -> bool:
        """Take note that the node has to be gone in `seconds`, None for no deadline; return whether that is news.

        The earliest deadline counts.
        """
        news, self.leaving = not self.leaving, True
        if seconds is not None and (self.deadline is None or now + seconds < self.deadline):
            self.deadline = now + seconds
            self._waits_until = self.deadline - min(MARGIN, seconds / 4)
        return news

    def over(self, now: float) -> bool:
        """Return whether the time is up."""
        return self.deadline is not None and now >= self.deadline

    def waits_until(self, since: float, ordinary: float) -> float:
        """Return until when to wait for what only this node holds to be safe; ordinary: seconds without a deadline."""
        if self.at_once:
            return since
        return since + ordinary if self.deadline is None else self._waits_until


def refuge(me: Node, buddy: Node | None, running: Generation, to_come: Generation) -> Node | None:
    """Return a new holder for the snapshots of `me`, if it leaves together with its buddy or has none; None if not.

    A node that already takes part is preferred to a newcomer.
    """
    staying = {node.id: node for node in (*to_come.nodes, *to_come.spares)}
    if me.id in staying or (buddy is not None and buddy.id in staying):
        return None
    here = [node for node in running.nodes if node.id in staying]
    able = [node for node in (*here, *staying.values()) if len(node.slots) == len(me.slots)]
    return able[0] if able else None


class LeaveRequest:
    """Has the node leave in order once it is asked to. proposed: the next membership, None while there is none.

    drain: seconds to leave after a signal. tell: takes the events for the membership. checkpoints: None without a
    store.
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
    def leaving(self) -> bool:
        """Whether the node has been asked to leave."""
        return self._departure.leaving

    @property
    def pause(self) -> float | None:
        """Seconds after which to look again though nothing has happened; None for never."""
        if any(world.leaving_since is not None for world in self._generations.worlds.values()):
            return 0.02
        return 0.2 if self._departure.deadline is not None else None

    def ended(self, end: acts.Exit) -> acts.Exit:
        """Return how the node's part ends: one asked to leave, and evicted before it could, has left."""
        if self.leaving and end.rejoin:
            return acts.Exit(failed=False, detail=f"left the job, and was evicted before it could say so: {end.detail}")
        return end

    # Requests to leave.

    def signalled(self, slot: int, number: int) -> None:
        """Treat the first signal as a notice; a second one to the same keeper makes the node leave at once."""
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
        """Take note that the node has to be gone in `seconds`, None for no deadline."""
        if self._departure.within(seconds, self._clock.monotonic()):
            self._journal.emit("node.draining", seconds=seconds, detail=detail)

    def _at_once(self, why: str) -> None:
        """Leave without waiting for the trainers. Idempotent."""
        if not self._departure.at_once:
            self._departure.at_once = True
            self._journal.emit("node.leaving", detail=why)
            self._tell(m.LeaveAsked())

    # Saving what only this node holds.

    def take_refuge(self, me: Node) -> None:
        """Have the snapshots copied to a node that stays, if this one leaves together with its buddy or has none.

        When a proposed membership is given up, they go to `own_buddy` again: the newcomer may be dead.
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
            world.asked = True
            # With no node to take over, the job stops, or waits for nodes that may never come.
            world.last = self._checkpoints is not None and (self.proposed is None or not self.proposed.nodes)
        for slot, trainer in self._generations.trainers(key):
            slot.ask_leave(trainer)

    def heard(self, event: TilesUploaded | WriteFailed) -> None:
        """Take note of how a write ended; one of the last state that failed is tried again while there is time."""
        for world in self._generations.worlds.values():
            if world.leaving_since is not None and world.flushing:
                world.wrote(event, world.step, self._clock.monotonic(), longest_rest=LAST_REST)

    def look(self) -> None:
        """Report that trainers have left, once their state is safe or waiting longer would not help.

        They may have left at another node's request, before this one knows for which membership, and thus whether
        their state is safe there.
        """
        now = self._clock.monotonic()
        for key, world in list(self._generations.worlds.items()):
            if world.leaving_since is None or not world.over:
                continue
            if world.last and self._checkpoints is not None:
                # That step may not have been due for a checkpoint.
                world.write(self._checkpoints, world.step, now)
            going = GOING_PATIENCE if self._departure.leaving else HELD_PATIENCE
            patience = LAST_PATIENCE if world.last else going
            until = self._departure.waits_until(world.leaving_since, patience)
            if (world.asked and world.left_safely()) or now > until:
                del self._generations.worlds[key]
                self._tell(m.Left(key=key, step=world.step))
        if self._departure.over(now):
            self._at_once("its time to leave is up")

    def close_patience(self) -> float:
        """Return the seconds that writes to the store still have when the node's part ends well."""
        now = self._clock.monotonic()
        return max(0.0, self._departure.waits_until(now, CLOSE_PATIENCE) - now)
