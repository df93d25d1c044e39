"""Tell a membership story: several cores, an etcd and a network that are always consistent, and virtual time.

A story is a text of commands, one a line, behind `>`; what the members did because of it follows, indented.

    > policy minimum=2 maximum=4     before the first start
    > layout pp=4                    the same
    > restart-mode                   the same: without elastic3d.run
    > measured                       the same: it is known what each part of the model needs
    > oom log                        the same: what would be done where memory runs out is only reported; or off
    > start a b c                    nodes come, in this order
    > stranger x                     a node comes that runs another model
    > script x                       a node comes that runs another script with the same model
    > lags b 1.5                     b's work takes 1.5 times as long as the others', as all that train find
    > lags b 1.5 data                the same, of another kind
    > well b                         it does not any more
    > garbage x                      somebody writes garbage under a member key
    > twin b                         a second process comes under the name of a living node
    > kill b                         its keeper dies; the watchers' connections are refused
    > vanish b                       its host dies: nothing is refused, only silence and the lease's end
    > stop b | wake b                all its processes are stopped, and resume
    > leave b                        it leaves cleanly, and its process ends
    > fail b | error b               a trainer fails | the script raises
    > lies b                         a device of it computes wrongly, by the word of ranks on other nodes
    > lies b 30                      the same, and audits vouch for steps up to 30
    > final b | memory b             the script raises an error that is final | that memory ran out
    > short b 80                     memory runs out on it: 80 MiB were missing, none or more are not known to be
    > lost b                         its trainers lose a peer, and stop
    > lost b 30                      they stop for a conviction: audits vouch for steps up to 30
    > accuse c a b 30                the same on a and b, which say that it was a device of c's
    > spikes b 30                    they stop since the loss jumped up: the run goes back to step 30 or before
    > unprepared b                   the user's code raises while it prepares for a proposal
    > template b                     its template dies, and with it what trains and what prepares for a proposal
    > stuck b                        b's trainers stand still, and all others wait for them: every node says so
    > hangs b                        the same, and what stands still is the script's own code
    > stalled                        every node waits for its data: all say so, and none is at fault
    > moves                          all trainers move again
    > finish                         every running trainer's main returns
    > notice b 25                    its cloud says that it has 25 seconds left
    > signal b 25                    its processes get SIGTERM, from a sender that waits 25 seconds for them to end
    > drain b 60 | undrain b         an operator orders it to leave within 60 seconds | takes that back
    > quarantine b 600 | release b   an operator keeps the machine out | admits it again
    > revoke b                       an operator revokes its lease
    > expire                         etcd loses all leases, and every node is alive
    > etcd away | etcd back          nobody reaches etcd; leases do not end meanwhile
    > etcd full | etcd space         etcd takes no writes; leases go on and end
    > cut b | heal b                 b alone does not reach etcd; its lease ends
    > partition a b | mend           a, b and all others do not reach each other; etcd is reached by all
    > mute a b | deafen b            what a sends does not reach b | what anybody sends
    > unlink a b                     a and b do not reach each other; everybody else reaches both
    > deaf b                         etcd takes b's next decision, and the answer is lost
    > slow b                         its store is slow: the snapshots of its trainers are not safe in time
    > step 20                        every running trainer commits step 20
    > save                           every node wrote its last step's tiles to the store
    > run 5                          let 5 seconds pass
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from chaos.simulation.standstills import At, judge, stall
from elastic3d.distrust import Distrust
from elastic3d.etcd import Delete, Put
from elastic3d.health.memory import MemoryLadder
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.machine.core import Core
from elastic3d.membership.policy import Policy
from elastic3d.membership.reading import gone, read
from elastic3d.membership.records import (
    SIGNAL,
    Drain,
    MemberRecord,
    Notice,
    Quarantine,
    ReasonToGoBack,
    SavedStep,
    encode,
)
from elastic3d.membership.slowness import Slowness
from elastic3d.membership.transactions import Transaction, events_of, lease_of, own_lease, transaction
from elastic3d.planner import Costs, Plan, plan, plan_below
from elastic3d.rollback import Rollback
from elastic3d.shortfall import MemoryBound, Shortfall
from elastic3d.values import Generation, KeptActivations, Layout, ModelPart, ModelProfile, Node, Slot
from tests.membership.keys import Changed, Keys

PROFILE = ModelProfile(blocks=8, parameters=1000, micro_batches=8, micro_batch=2, digest="job")
ROOT = "/job/"
MIB = 1 << 20
PULSE = 5.0
"""Seconds within which a member without a write learns whether etcd accepts writes."""

SILENCE = 1.1
"""Seconds without a byte after which a neighbour counts as silent."""


class Story:
    """Runs commands and records what happened as lines. Cores have the names that the commands give them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.policy = Policy(minimum=1, maximum=8, first_gather=1.0)
        self.profile: ModelProfile | None = PROFILE
        self.layout = Layout()
        self.costs: Costs | None = None
        self.ladder: MemoryLadder | None = MemoryLadder()
        self.cores: dict[str, Core] = {}
        self.names: dict[str, str] = {}
        self.keys = Keys()
        self.lease: dict[str, int] = {}
        self.leases = itertools.count(1)
        self.watching_roster: set[str] = set()
        self.registered: set[str] = set()
        self.watched: dict[str, acts.WatchPeers] = {}
        self.unheard: dict[tuple[str, str], float] = {}
        self.killed: set[str] = set()
        self.stopped: set[str] = set()
        self.backlog: dict[str, list[e.Event]] = {}
        self.blocked: Callable[[str, str], bool] = lambda one, other: False
        self.away = self.full = False
        self.impaired: set[str] = set()
        self.heals = 0
        self.deaf: set[str] = set()
        self.slow: set[str] = set()
        self.pending: dict[str, list[tuple[Core, acts.Write]]] = {}
        self.cut: set[str] = set()
        self.trainers: dict[str, dict[str, str]] = {}
        self.incarnations = itertools.count(1)
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.alarms: dict[str, float] = {}
        self.tie = itertools.count()
        self.steps = 40
        self.sealed: list[Generation] = []
        self.awaited: dict[str, int] = {}
        self.unfit: dict[str, str] = {}
        self.rhos: dict[str, float] = {}
        self.kind = "compute"

    def tell(self, text: str) -> list[str]:
        """Run every command of the text and return the story with its results."""
        for line in text.splitlines():
            if line.startswith("#") or not line.strip():
                self.lines.append(line)
            elif line.startswith(">"):
                self.lines.append(line)
                self.command(*line[1:].split())
        return self.lines

    def command(self, verb: str, *words: str) -> None:
        match verb:
            case "policy":
                changes = {k: self.number(k, v) for k, v in (w.split("=") for w in words)}
                self.policy = replace(self.policy, **changes)
            case "layout":
                self.layout = Layout(**{axis: int(size) for axis, size in (w.split("=") for w in words)})
            case "measured":
                kept = {"none": KeptActivations(whole=64 * MIB), "full": KeptActivations(whole=4 * MIB)}
                block = ModelPart(parameters=1_000_000, kept=kept)
                self.profile = replace(PROFILE, parameters=8_000_000, block=block)
            case "oom":
                self.ladder = None if words[0] == "off" else MemoryLadder(acts=words[0] != "log")
            case "restart-mode":
                self.policy, self.profile = replace(self.policy, beside=False), None
            case "start":
                for name in words:
                    self.start(name)
            case "stranger":
                mine, self.profile = self.profile, replace(PROFILE, digest="another")
                self.start(words[0])
                self.profile = mine
            case "script" | "health":
                other = {"script": "another"} if verb == "script" else {"health": ("numerics=skip",)}
                mine, self.profile = self.profile, replace(PROFILE, **other)
                self.start(words[0])
                self.profile = mine
            case "garbage":
                self.publish(self.operate(Put(f"{ROOT}roll/members/{words[0]}@{words[0]}0", b"{]")))
            case "twin":
                old, at = self.cores.pop(words[0]), words[0] + "-old"
                self.cores[at], self.names[old.record.node.id] = old, at
                self.trainers[at] = self.trainers.pop(words[0])
                if words[0] in self.registered:
                    self.registered.add(at)
                self.watched[at] = self.watched.pop(words[0], acts.WatchPeers(peers=()))
                self.watching_roster = {at if name == words[0] else name for name in self.watching_roster}
                self.start(words[0])
            case "kill" | "vanish":
                for name in words:
                    self.die(name, refused=verb == "kill")
            case "stop":
                for name in words:
                    self.stopped.add(name)
                    self.lapse(name)
                self.relink()
            case "slow":
                self.slow.update(words)
            case "lags" | "well":
                self.rhos[words[0]] = float(words[1]) if verb == "lags" else 1.0
                self.kind = words[2] if len(words) > 2 else "compute"
                for name in list(self.cores):
                    self.find_slow(name)
            case "wake":
                for name in words:
                    self.wake(name)
            case "leave":
                for name in words:
                    self.to(name, e.LeaveAsked())
            case "fail" | "lies" | "error" | "final" | "memory":
                words, clean = self.vouched(words)
                for name in words:
                    key = self.cores[name].running.key
                    self.trainers[name][key] = "dead"
                    failed = e.TrainerFailed(
                        key=key, detail="the trainer's own words", error=verb not in ("fail", "lies")
                    )
                    own = self.cores[name].record.node
                    accused = {own.id: own.place} if verb == "lies" else {}
                    more = {"final": verb == "final", "out_of_memory": verb == "memory"}
                    self.to(name, replace(failed, **more, clean=clean, accused=accused))
            case "short":
                name, missing = words[0], int(words[1]) * MIB if len(words) > 1 else 0
                core = self.cores[name]
                first = core.running.first_rank(core.record.node.name, core.record.node.incarnation)
                short = Shortfall(rank=first, host=False, device="cuda", asked=missing, total=missing and 1024 * MIB)
                self.trainers[name][core.running.key] = "dead"
                self.to(
                    name,
                    e.TrainerFailed(
                        key=core.running.key, detail="out of memory", error=True, out_of_memory=True, short=short
                    ),
                )
            case "lost" | "accuse" | "spikes":
                words, clean = self.vouched(words)
                convicted, words = (words[:1], words[1:]) if verb == "accuse" else ((), words)
                for name in words:
                    running = self.cores[name].running
                    self.trainers[name][running.key] = "dead"
                    back = Rollback(before=running.number + 1, step=clean, spike=self.steps, first=10 * clean, stop=400)
                    accused = {node.id: node.place for node in running.nodes if node.name in convicted}
                    lost = e.TrainerLostPeer(key=running.key, clean=clean, accused=accused)
                    if verb == "spikes":
                        lost = replace(lost, detail="the loss jumped up", rollback=back)
                    self.to(name, lost)
            case "stuck" | "hangs" | "stalled":
                for name, core in list(self.cores.items()):
                    if core.running is not None:
                        how = At.FAULT if name in words else At.DATA if verb == "stalled" else At.WAIT
                        how = At.ODD if how is At.FAULT and verb == "hangs" else how
                        self.to(name, e.RanksSilent(stall=stall(core.running, core.record.node, how, step=self.steps)))
            case "moves":
                for name, core in list(self.cores.items()):
                    if core.running is not None:
                        self.to(name, e.RanksMoving(key=core.running.key))
            case "unprepared":
                for name in words:
                    key = self.cores[name].view.coming.key
                    self.trainers[name][key] = "dead"
                    self.to(name, e.TrainerFailed(key=key, detail="the trainer's own words", error=True))
            case "template":
                for name in words:
                    core = self.cores[name]
                    keys = [one.key for one in (core.running, core.view.coming) if one is not None]
                    for key in keys:
                        self.trainers[name][key] = "dead"
                    self.to(name, *(e.TrainerFailed(key=key, detail="the template was killed") for key in keys))
            case "finish":
                for name, core in list(self.cores.items()):
                    if core.running:
                        self.to(name, e.MainFinished(key=core.running.key))
            case "notice":
                notice = Notice(kind="cloud", seconds=float(words[1]), detail="a spot node is taken back")
                self.to(words[0], e.Noticed(notice=notice))
            case "signal":
                notice = Notice(kind=SIGNAL, seconds=float(words[1]), detail="SIGTERM")
                self.to(words[0], e.Noticed(notice=notice))
            case "drain":
                drain = Drain(seconds=float(words[1]), reason="an operator's word")
                self.publish(self.operate(Put(f"{ROOT}roll/drains/{words[0]}", encode(drain))))
            case "undrain":
                self.publish(self.operate(Delete(f"{ROOT}roll/drains/{words[0]}")))
            case "quarantine":
                self.quarantine(words[0], float(words[1]))
            case "release":
                self.publish(self.operate(Delete(f"{ROOT}roll/quarantine/{words[0]}")))
            case "revoke":
                self.lose_lease(words[0], self.cores[words[0]].record.node.id)
            case "step":
                self.steps = int(words[0])
                for name, core in list(self.cores.items()):
                    if core.running:
                        away = all(n in self.cut for n in self.cores)
                        self.to(name, e.StepReported(step=int(words[0]), etcd_away=away))
            case "save":
                for name, core in list(self.cores.items()):
                    current = core.view.generation
                    if current is not None and current.first_rank(name, core.record.node.incarnation) is not None:
                        made = {"made_in": current.number, "attempt": current.attempt, "world": current.world}
                        self.to(name, e.Saved(saved=SavedStep(step=self.steps, **made)))
            case "expire":
                for name in list(self.cores):
                    self.lose_lease(name, self.cores[name].record.node.id, anyway=True)
            case "etcd" if words[0] in ("full", "space"):
                self.full = words[0] == "full"
                for name in list(self.cores):
                    self.later(PULSE, lambda name=name: self.find_impaired(name))
            case "etcd":
                self.away = words[0] == "away"
                for name in list(self.cores):
                    self.command("cut" if words[0] == "away" else "heal", name)
            case "cut":
                for name in words:
                    self.cut.add(name)
                    self.to(name, e.EtcdLost(since=self.now))
                    if not self.away:
                        self.lapse(name)
            case "heal":
                for name in words:
                    self.heal(name)
            case "partition":
                apart = set(words)
                self.block(lambda one, other: (one in apart) != (other in apart))
            case "mute":
                self.block(lambda one, other: (one, other) == words)
            case "unlink":
                pairs = {frozenset(words)}
                self.block(lambda one, other: frozenset((one, other)) in pairs)
            case "deafen":
                self.block(lambda one, other: other == words[0])
            case "mend":
                self.block(lambda one, other: False)
            case "deaf":
                self.deaf.update(words)
            case "run":
                self.advance(float(words[0]))
            case _:
                raise ValueError(f"no such command: {verb}")

    @staticmethod
    def vouched(words: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
        """Return the names, and the step that stands behind them, -1 for none."""
        return (words[:-1], int(words[-1])) if words[-1].isdecimal() else (words, -1)

    def number(self, name: str, text: str) -> object:
        if name == "counts":
            return tuple(int(count) for count in text.split("/"))
        return type(getattr(self.policy, name))(float(text))

    # Nodes that come and go.

    def start(self, name: str, said: tuple[ReasonToGoBack, ...] = ()) -> None:
        slots = (Slot(tile_port=1),)
        node = Node(name=name, incarnation=f"{name}{next(self.incarnations)}", address="h", slots=slots)
        core = Core(MemberRecord(node=node, profile=self.profile), self.policy, self.plan, judge, self.ladder, said)
        self.cores[name], self.names[node.id], self.trainers[name] = core, name, {}
        self.lease[node.id] = next(self.leases)
        self.watched.pop(name, None)
        self.registered.discard(name)
        self.watching_roster.discard(name)
        self.alarms.pop(name, None)
        self.unheard = {pair: since for pair, since in self.unheard.items() if pair[0] != name}
        self.stopped.discard(name)
        if self.away:
            self.cut.add(name)
            self.to(name, e.EtcdLost(since=self.now))
        else:
            self.cut.discard(name)
            self.list(name, gap=False)

    def plan(
        self,
        nodes: int,
        record: MemberRecord,
        present: Layout | None,
        speeds: Sequence[float] = (),
        bound: MemoryBound | None = None,
        counts: Collection[int] | None = None,
    ) -> Plan:
        given = (nodes, len(record.node.slots), record.profile or PROFILE, self.layout)
        if bound is None:
            return plan(*given, previous=present, costs=self.costs, speeds=speeds, counts=counts)
        return plan_below(bound, *given, previous=present, costs=self.costs, speeds=speeds, counts=counts)

    def die(self, name: str, *, refused: bool) -> None:
        node = self.cores.pop(name).record.node
        del self.names[node.id]
        self.stopped.discard(name)
        self.watching_roster.discard(name)
        if refused:
            self.killed.add(node.id)
            for watcher in list(self.cores):
                if any(peer.id == node.id for peer in self.peers(watcher)):
                    self.refuse(watcher, node.id)
        self.relink()
        lease = self.lease[node.id]
        self.later(self.policy.lease, lambda: self.end_lease(lease))

    def close(self, name: str, core: Core, *, rejoin: bool) -> None:
        """End the process of a member that exited: its lease is revoked, its port refuses."""
        if self.cores.get(name) is core:
            reachable = name not in self.cut
            self.die(name, refused=True)
            if reachable:
                self.end_lease(self.lease[core.record.node.id])
            if rejoin:
                self.start(name, core.report.goes_back)

    def wake(self, name: str) -> None:
        self.stopped.discard(name)
        for pair in [pair for pair in self.unheard if pair[0] == name]:
            # The pause was its own: silent peers get all their time again.
            self.unheard[pair] = self.now
            self.later(SILENCE, lambda pair=pair, at=self.now: self.find(*pair, at))
        self.relink()
        core = self.cores.get(name)
        if core is not None:
            for writer, action in self.pending.pop(name, []):
                self.later(0.005, lambda w=writer, a=action: self.write(name, w, a))
            self.handle(name, [*self.backlog.pop(name, []), e.Tick()])

    # The network between nodes.

    def block(self, blocked: Callable[[str, str], bool]) -> None:
        self.blocked = blocked
        self.relink()

    def peers(self, name: str) -> tuple[acts.RingPeer, ...]:
        return self.watched[name].peers if name in self.watched else ()

    def relink(self) -> None:
        """Let every member that no longer hears a neighbour, or hears it again, notice in time."""
        for name in list(self.cores):
            watch = self.watched.get(name)
            if watch is None or name in self.stopped:
                continue
            for id in dict.fromkeys((*(peer.id for peer in watch.peers), *watch.expected)):
                other = self.names.get(id)
                heard = other is not None and other not in self.stopped and not self.blocked(other, name)
                if heard and self.unheard.pop((name, id), None) is not None:
                    self.later(0.01, lambda n=name, i=id: self.find(n, i, None))
                elif not heard and (name, id) not in self.unheard:
                    self.unheard[name, id] = self.now
                    self.later(SILENCE, lambda n=name, i=id, at=self.now: self.find(n, i, at))

    def find(self, name: str, id: str, since: float | None) -> None:
        if self.unheard.get((name, id)) == since and name not in self.stopped:
            self.to(name, e.PeerHeard(id=id, alive=since is None))

    def refuse(self, watcher: str, id: str) -> None:
        self.later(0.02, lambda: self.to(watcher, e.PeerRefused(id=id, evidence="refused")))

    # Time.

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + seconds, next(self.tie), do))

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.queue and self.queue[0][0] <= end:
            self.now, _, do = heapq.heappop(self.queue)
            do()
        self.now = end

    # Members.

    def to(self, name: str, *events: e.Event) -> None:
        if name in self.stopped:
            self.backlog.setdefault(name, []).extend(events)
        else:
            self.handle(name, list(events))

    def handle(self, name: str, events: list[e.Event]) -> None:
        core = self.cores.get(name)
        if core is None or core.exited:
            return
        for action in core.handle(events, self.now):
            self.act(name, action)
        alarm = core.alarm(self.now)
        if alarm is not None and alarm != self.alarms.get(name):
            self.alarms[name] = alarm
            self.later(alarm - self.now, lambda: self.ring(name, core, alarm))

    def ring(self, name: str, core: Core, at: float) -> None:
        if self.cores.get(name) is core and self.alarms.get(name) == at:
            del self.alarms[name]
            self.to(name, e.Tick())

    def say(self, name: str, text: str) -> None:
        self.lines.append(f"  {self.now:6.2f}  {name}: {text}".rstrip())

    def act(self, name: str, action: acts.Action) -> None:
        core = self.cores[name]
        match action:
            case acts.WatchPeers():
                self.watched[name] = action
                near = {*(peer.id for peer in action.peers), *action.expected}
                self.unheard = {pair: at for pair, at in self.unheard.items() if pair[0] != name or pair[1] in near}
                for peer in action.peers:
                    if peer.id in self.killed:
                        self.refuse(name, peer.id)
                self.relink()
            case acts.Probe():
                self.later(0.01, lambda: self.probe(name, action.peers))
            case acts.Unreachable():
                who = " ".join(self.names.get(id, id.split("@")[0]) for id in action.ids)
                self.say(name, f"cannot connect to {who}" if who else "can connect to everybody")
            case acts.LetGo():
                old, self.lease[core.record.node.id] = self.lease[core.record.node.id], next(self.leases)
                self.later(self.policy.lease, lambda: self.end_lease(old))
            case acts.WatchRoster():
                self.watching_roster.discard(name)
                if action.on:
                    self.later(0.001, lambda: self.open_roster(name, core))
            case acts.Prepare():
                key = action.generation.key
                self.say(name, f"prepare {self.show(action.generation)}")
                self.trainers[name][key] = "preparing"
                self.later(0.3, lambda: self.prepared(name, core, action.generation))
            case acts.StartTrainers():
                self.say(name, f"go {action.generation.number}")
                self.trainers[name][action.generation.key] = "running"
                if self.rhos:
                    # It takes some steps to find the same again.
                    self.later(2.0, lambda: self.find_slow(name))
            case acts.AskLeave():
                self.trainers[name][action.key] = "asked"
                running = [n for n, t in self.trainers.items() if n in self.cores and action.key in t]
                if all(self.trainers[n][action.key] == "asked" for n in running):
                    for n in [n for n in running if n not in self.slow]:
                        self.later(0.1, lambda n=n: self.left(n, action.key))
            case acts.Stop():
                self.say(name, f"stop {action.key.split('.')[0]} ({action.why})")
                self.trainers[name].pop(action.key, None)
            case acts.Draining():
                left = "at leisure" if action.seconds is None else f"within {action.seconds:g} s"
                self.say(name, f"makes ready to leave {left}: {action.detail}")
            case acts.Commit():
                self.later(0.01, lambda: self.to(name, e.Settled(saved=action.saved)))
            case acts.Fence() if action.distrusted:
                self.say(name, f"has the store pass over {_rules(action.distrusted)}")
            case acts.Fence():
                pass
            case acts.Concluded():
                self.say(name, f"finds: {action.verdict.detail}")
            case acts.Awaiting():
                self.awaited[name], self.unfit[name] = action.nodes, action.why
            case acts.Exit():
                how = ("failed" if action.failed else "well") + (", to rejoin:" if action.rejoin else "")
                self.say(name, f"exit {how} {action.detail}")
                self.trainers[name] = {}
                self.later(0.02, lambda: self.close(name, core, rejoin=action.rejoin))
            case _:
                self.later(0.005, lambda: self.write(name, core, action))

    def probe(self, name: str, peers: tuple[acts.RingPeer, ...]) -> None:
        def there(id: str) -> bool:
            other = self.names.get(id)
            cut = other is not None and (self.blocked(name, other) or self.blocked(other, name))
            return id in self.killed or (other is not None and not cut)

        reached = tuple(peer.id for peer in peers if there(peer.id))
        failed = tuple(peer.id for peer in peers if not there(peer.id))
        self.later(2.0 if failed else 0.01, lambda: self.to(name, e.Probed(reached=reached, failed=failed)))

    def find_slow(self, name: str) -> None:
        running = self.cores[name].running if name in self.cores else None
        if running is not None:
            rhos = {node.id: self.rhos.get(node.name, 1.0) for node in running.nodes}
            slow = {id: Slowness(rho=rho, kind=self.kind, since=self.steps) for id, rho in rhos.items() if rho > 1.0}
            self.to(name, e.NodesSlow(key=running.key, step=self.steps, slow=slow))

    def prepared(self, name: str, core: Core, generation: Generation) -> None:
        """Report trainers as built once they have found each other."""
        key = generation.key
        if self.cores.get(name) is not core or self.trainers[name].get(key) != "preparing":
            return
        others = [self.names.get(node.id, node.name) for node in generation.nodes]
        if name in self.stopped or any(self.blocked(one, name) or self.blocked(name, one) for one in others):
            self.later(0.3, lambda: self.prepared(name, core, generation))
        else:
            self.trainers[name][key] = "prepared"
            self.to(name, e.TrainersPrepared(key=key))

    def left(self, name: str, key: str) -> None:
        if self.trainers.get(name, {}).pop(key, None):
            self.say(name, f"left {key.split('.')[0]}")
            self.to(name, e.Left(key=key, step=self.steps))

    # etcd.

    def lapse(self, name: str) -> None:
        """End the lease of a member that is stopped or does not reach etcd, unless it does again in time."""
        core, healed = self.cores[name], self.heals

        def end() -> None:
            if self.cores.get(name) is core and (name in self.stopped or (name in self.cut and self.heals == healed)):
                self.lose_lease(name, core.record.node.id)

        self.later(self.policy.lease, end)

    def lose_lease(self, name: str, id: str, *, anyway: bool = False) -> None:
        if anyway:
            self.publish(self.keys.end(self.lease[id]))
        else:
            self.end_lease(self.lease[id])
        self.lease[id] = next(self.leases)
        self.later(0.005, lambda: self.find_unregistered(name))

    def end_lease(self, lease: int) -> None:
        """End a lease; while nobody reaches etcd, none ends."""
        if self.away:
            self.later(1.0, lambda: self.end_lease(lease))
            return
        self.publish(self.keys.end(lease))
        for name in list(self.cores):
            self.later(0.005, lambda name=name: self.find_unregistered(name))

    def find_unregistered(self, name: str) -> None:
        """Let a registered member that reaches etcd notice that its key is gone."""
        core = self.cores.get(name)
        if core is None or name in self.cut or name not in self.registered:
            return
        if f"{ROOT}roll/members/{core.record.node.id}" not in self.keys.items:
            self.registered.discard(name)
            self.to(name, e.Unregistered())

    def heal(self, name: str) -> None:
        self.cut.discard(name)
        self.heals += 1
        for core, action in self.pending.pop(name, []):
            self.later(0.005, lambda n=name, c=core, a=action: self.write(n, c, a))
        self.to(name, e.EtcdBack())
        self.list(name)
        if name in self.watching_roster:
            self.to(name, self.listing(e.Tier.ROSTER, gap=True))
        self.later(0.005, lambda: self.find_unregistered(name))

    def write(self, name: str, core: Core, action: acts.Write) -> None:
        """Execute a transaction in etcd: all of it at one revision, or nothing."""
        if self.cores.get(name) is not core:
            return
        if name in self.cut or name in self.stopped:
            self.pending.setdefault(name, []).append((core, action))
            return
        self.find_impaired(name)
        if self.full:
            if isinstance(action, acts.Fenced):
                self.to(name, e.WriteDone(write=action, ok=False))
            else:
                self.later(0.2, lambda: self.write(name, core, action))
            return
        me = core.record.node
        seconds, lease = lease_of(action, self.policy.lease), 0
        if own_lease(action):
            lease = self.lease[me.id]
        elif seconds is not None:
            lease = next(self.leases)
        tell = self.worth_telling(action)
        changed = self.keys.transact(transaction(ROOT, me, action, lease))
        if changed is not None:
            if tell:
                self.say(name, tell)
            if isinstance(action, acts.Seal):
                self.sealed.append(action.generation)
            if seconds is not None and not own_lease(action):
                self.later(seconds, lambda: self.end_lease(lease))
            self.publish(changed)
        ok = changed is not None
        if ok and name in self.deaf and isinstance(action, acts.Fenced):
            self.deaf.discard(name)
            ok = False
        news = list(events_of(me, action, self.keys.revision)) if ok else []
        if isinstance(action, acts.Fenced):
            news.append(e.WriteDone(write=action, ok=ok))
        if isinstance(action, acts.PutMember) and ok:
            self.registered.add(name)
        if news:
            self.to(name, *news)

    def find_impaired(self, name: str) -> None:
        """Let a member write, or send its pulse, and learn whether etcd accepts writes."""
        if self.full != (name in self.impaired):
            (self.impaired.add if self.full else self.impaired.discard)(name)
            self.to(name, e.EtcdImpaired(reason="no space" if self.full else ""))

    def worth_telling(self, action: acts.Write) -> str:
        match action:
            case acts.Bury():
                if f"{ROOT}board/tombs/{action.id}" in self.keys.items:
                    return ""
                who = self.names.get(action.id) or action.id.split("@")[0]
                return f"bury {who}: {action.tomb.how} {action.tomb.detail}"
            case acts.PutDoubt():
                return f"asks through etcd whether {action.id.split('@')[0]} lives"
            case acts.Mend() if action.generation.distrusted:
                return f"distrusts states {_rules(action.generation.distrusted)}"
            case acts.Campaign():
                return "leads"
            case acts.Seal():
                return f"seal {self.show(action.generation)}"
            case acts.Propose():
                formed = action.proposal.generation
                if not formed.nodes:
                    return f"asks all to leave at a boundary ({formed.detail})"
                return f"{'switch to' if action.proposal.switch else 'propose'} {self.show(formed)}"
            case acts.Withdraw():
                return "withdraw"
            case acts.PutEnd():
                return f"end: {'failed' if action.end.failed else 'finished'} {action.end.detail}"
            case acts.PutFlap():
                flap = action.flap
                if flap.stuck:
                    return f"counts loss {flap.count} and standstill {flap.stuck} of {action.place}"
                return f"counts loss {flap.count} of {action.place}"
            case acts.PutStall():
                return "stands still"
            case acts.DropStall():
                return "stands still no more"
            case acts.PutVerdict():
                return f"notes: {action.verdict.fault}"
            case acts.PutQuarantine():
                return f"quarantine {action.place} for {action.quarantine.seconds:g} s: {action.quarantine.reason}"
            case acts.Clear():
                done = (("tomb", action.tombs), ("doubt", action.doubts), ("drain", action.drains))
                return "clears " + ", ".join(f"{kind} of {id.split('@')[0]}" for kind, ids in done for id in ids)
            case _:
                return ""

    def quarantine(self, name: str, seconds: float) -> None:
        lease, entry = next(self.leases), Quarantine(seconds=seconds, reason="an operator's word")
        self.publish(self.operate(Put(f"{ROOT}roll/quarantine/{name}", encode(entry), lease)))
        self.later(seconds, lambda: self.end_lease(lease))

    def operate(self, operation: Put | Delete) -> list[Changed]:
        changed = self.keys.transact(Transaction(conditions=(), operations=(operation,)))
        assert changed is not None
        return changed

    def publish(self, changed: list[Changed]) -> None:
        news = [self.event(change) for change in changed]
        board = [event for event in news if isinstance(event, e.OfBoard)]
        roster = [event for event in news if isinstance(event, e.OfRoster)]
        for name in list(self.cores):
            mine = [*board, *(roster if name in self.watching_roster else ())]
            if mine and name not in self.cut:
                core = self.cores[name]
                self.later(0.001, lambda n=name, c=core, m=mine: self.deliver(n, c, m))

    def deliver(self, name: str, core: Core, events: list[e.Event]) -> None:
        if self.cores.get(name) is core and name not in self.cut:
            self.to(name, *events)

    def open_roster(self, name: str, core: Core) -> None:
        if self.cores.get(name) is core:
            self.watching_roster.add(name)
            if name not in self.cut:
                self.to(name, self.listing(e.Tier.ROSTER, gap=False))

    def list(self, name: str, *, gap: bool = True) -> None:
        self.to(name, self.listing(e.Tier.BOARD, gap=gap))

    def listing(self, tier: e.Tier, *, gap: bool) -> e.Listed:
        keys = [item for key, item in self.keys.items.items() if key.startswith(f"{ROOT}{tier}/")]
        items = tuple(event for event in (read(ROOT, item) for item in keys) if event is not None)
        return e.Listed(tier=tier, items=items, revision=self.keys.revision, gap=gap)

    def event(self, change: Changed) -> e.Event | None:
        if change.item is None:
            return gone(ROOT, change.key, change.revision)
        return read(ROOT, change.item)

    @property
    def generation(self) -> Generation | None:
        item = self.keys.items.get(ROOT + "board/generation")
        return read(ROOT, item).generation if item is not None else None

    @staticmethod
    def show(generation: Generation) -> str:
        nodes = " ".join(node.name for node in generation.nodes)
        spares = f" spare {' '.join(node.name for node in generation.spares)}" if generation.spares else ""
        layout = f" as {generation.layout.pp}x{generation.layout.dp}" if generation.layout else ""
        more = f" recompute {generation.memory.recompute}" if generation.memory is not None else ""
        return f"{generation.number} ({generation.cause}): {nodes}{layout}{more}{spares}"


def _rules(rules: Sequence[Distrust]) -> str:
    return ", ".join(f"beyond {rule.step} before {rule.before}" for rule in rules)
