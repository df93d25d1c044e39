"""elastic3d over a trace: the production membership machine and planner, with the costs of what trainers do.

The machine of `elastic3d/membership` runs for every node, in virtual time over models of etcd and of the network
(`chaos/simulation`); the leader's plans are those of `elastic3d/planner`. A node that is lost without notice vanishes:
its neighbours miss its heartbeats. One that is notified is drained, as a watcher of spot notices has it done.

Trainers take the times of `RecoveryCosts`. Snapshots are copied beside training. Their copies are at the buddy one step
later or, where sending one takes longer than a step, so many steps that one is on its way and another is to go; where
too many nodes are lost at once for memory to hold all of a step, training goes on from the newest checkpoint, which are
made one after another, each as soon as the one before is whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from chaos.goodput.costs import RecoveryCosts
from chaos.goodput.ledger import Account, Place, Spent
from chaos.goodput.lives import Crowd
from chaos.goodput.playing import Play, Report
from chaos.goodput.step_times import StepTimes
from chaos.simulation.durations import Durations
from chaos.simulation.network import State
from chaos.simulation.node import Member
from chaos.simulation.world import Observer, Setting, World
from elastic3d.errors import MembershipError
from elastic3d.membership import actions as acts
from elastic3d.membership.policy import Policy
from elastic3d.values import Generation

FOREVER = 1e9
"""Seconds for which the job waits for enough nodes: whoever rents them by the spot starts it again."""

REPORTED = 15.0
"""Seconds of quiet training after which members are told of a step again: none of their decisions waits for one."""

REMEMBERED = 60.0
"""Seconds of etcd's history that are kept, past every lease: no member of a trace is away from it and comes back."""

GONE = 0.5
"""Seconds after a node was taken away in which a process of it might have come back by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    key: str
    step: int
    whole_at: float


class CostedDurations(Durations):
    """What trainers of a planned model take. loads: called with the seconds that a generation's loading takes."""

    def __init__(self, times: StepTimes, costs: RecoveryCosts) -> None:
        super().__init__(build=(costs.build, costs.build), step=0.0)
        self._times, self._costs = times, costs
        self._save: _Save | None = None
        self._reported = ("", 0, 0.0)
        self.loads: Callable[[float], None] = lambda seconds: None

    def building(self, random: Random) -> float:
        """Return the measured time."""
        return self._costs.build

    def loading(self, generation: Generation, *, stored: bool) -> float:
        """Return the seconds from the beginning to the first step: what a device needs, and each node's part."""
        costs, part = self._costs, self._times.state_bytes / len(generation.nodes)
        seconds = costs.context + costs.communicators + costs.load + costs.first_step
        seconds += part / (costs.restore_bandwidth if stored else costs.peer_bandwidth)
        self.loads(seconds)
        return seconds

    def snapshot(self, generation: Generation) -> float:
        """Return the seconds by which a step is longer for the copy of a device's part of the state."""
        copied = self._part(generation) / self._costs.snapshot_bandwidth
        return self._costs.snapshot_slowdown * min(copied, self._planned(generation))

    def step(self, generation: Generation) -> float:
        """Return what the planner predicts, the vote, and the snapshot."""
        return self._planned(generation) + self._costs.vote + self.snapshot(generation)

    def behind(self, generation: Generation) -> int:
        """Return how many steps a buddy's copy is behind: one that is being sent, and then one that waited for it."""
        sent = self._part(generation) / self._costs.copy_bandwidth
        return max(1, math.ceil(2.0 * sent / self._planned(generation)))

    def _planned(self, generation: Generation) -> float:
        assert generation.layout is not None
        return self._times.seconds(generation.layout)

    def _part(self, generation: Generation) -> float:
        """Return the bytes of the state on a device."""
        layout = generation.layout
        assert layout is not None
        return self._times.state_bytes * layout.replicas / layout.world

    def saved(self, generation: Generation, step: int, now: float) -> int:
        """Return the step whose upload has ended; the next begins at once. One of an earlier generation begins anew."""
        save = self._save
        if save is not None and save.key == generation.key and now < save.whole_at:
            return 0
        seconds = self._times.state_bytes / len(generation.nodes) / self._costs.save_bandwidth
        self._save = _Save(key=generation.key, step=step, whole_at=now + seconds)
        return save.step if save is not None and save.key == generation.key else 0

    def reported(self, generation: Generation, step: int, now: float) -> bool:
        """Return whether it is one of a generation's first two steps, or the last one told is a while ago."""
        key, count, at = self._reported
        if key != generation.key:
            count = 0
        elif count >= 2 and now < at + REPORTED:
            return False
        self._reported = generation.key, count + 1, now
        return True


class Production(Play, Observer):
    """The whole job. notice: seconds before its end in which a node with an announced one is notified."""

    def __init__(
        self, name: str, crowd: Crowd, times: StepTimes, costs: RecoveryCosts, *, seed: int, notice: float, enough: int
    ) -> None:
        self._durations = CostedDurations(times, costs)
        policy = Policy(minimum=1, maximum=max(1, crowd.most), below_minimum=FOREVER)
        setting = Setting(
            policy=policy,
            profile=replace(times.profile, digest="goodput"),
            slots=times.slots,
            labels=True,
            durations=self._durations,
            planner=times.planner,
            stored=True,
        )
        self.world = World(setting, seed)
        super().__init__(name, crowd, self.world.loop, enough=enough, start=costs.node_start)
        self.world.observers.append(self)
        self._durations.loads = self._loads
        self._noticed: dict[int, None] = {}
        self._leaves = ""
        self._turn = 0
        for life in crowd.lives:
            if life.announced:
                self.loop.at(max(life.at, life.until - notice), self._notice, life.host, notice)

    def play(self, report: Report = lambda share: None) -> Account:
        """Play the whole trace; MembershipError if the job itself ended before it."""
        account = super().play(report)
        if self.world.ended:
            raise MembershipError(
                "the simulated job ended before its trace, because every node that was left had been told to leave; "
                "give another --seed, or a smaller --announced"
            )
        return account

    def tidy(self) -> None:
        """Forget the history of etcd, which would take gigabytes for a trace of days."""
        self.world.etcd.forget(REMEMBERED)

    # Nodes.

    def ready(self, host: int) -> None:
        """Start its process."""
        self.world.start(host)

    def lost(self, host: int, active: bool) -> None:
        """Let its host vanish."""
        self._vanish(host)
        self.loop.later(GONE, self._vanish, host)
        if active:
            self._turn += 1
            self.ledger.pause(Spent.REPEATED, Spent.RECOVERY, self.loop.now)

    def _vanish(self, host: int) -> None:
        member = self.world.member(host)
        if member is not None:
            self.world.end(member, State.VANISHED)

    def _notice(self, host: int, seconds: float) -> None:
        # If all were told to leave the job would end, for somebody to start it again.
        others = [one.host for one in self.world.alive() if one.host != host and one.host not in self._noticed]
        if others and self.world.member(host) is not None:
            self._noticed[host] = None
            self.world.notice(host, seconds)

    # What the job does.

    def acted(self, member: Member, action: acts.Action) -> None:
        """Remember which generation is to leave at its next boundary."""
        if isinstance(action, acts.AskLeave):
            self._leaves = action.key

    def restored(self, generation: Generation, before: int, step: int, made: int) -> None:
        """A generation begins."""
        now, ledger, by_id = self.loop.now, self.ledger, self.world.by_id
        assert ledger.steps == before, (ledger.steps, before)
        ledger.go_on_from(step, now)
        if ledger.training:
            ledger.pause(Spent.CHANGE, Spent.CHANGE, now)
        active = {by_id[node.id].host for node in generation.nodes}
        ledger.place_all(active, {by_id[node.id].host for node in generation.spares}, now)
        for host in self._noticed:
            if host not in active:
                ledger.place(host, Place.LEAVING, now)

    def _loads(self, seconds: float) -> None:
        self._turn += 1
        self.loop.later(seconds, self._begins, self._turn)

    def _begins(self, turn: int) -> None:
        if turn == self._turn:
            self.ledger.begin(self.loop.now)

    def stepped(self, generation: Generation, step: int) -> None:
        """A step was made; the next one begins, or the change that was planned."""
        self.ledger.stepped(self.loop.now, self._durations.snapshot(generation) / self._durations.step(generation))
        assert self.ledger.steps == step, (self.ledger.steps, step)
        if generation.key == self._leaves:
            self.ledger.pause(Spent.CHANGE, Spent.CHANGE, self.loop.now)
