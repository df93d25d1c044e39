"""When nodes that were told to leave must be gone, and how their time is divided.

A drain is a planned change with a deadline. Two thirds of the time are for preparing its generation beside the running
one; then the change is made without waiting for that, so that the last third is for the step's end, the snapshot and
its copy. A node whose time is over is let go as it is: its going then counts as a loss.

The only active node has nobody to leave its state with. It trains on for the time that preparing may take, in case a
node comes that takes over the state from its memory; only then does everybody leave, and the state goes to the store.
"""

from __future__ import annotations

from elastic3d.membership import actions as acts
from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.roster import DepartureOrder, Roster
from elastic3d.membership.machine.view import View
from elastic3d.membership.records import End, Out, Tomb

PREPARING = 2 / 3
"""The part of a drain's time in which its generation may be prepared."""

FLUSH = 0.9
"""The part of a drain's time that checkpoints may take when everybody leaves; the rest is for exiting."""


def leaving(view: View, roster: Roster) -> dict[str, DepartureOrder]:
    """Return the active nodes that were told to leave."""
    return {id: one for id, one in roster.draining.items() if view.active(id)}


def hurried(drains: dict[str, DepartureOrder], alarm: Alarm) -> bool:
    """Return whether any node's time for preparing is over."""
    return any(_part(one, PREPARING, alarm) for one in drains.values())


def flushed(drains: dict[str, DepartureOrder], alarm: Alarm) -> bool:
    """Return whether any node's time for writing checkpoints is over."""
    return any(_part(one, FLUSH, alarm) for one in drains.values())


def everybody(roster: Roster) -> bool:
    """Return whether every registered member was told to leave."""
    return not roster.eligible and all(id in roster.draining for id in roster.members if id not in roster.refused)


def may_be_followed(view: View, drains: dict[str, DepartureOrder]) -> bool:
    """Return whether the only active node has the time to train on until another comes and takes over its state.

    It has a deadline, the last third of which is for its last checkpoint, and nobody waits for its processes to end.
    """
    index = view.index
    if index is None or len(index.node_ranks) != 1 or len(drains) != 1:
        return False
    [one] = drains.values()
    return one.deadline is not None and not one.stopping


def gone(view: View, id: str, one: DepartureOrder, *, late: bool = False) -> Tomb:
    """Return the tomb of a node that leaves because it was told to."""
    end = "; its time was over" if late else ""
    detail = f"told to leave ({one.reason}){end}"
    return Tomb(incarnation=id.partition("@")[2], how=Out.LEFT, detail=detail, by=view.me.node.name)


def end(view: View) -> acts.PutEnd:
    """Return the write that stops a job all of whose nodes leave."""
    return acts.PutEnd(end=End(failed=False, stopped=True, detail="every node was told to leave"), token=view.token)


def _part(one: DepartureOrder, part: float, alarm: Alarm) -> bool:
    return one.deadline is not None and alarm.due(one.since + part * (one.deadline - one.since))
