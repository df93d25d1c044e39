"""A node whose code raises where no other's does is put out, and the job goes on without it.

Two things show that it is the node and not the code:

*A newcomer.* It has never made a step, its code raises, that of an active node which has made steps does not, and no
other's does that has made steps: one that has lost its peer first may never get to where it would raise. The same goes
for a node whose code raises while it prepares for the generation that would take it in.

*The same one each time.* In all `Policy.tries` generations without progress the code of this node raised and no other's
did, and enough nodes are left without it. This counts as proof once: the next node whose code raises before any
progress ends the job. Memory that runs out proves nothing in this way: what a rank needs follows from its place in the
mesh, and whoever takes that place needs it too. As long as there is a layout that needs less, it proves nothing of a
newcomer either (`memory_bounds`).

Code that is wrong everywhere raises everywhere, but not at the same moment, and a node that loses a peer first does not
get to it. So no node is judged before all the others have reported the end of their trainers, or have had `HEARING`
seconds to do so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic3d.membership.machine import forming
from elastic3d.membership.machine.memory_bounds import acted
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.machine.view import View

HEARING = 2.0
"""Seconds the others have to report that their code raised too."""

SAID = ("error", "peer_lost", "failed", "left", "finished")
"""What a node may report of its trainers' end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raising:
    """out: ids to put out, each with the reason. waiting: more may follow once the others were heard."""

    out: dict[str, str] = field(default_factory=dict)
    waiting: bool = False


def raising(situation: Situation) -> Raising:
    """Judge the nodes whose code raised; none where torchrun restarts the workers and counts the tries itself."""
    view, roster, policy = situation.view, situation.roster, situation.policy
    leader_state, alarm = situation.leader_state, situation.alarm
    current, index, coming = view.generation, view.index, view.coming
    if not policy.beside or current is None or index is None:
        return Raising()
    out: dict[str, str] = {}
    if coming is not None:
        for id in roster.reports.who("error", coming.key):
            if id in roster.members and not view.active(id):
                out[id] = _words(roster, id, "while it prepared, and the nodes that train have no trouble")
    said = raised_in(view, roster)
    if acted(situation) is not None:
        said = [id for id in said if not roster.reports[id].out_of_memory]
    suspects = _newcomers(view, roster, said) or _each_time(situation, said)
    if not suspects:
        leader_state.raised = None
        return Raising(out=out)
    leader_state.raised = alarm.now if leader_state.raised is None else leader_state.raised
    heard = all(any(id in roster.reports.who(what, current.key) for what in SAID) for id in index.node_ranks)
    if heard or alarm.due(leader_state.raised + HEARING):
        return Raising(out=out | suspects)
    return Raising(out=out, waiting=True)


def raised_in(view: View, roster: Roster) -> list[str]:
    """Return the active nodes whose code raised in the sealed generation, in rank order."""
    current, index = view.generation, view.index
    if current is None or index is None:
        return []
    said = [id for id in roster.reports.who("error", current.key) if id in index.node_ranks and id in roster.members]
    return sorted(said, key=lambda id: index.node_ranks[id])


def _newcomers(view: View, roster: Roster, said: list[str]) -> dict[str, str]:
    assert view.index is not None
    steps = {id: report.step for id in view.index.node_ranks if (report := roster.reports.get(id)) is not None}
    if any(steps.get(id) for id in said) or not any(step and id not in said for id, step in steps.items()):
        return {}
    why = "before its first step, and no other's did"
    return {id: _words(roster, id, why) for id in said if not steps.get(id, 0)}


def _each_time(situation: Situation, said: list[str]) -> dict[str, str]:
    view, roster, policy = situation.view, situation.roster, situation.policy
    current, index = view.generation, view.index
    assert current is not None
    assert index is not None
    if policy.tries < 2 or current.tries + 1 < policy.tries or roster.reports.step() > current.tried_at:
        return {}
    if len(said) != 1 or {*current.raised, *said} != set(said) or roster.reports[said[0]].out_of_memory:
        return {}
    if not forming.suffice(situation, [id for id in roster.eligible if id not in said]):
        return {}
    return {said[0]: _words(roster, said[0], f"in each of {current.tries + 1} tries, and no other's did")}


def _words(roster: Roster, id: str, why: str) -> str:
    name, report = id.partition("@")[0], roster.reports[id]
    what = f"memory ran out on node {name}" if report.out_of_memory else f"the code of node {name} raised"
    return (
        f"{what} {why}: the job goes on without it. Mend what is wrong on that node and start it again. {report.detail}"
    )
