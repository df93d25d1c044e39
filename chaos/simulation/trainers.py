"""The minimum of what keepers and trainers answer to the core.

While no step is made each keeper says what its ranks are at: one of them stands still, or all wait for others.

A step needs every rank: trainers commit steps only while all of a generation's nodes train, run and reach each other.
A request to any of them - to leave, to finish - is sent with the step's vote, so that all obey at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING

from chaos.simulation.checkpoints import Checkpoints
from chaos.simulation.durations import Durations
from chaos.simulation.loop import Loop
from chaos.simulation.network import Network, State
from chaos.simulation.snapshots import Snapshots
from chaos.simulation.standstills import DEADLINE, At, stall
from elastic3d.health import vetted
from elastic3d.membership import events as e
from elastic3d.membership.records import SavedStep
from elastic3d.membership.slowness import Slowness
from elastic3d.planner.paced import step_seconds
from elastic3d.rollback import Rollback
from elastic3d.values import Generation, ModelProfile, Node

if TYPE_CHECKING:
    from chaos.simulation.node import Member

AUDITED = 4
"""One step in so many is audited, and all agree in it where no device is convicted."""

HUNG = 0.3
"""Seconds between two tries of a step that is not possible now."""

RHO = 3.0
"""How many times as long the work of a slow node takes."""

TIMING = 0.5
"""Seconds after which those that train look again whose work takes longer."""

LOOKING = 0.5
"""Seconds within which keepers notice that their ranks stand still, or move again."""

COPYING = (0.005, 0.1)
"""Seconds to copy a last snapshot."""

STAYING, GOING = 2.0, 60.0
"""Seconds after which trainers are told to have left though their last snapshot is not copied, by whether the node
stays; as `elastic3d.worker.keeper.departure` has them."""


class Phase(StrEnum):
    """How far one node's trainers of one generation are."""

    BUILDING = "building"
    PREPARED = "prepared"
    RUNNING = "running"
    OVER = "over"


class _Group:
    """The trainers of one generation on all nodes. unsafe: one left before its last snapshot was copied. slow: which
    nodes they were last found to wait for, None while nothing was.

    moved_at: when it began, or made its newest step. stuck: nodes of which a rank stands still. silent: nodes that
    said that theirs do, or wait for others. freed_at: by node, when a rank that stood still moved again. asked: nodes
    that have asked theirs to leave.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.phase: dict[str, Phase] = {}
        self.members: dict[str, Member] = {}
        self.running = self.steps = 0
        self.moved_at = 0.0
        self.stuck: dict[str, None] = {}
        self.silent: dict[str, None] = {}
        self.freed_at: dict[str, float] = {}
        self.asked: dict[str, None] = {}
        self.leaving = self.stepping = self.idle = self.broken = self.told = self.unsafe = False
        self.slow: frozenset[str] | None = None


class Trainers:
    """All trainers of the job. restored: called with a generation, the newest step before it, what it begins at,
    and in which generation that was made. stepped: called with a generation and the step it has made. stored: returns
    the step of the newest checkpoint and in which generation that was made. clean: the newest step that audits vouch
    for."""

    def __init__(
        self, loop: Loop, random: Random, network: Network, checkpoints: Checkpoints, *, durations: Durations,
        steps: int, restored: Callable[[Generation, int, int, int], None], stepped: Callable[[Generation, int], None],
        stored: Callable[[], tuple[int, int]], profile: ModelProfile, watched: bool = False,
    ) -> None:  # fmt: skip
        self.loop, self.random, self.network, self.checkpoints = loop, random, network, checkpoints
        self.snapshots = Snapshots()
        self._restored, self._stepped, self._stored = restored, stepped, stored
        self.durations, self.steps = durations, steps
        self.committed = self.clean = 0
        self._clean_nodes: Mapping[str, int] = {}
        # By generation and step, which steps of which nodes audits vouched for when it was made, and when that was.
        self._said: dict[tuple[int, int], tuple[Mapping[str, int], float]] = {}
        self.finishing = False
        self.prepared: dict[tuple[str, str], None] = {}
        self.left: dict[tuple[str, str], None] = {}
        # A separate one, so that all else is drawn as before.
        self._copying = Random("copies")
        self._looking = Random("looks")
        self._watched = watched
        self._profile = profile
        self._groups: dict[str, _Group] = {}
        # Whether any node was ever slow: what is found of speeds is told from then on.
        self.timed = False

    def running(self, key: str) -> list[Member]:
        """Return the nodes on which a generation's trainers run."""
        group = self._groups.get(key)
        return [m for id, m in group.members.items() if group.phase[id] is Phase.RUNNING] if group else []

    def prepare(self, member: Member, generation: Generation) -> None:
        """Build trainers; the member is told when they are ready."""
        group = self._groups.get(generation.key)
        known = group.generation if group is not None else generation
        newer = replace(known, reached=generation.reached, convicted=generation.convicted)
        if group is None or newer != generation:
            # Another generation under the same key: an emptied etcd counts from the beginning. That a step is safe, or
            # who was convicted, may be written into the record while its nodes prepare.
            group = self._groups[generation.key] = _Group(generation)
        group.phase[member.id], group.members[member.id] = Phase.BUILDING, member
        self.loop.later(self.durations.building(self.random), self._built, member, group)

    def _built(self, member: Member, group: _Group) -> None:
        if group.phase.get(member.id) is not Phase.BUILDING:
            return
        if member.state is State.PAUSED or not self._met(member, group):
            self.loop.later(HUNG, self._built, member, group)
            return
        group.phase[member.id] = Phase.PREPARED
        self.prepared[member.id, group.generation.key] = None
        member.tell(e.TrainersPrepared(key=group.generation.key))

    def _met(self, member: Member, group: _Group) -> bool:
        """Return whether the network lets a node's trainers connect to those of all others, ready or not."""
        by_id, passes, here = member.world.by_id, self.network.passes, member.host
        if not self.network.blocked:
            return True
        hosts = [by_id[node.id].host for node in group.generation.nodes if node.id != member.id]
        return all(passes(here, host) and passes(host, here) for host in hosts)

    def go(self, member: Member, generation: Generation) -> None:
        """Start prepared trainers."""
        group = self._groups[generation.key]
        group.phase[member.id] = Phase.RUNNING
        group.running += 1
        if group.running == len(generation.nodes) and not group.stepping:
            group.stepping = True
            loading = self._restore(member, generation)
            group.moved_at = self.loop.now + loading
            self.loop.later(loading + self.durations.step(generation), self._step, group)
        if member.sticks:
            # After its first step, so that each generation gets further.
            self.loop.later(1.5 * self.durations.step(generation), self._stick_again, member, group)
        if member.raises:
            self.loop.later(self.durations.step(generation) / 2, self._raise, member, group)

    def _restore(self, member: Member, generation: Generation) -> float:
        """Resume from the newest step that is whole in the memory of present nodes, or from a checkpoint that is newer;
        return the seconds that loading it takes.
        """
        nodes = (*generation.nodes, *generation.spares)
        processes = member.world.by_id
        there = [node.id for node in nodes if processes[node.id].alive]
        remembered = self.snapshots.newest(there, generation.distrusted)
        step, made = max(remembered, self._stored())
        self._restored(generation, self.committed, step, made)
        self.committed, self.clean = step, min(step, self.clean)
        said, _ = self._said.get((made, step), (None, 0.0))
        self._clean_nodes = vetted.begun(said, [n.name for n in generation.nodes], step)
        behind = self.durations.behind(generation) if generation.nodes else 1
        self.snapshots.began(generation, step, behind)
        return self.durations.loading(generation, stored=(step, made) != remembered)

    def left_safely(self, key: str, nodes: tuple[Node, ...]) -> bool:
        """Return whether each of these left at a boundary, and none before its last snapshot was copied."""
        group = self._groups.get(key)
        return group is not None and not group.unsafe and all((node.id, key) in self.left for node in nodes)

    def leave(self, member: Member, key: str) -> None:
        """Let a node ask for the next boundary."""
        group = self._groups.get(key)
        if group is not None:
            group.leaving = True
            group.asked[member.id] = None
            self._wake(group)

    def finish(self) -> None:
        """Let `main` return at the next boundary."""
        self.finishing = True
        for group in self._groups.values():
            self._wake(group)

    def stick(self, member: Member) -> str:
        """Let a running trainer of this node stand still; return the key of its generation, "" if none runs."""
        for key, group in self._groups.items():
            if group.phase.get(member.id) is Phase.RUNNING and not group.broken:
                group.stuck[member.id] = None
                group.silent.pop(member.id, None)
                self._wake(group)
                return key
        return ""

    def _stick_again(self, member: Member, group: _Group) -> None:
        if member.sticks and group.phase.get(member.id) is Phase.RUNNING:
            member.world.stick(member)

    def unstick(self, member: Member) -> None:
        """Let those of its trainers that stand still move again."""
        for group in self._groups.values():
            self._free(member.id, group)
            if member.id in group.silent:
                # It waits for others now, or makes a step before it has said so.
                self.loop.later(LOOKING, self._silent, member, group, group.moved_at)

    def _free(self, id: str, group: _Group) -> None:
        if id in group.stuck:
            del group.stuck[id]
            group.freed_at[id] = self.loop.now

    def stuck_in(self, key: str, within: float) -> tuple[str, ...]:
        """Return the nodes of which a rank stands still in a generation, or did until `within` seconds ago."""
        group = self._groups.get(key)
        if group is None:
            return ()
        freed = (id for id, at in group.freed_at.items() if self.loop.now - at <= within)
        return tuple(dict.fromkeys((*group.stuck, *freed)))

    def moves(self, key: str) -> bool:
        """Return whether no rank stands still in a generation, or its trainers have ended."""
        group = self._groups.get(key)
        return group is None or group.broken or not group.stuck

    def _look(self, group: _Group) -> None:
        """No step could be made: have each keeper say so once its ranks have been silent for long enough."""
        if not self._watched or self.loop.now < group.moved_at + DEADLINE:
            return
        for id, member in group.members.items():
            if id not in group.silent and group.phase[id] is Phase.RUNNING and member.state is State.RUNNING:
                group.silent[id] = None
                self.loop.later(self._looking.uniform(0.0, LOOKING), self._silent, member, group, group.moved_at)

    def time(self) -> None:
        """Let those that train find out, from now on, whose work takes longer, whether they make steps or not."""
        if not self.timed:
            self.timed = True
            self.loop.later(TIMING, self._time)

    def _time(self) -> None:
        for group in self._groups.values():
            members = [member for id, member in group.members.items() if group.phase[id] is Phase.RUNNING]
            slow = frozenset(member.id for member in members if member.slow)
            if not group.stepping or group.broken or len(members) < len(group.generation.nodes) or slow == group.slow:
                continue
            # Not at once: nobody knows before some steps were made.
            if group.slow is None and self.loop.now < group.moved_at + TIMING and not group.idle and group.steps < 2:
                continue
            group.slow = slow
            said = {id: Slowness(rho=RHO, kind="compute", since=self.committed) for id in sorted(slow)}
            for member in members:
                member.tell(e.NodesSlow(key=group.generation.key, step=self.committed, slow=said))
        self.loop.later(TIMING, self._time)

    def _pace(self, group: _Group) -> float:
        """Return how many times as long a step takes as one of nodes that are alike."""
        generation = group.generation
        speeds = [1.0 / RHO if group.members[node.id].slow else 1.0 for node in generation.nodes]
        if not self.timed or generation.layout is None or min(speeds) == 1.0:
            return 1.0
        slots, profile = len(generation.nodes[0].slots), self._profile
        return step_seconds(generation.layout, profile, slots, speeds) / step_seconds(
            generation.layout, profile, slots, [1.0] * len(speeds)
        )

    def _silent(self, member: Member, group: _Group, since: float) -> None:
        if group.moved_at == since and group.phase[member.id] is Phase.RUNNING:
            at = At.FAULT if member.id in group.stuck else At.WAIT
            silent = self.loop.now - since
            said = stall(group.generation, member.record.node, at, step=self.committed, silent=silent)
            group.silent[member.id] = None
            member.tell(e.RanksSilent(stall=said))

    def _moves(self, group: _Group) -> None:
        group.moved_at = self.loop.now
        for id in group.silent:
            self.loop.later(self._looking.uniform(0.0, LOOKING), self._moving, group.members[id], group)
        group.silent = {}

    def _moving(self, member: Member, group: _Group) -> None:
        member.tell(e.RanksMoving(key=group.generation.key))

    def _wake(self, group: _Group) -> None:
        if group.idle and not group.broken:
            group.idle, group.moved_at = False, self.loop.now
            self.loop.later(self.durations.step(group.generation), self._step, group)

    def stop(self, member: Member, key: str, *, silent: bool = False) -> None:
        """Kill one node's trainers; the others lose a peer, and notice unless its host is silent."""
        group = self._groups.get(key)
        if group is None or group.phase.get(member.id, Phase.OVER) is Phase.OVER:
            return
        ran = group.phase[member.id] is Phase.RUNNING
        self._free(member.id, group)
        if group.silent.pop(member.id, "") is None:
            self._moving(member, group)
        group.broken = group.broken or ran
        group.phase[member.id] = Phase.OVER
        if ran and not silent and not group.told:
            group.told = True
            for id, other in group.members.items():
                if group.phase[id] is Phase.RUNNING:
                    self.loop.later(self.random.uniform(0.005, 0.05), self._lose_peer, other, group)

    def stop_all(self, member: Member, *, silent: bool) -> None:
        """Kill all trainers of a node."""
        for key in [key for key, group in self._groups.items() if member.id in group.phase]:
            self.stop(member, key, silent=silent)

    def fail(self, member: Member, *, error: bool) -> bool:
        """Kill a running trainer of this node, or let its user's code raise; return whether one ran."""
        for key, group in self._groups.items():
            if group.phase.get(member.id) is Phase.RUNNING:
                self.stop(member, key)
                member.tell(e.TrainerFailed(key=key, detail="the trainer's own words", error=error))
                return True
        return False

    def lie(self, member: Member, seconds: float) -> Generation | None:
        """Have an audit of the step that is made now convict a device of this node; return the generation.

        seconds: after which the nodes hear of it: their trainers end at once, and say why when they are gone. None
        where none is convicted: its trainers do not run with others that could be witnesses, or not all of them run.
        """
        for key, group in self._groups.items():
            members = list(group.members.values())
            if group.phase.get(member.id) is not Phase.RUNNING or group.broken or group.stuck:
                continue
            if len(members) < 3 or group.running < len(members) or not self._together(members):
                return None
            group.broken = group.told = True
            accused = {member.id: member.record.node.place}
            for other in members:
                self._free(other.id, group)
                group.phase[other.id] = Phase.OVER
                ended = e.TrainerFailed if other is member else e.TrainerLostPeer
                words = ended(key=key, detail="a device computes wrongly", clean=self.clean, accused=accused)
                self.loop.later(seconds, other.tell, words)
            return group.generation
        return None

    def spike(self, member: Member) -> tuple[Generation, Rollback] | None:
        """Have the loss jump up in the step that is made now; return the generation, and what is left out.

        None where it does not: no trainers of this node run, or not all of its generation's.
        """
        for group in self._groups.values():
            members = list(group.members.values())
            if group.phase.get(member.id) is not Phase.RUNNING or group.broken or group.stuck:
                continue
            if group.running < len(members) or not self._together(members):
                return None
            group.broken = group.told = True
            before, step = group.generation.number + 1, self.clean
            rollback = Rollback(before=before, step=step, spike=step + 1, first=8 * step, stop=8 * step + 8)
            for other in members:
                self._free(other.id, group)
                group.phase[other.id] = Phase.OVER
                lost = e.TrainerLostPeer(
                    key=group.generation.key, detail="the loss jumped up", clean=step, rollback=rollback
                )
                other.tell(lost)
            return group.generation, rollback
        return None

    def _raise(self, member: Member, group: _Group) -> None:
        if group.phase[member.id] is not Phase.RUNNING:
            return
        if member.state is State.PAUSED:
            self.loop.later(HUNG, self._raise, member, group)
            return
        self.stop(member, group.generation.key)
        member.tell(e.TrainerFailed(key=group.generation.key, detail="the code of this node alone", error=True))

    def _lose_peer(self, member: Member, group: _Group) -> None:
        if group.phase[member.id] is Phase.RUNNING:
            group.phase[member.id] = Phase.OVER
            member.tell(e.TrainerLostPeer(key=group.generation.key))

    def _step(self, group: _Group) -> None:
        if group.broken:
            return
        members = list(group.members.values())
        if group.stuck or not self._together(members):
            self._look(group)
            self.loop.later(HUNG, self._step, group)
            return
        self._moves(group)
        if any(member.raises for member in members):
            return
        self.committed += 1
        if self.committed % AUDITED == 0:
            self.clean = self.committed - 1
            self._clean_nodes = dict.fromkeys(self._clean_nodes, self.clean)
            self.checkpoints.audited(group.generation.number, self._clean_nodes)
        step, key = self.committed, group.generation.key
        self._said[group.generation.number, step] = self._clean_nodes, self.loop.now
        self.snapshots.stepped(group.generation, step)
        self._stepped(group.generation, step)
        if self.finishing or group.leaving:
            for member in members:
                group.phase[member.id] = Phase.OVER
                if self.finishing:
                    member.tell(e.MainFinished(key=key))
                else:
                    self.loop.later(self._copying.uniform(*COPYING), self._copy, member, group, step, self.loop.now)
            group.broken = True
            return
        away = all(member.etcd_lost for member in members)
        saved, durable = None, self.durations.saved(group.generation, step, self.loop.now)
        if durable:
            made = group.generation
            saved = SavedStep(step=durable, made_in=made.number, attempt=made.attempt, world=made.world)
            self.checkpoints.made(saved, *self._said[made.number, durable])
        reported = self.durations.reported(group.generation, step, self.loop.now)
        for member in members:
            if reported:
                member.tell(e.StepReported(step=step, etcd_away=away, safe=step))
            if saved is not None:
                member.tell(e.Saved(saved=saved))
        group.steps += 1
        # Large jobs commit a few steps per generation and then wait for a boundary request, to be fast.
        group.idle = bool(self.steps) and group.steps >= self.steps
        if not group.idle:
            self.loop.later(self.durations.step(group.generation) * self._pace(group), self._step, group)

    def _copy(self, member: Member, group: _Group, step: int, since: float) -> None:
        """Copy the last snapshot to safety, then report that the trainers left; or give up when it takes too long.

        Where it is safe a node knows once it has asked its own trainers to leave, though they may have left before.
        """
        generation, to_come = group.generation, member.core.view.coming
        at = next(at for at, node in enumerate(generation.nodes) if node.id == member.id)
        stays = to_come is not None and any(node.id == member.id for node in (*to_come.nodes, *to_come.spares))
        holder = member.world.by_id[self.snapshots.holder(generation, at, to_come).id]
        if member.id in group.asked and self._together([member, holder]):
            self.snapshots.copied(generation, at, holder.record.node)
        elif member.alive and self.loop.now < since + (STAYING if stays else GOING):
            self.loop.later(HUNG, self._copy, member, group, step, since)
            return
        else:
            group.unsafe = True
        self.left[member.id, generation.key] = None
        member.tell(e.Left(key=generation.key, step=step))

    def _together(self, members: list[Member]) -> bool:
        if any(member.state is not State.RUNNING for member in members):
            return False
        hosts = [member.host for member in members]
        return not self.network.blocked or all(self.network.passes(a, b) for a in hosts for b in hosts if a != b)
