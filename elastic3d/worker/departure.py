"""How this node leaves: until when, on whose word, and with whom its snapshots stay.

A keeper is told by its cloud, by an operator through the leader, or by SIGTERM and SIGINT. torchrun passes a signal it
gets to every keeper of its node at once, each a process group of its own; so a second signal is one to a keeper that
has had one already. torchrun also sends SIGTERM to end the keepers of a node of which one has failed: that is no
notice, and needs no telling apart, for the first keeper hears the failed one's connection close, and leaves at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from elastic3d.values import Generation, Node

MARGIN = 2.0
"""Seconds before the deadline (a quarter of a short one) that are kept for leaving in order."""


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
