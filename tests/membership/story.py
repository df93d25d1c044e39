"""Tell a membership story: several cores, an etcd and a network that are always consistent, and virtual time.

A story is a text of commands, one a line, behind `>`; what the members did because of it follows, indented.

    > policy minimum=2 maximum=4     before the first start
    > layout pp=4                    the same
    > start a b c                    nodes come, in this order
    > stranger x                     a node comes that runs another script
    > twin b                         a second process comes under the name of a living node
    > kill b                         its keeper dies; the watchers' connections are refused
    > vanish b                       its host dies: nothing is refused, only the lease ends
    > leave b                        SIGTERM: it goes in good order, and its process ends
    > fault b | error b              a trainer dies | the user's code raises
    > finish                         every running trainer's main returns
    > expire                         etcd loses all leases, and everybody is well
    > etcd away | etcd back          nobody reaches etcd; leases do not end meanwhile
    > cut b | heal b                 b alone does not reach etcd; its lease ends
    > deaf b                         etcd takes b's next decision, and the answer is lost
    > step 20                        every running trainer commits step 20
    > run 5                          let 5 seconds pass
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import replace

from elastic3d.membership import events as e
from elastic3d.membership.core import Core
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import Claim, MemberRecord, Proposal, Report, Tomb
from elastic3d.planner import plan
from elastic3d.values import Generation, Layout, ModelProfile, Node, Slot

PROFILE = ModelProfile(blocks=8, parameters=1000, micro_batches=8, micro_batch=2, digest="job")


class Story:
    """Runs commands and keeps what happened as lines."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.policy = Policy(minimum=1, maximum=8, first_gather=1.0)
        self.profile: ModelProfile | None = PROFILE
        self.layout = Layout()
        self.cores: dict[str, Core] = {}
        self.revision = 1
        self.store: dict[str, tuple[object, int, int]] = {}
        self.lease_of: dict[str, str] = {}
        self.watched: dict[str, tuple[tuple[str, str, str, int], ...]] = {}
        self.gone: dict[str, str] = {}
        self.vanished: set[str] = set()
        self.away = False
        self.heals = 0
        self.deaf: set[str] = set()
        self.pending: dict[str, list[tuple[Core, e.Write]]] = {}
        self.cut: set[str] = set()
        self.trainers: dict[str, dict[str, str]] = {}
        self.incarnations = itertools.count(1)
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.tie = itertools.count()
        self.sealed: list[Generation] = []

    def tell(self, text: str) -> list[str]:
        """Run every command of the text and return the story with what happened."""
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
                changes = {k: type(getattr(self.policy, k))(float(v)) for k, v in (w.split("=") for w in words)}
                self.policy = replace(self.policy, **changes)
            case "layout":
                self.layout = Layout(**{axis: int(size) for axis, size in (w.split("=") for w in words)})
            case "restart-mode":
                self.policy, self.profile = replace(self.policy, beside=False), None
            case "start":
                for name in words:
                    self.start(name)
            case "stranger":
                mine, self.profile = self.profile, replace(PROFILE, digest="another")
                self.start(words[0])
                self.profile = mine
            case "twin":
                self.cores[words[0] + "-old"] = self.cores.pop(words[0])
                self.trainers[words[0] + "-old"] = self.trainers.pop(words[0])
                self.start(words[0])
            case "kill" | "vanish":
                for name in words:
                    self.die(name, refused=verb == "kill")
            case "leave":
                for name in words:
                    self.to(name, e.LeaveAsked())
            case "fault" | "error":
                for name in words:
                    key = self.cores[name].running.key
                    self.trainers[name][key] = "dead"
                    self.to(name, e.Faulted(key=key, detail="the trainer's own words", error=verb == "error"))
            case "finish":
                for name, core in list(self.cores.items()):
                    if core.running:
                        self.to(name, e.Finished(key=core.running.key))
            case "step":
                for name, core in self.cores.items():
                    if core.running:
                        away = all(n in self.cut for n in self.cores)
                        self.to(name, e.Progress(step=int(words[0]), etcd_away=away))
            case "expire":
                for key in [key for key in self.lease_of if key in self.store]:
                    self.delete(key)
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
                    self.cut.discard(name)
                    self.heals += 1
                    for core, action in self.pending.pop(name, []):
                        self.later(0.005, lambda n=name, c=core, a=action: self.write(n, c, a))
                    self.to(name, e.EtcdBack())
                    self.list(name)
            case "deaf":
                self.deaf.update(words)
            case "run":
                self.advance(float(words[0]))
            case _:
                raise ValueError(f"no such command: {verb}")

    def start(self, name: str) -> None:
        slots = (Slot(tile_port=1),)
        node = Node(name=name, incarnation=f"{name}{next(self.incarnations)}", address="h", slots=slots)
        core = Core(MemberRecord(node=node, profile=self.profile), self.policy, self.plan)
        self.cores[name], self.trainers[name] = core, {}
        self.watched.pop(name, None)
        if self.away:
            self.cut.add(name)
            self.to(name, e.EtcdLost(since=self.now))
        else:
            self.cut.discard(name)
            self.list(name, gap=False)

    def plan(self, nodes: int, record: MemberRecord):
        return plan(nodes, len(record.node.slots), PROFILE, self.layout)

    def die(self, name: str, *, refused: bool) -> None:
        node = self.cores.pop(name).record.node
        self.gone[node.incarnation] = name
        if refused:
            for watcher in list(self.cores):
                for peer in self.watched.get(watcher, ()):
                    if peer[1] == node.incarnation:
                        self.refuse(watcher, peer)
        else:
            self.vanished.add(node.incarnation)
            silent = e.PeerHeard(name=name, incarnation=node.incarnation, alive=False)
            for watcher in list(self.cores):
                if any(peer[1] == node.incarnation for peer in self.watched.get(watcher, ())):
                    self.later(1.5, lambda watcher=watcher: self.to(watcher, silent))
        self.later(self.policy.lease, lambda: self.end_lease(name, node.incarnation))

    def lapse(self, name: str) -> None:
        """The lease of a member that does not reach etcd ends, unless it does again in time."""
        core, healed = self.cores[name], self.heals

        def end() -> None:
            if self.cores.get(name) is core and name in self.cut and self.heals == healed:
                self.write(name, core, e.PutMember(record=core.record))
                self.write(name, core, e.PutReport(report=core.report))
                self.end_lease(name, core.record.node.incarnation)

        self.later(self.policy.lease, end)

    def close(self, name: str, core: Core) -> None:
        """The process of a member that exited ends: its lease is given back, its port refuses."""
        if self.cores.get(name) is core:
            reachable = name not in self.cut
            self.die(name, refused=True)
            if reachable:
                self.end_lease(name, core.record.node.incarnation)

    def end_lease(self, name: str, incarnation: str) -> None:
        if self.away:
            self.later(1.0, lambda: self.end_lease(name, incarnation))
            return
        for key in [key for key, owner in self.lease_of.items() if owner == name]:
            self.expire(key, incarnation)

    def expire(self, key: str, incarnation: str) -> None:
        value = self.store.get(key, (None,))[0]
        holder = value.node.incarnation if isinstance(value, MemberRecord) else getattr(value, "incarnation", None)
        if holder == incarnation:
            self.delete(key)

    def refuse(self, watcher: str, peer: tuple[str, str, str, int]) -> None:
        event = e.PeerRefused(name=peer[0], incarnation=peer[1], evidence="refused")
        self.later(0.02, lambda: self.to(watcher, event))

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + seconds, next(self.tie), do))

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            tick = round(int(self.now * 10 + 1) / 10, 6)
            due = self.queue[0][0] if self.queue else end + 1
            if min(due, tick) > end:
                break
            if due <= tick:
                self.now, _, do = heapq.heappop(self.queue)
                do()
            else:
                self.now = tick
                for name in list(self.cores):
                    self.to(name, e.Tick())
        self.now = end

    def to(self, name: str, event: e.Event) -> None:
        core = self.cores.get(name)
        if core is None or core.exited:
            return
        for action in core.handle(event, self.now):
            self.act(name, action)

    def say(self, name: str, text: str) -> None:
        self.lines.append(f"  {self.now:6.2f}  {name}: {text}")

    def act(self, name: str, action: e.Action) -> None:
        core = self.cores[name]
        match action:
            case e.Watch():
                self.watched[name] = action.peers
                for peer in action.peers:
                    if peer[1] in self.gone:
                        if peer[1] not in self.vanished:
                            self.refuse(name, peer)
                    else:
                        heard = e.PeerHeard(name=peer[0], incarnation=peer[1], alive=True)
                        self.later(0.01, lambda heard=heard: self.to(name, heard))
            case e.Prepare():
                key = action.generation.key
                self.say(name, f"prepare {self.show(action.generation)}")
                self.trainers[name][key] = "preparing"
                self.later(0.3, lambda: self.prepared(name, core, key))
            case e.Go():
                self.say(name, f"go {action.generation.number}")
                self.trainers[name][action.generation.key] = "running"
            case e.AskLeave():
                self.trainers[name][action.key] = "asked"
                running = [n for n, t in self.trainers.items() if n in self.cores and action.key in t]
                if all(self.trainers[n][action.key] == "asked" for n in running):
                    for n in running:
                        self.later(0.1, lambda n=n: self.left(n, action.key))
            case e.Stop():
                self.say(name, f"stop {action.key.split('.')[0]} ({action.why})")
                self.trainers[name].pop(action.key, None)
            case e.Fence() | e.Commit():
                pass
            case e.Exit():
                self.say(name, "exit " + ("failed" if action.failed else "well") + f" {action.detail}".rstrip())
                self.trainers[name] = {}
                self.later(0.02, lambda: self.close(name, core))
            case _:
                self.later(0.005, lambda: self.write(name, core, action))

    def prepared(self, name: str, core: Core, key: str) -> None:
        if self.cores.get(name) is core and self.trainers[name].get(key) == "preparing":
            self.trainers[name][key] = "prepared"
            self.to(name, e.Prepared(key=key))

    def left(self, name: str, key: str) -> None:
        if self.trainers.get(name, {}).pop(key, None):
            self.to(name, e.Left(key=key, step=40))

    def write(self, name: str, core: Core, action: e.Write) -> None:
        """What a transaction in etcd does: all of it at one revision, or nothing."""
        if self.cores.get(name) is not core:
            return
        if name in self.cut:
            self.pending.setdefault(name, []).append((core, action))
            return
        token = self.store.get("leader", (None, 0, 0))[2]
        ok = True
        match action:
            case e.PutMember():
                self.put(f"members/{name}", action.record, owner=name)
                return
            case e.PutReport():
                self.put(f"reports/{name}", action.report, owner=name)
                return
            case e.Bury():
                self.say(name, f"bury {action.name}: {action.tomb.how} {action.tomb.detail}".rstrip())
                self.put(f"tombs/{action.name}", action.tomb)
                self.to(name, self.event(f"tombs/{action.name}"))
                held = self.store.get(f"members/{action.name}")
                if held is not None and held[0].node.incarnation == action.tomb.incarnation:
                    self.delete(f"members/{action.name}")
                    self.delete(f"reports/{action.name}")
            case e.Campaign():
                ok = token == action.expected
                if ok:
                    self.say(name, "leads")
                    node = core.record.node
                    self.put("leader", Claim(name=name, incarnation=node.incarnation), owner=name)
            case e.Seal():
                ok = token == action.token and self.store.get("generation", (None, 0, 0))[2] == action.previous
                if ok:
                    self.say(name, f"seal {self.show(action.generation)}")
                    self.sealed.append(action.generation)
                    self.put("generation", action.generation)
                    self.delete("proposal")
            case e.Propose():
                ok = token == action.token and self.store.get("generation", (None, 0, 0))[2] == action.previous
                if ok:
                    verb = "switch to" if action.proposal.switch else "propose"
                    self.say(name, f"{verb} {self.show(action.proposal.generation)}")
                    self.put("proposal", action.proposal)
            case e.Withdraw():
                ok = token == action.token
                if ok:
                    self.say(name, "withdraw")
                    self.delete("proposal")
            case e.PutEnd():
                ok = token == action.token
                if ok:
                    self.say(name, "end: " + ("failed " if action.end.failed else "finished ") + action.end.detail)
                    self.put("end", action.end)
        if ok and name in self.deaf and isinstance(action, e.FENCED):
            self.deaf.discard(name)
            ok = False
        written = {e.Campaign: "leader", e.Seal: "generation", e.Propose: "proposal", e.PutEnd: "end"}.get(type(action))
        if ok and written:
            self.to(name, self.event(written))
        if ok and isinstance(action, e.Withdraw):
            self.to(name, e.ProposalGone(revision=self.revision))
        self.to(name, e.WriteDone(write=action, ok=ok))

    def put(self, key: str, value: object, owner: str = "") -> None:
        self.revision += 1
        created = self.store[key][1] if key in self.store else self.revision
        self.store[key] = (value, created, self.revision)
        if owner:
            self.lease_of[key] = owner
        self.publish(self.event(key))

    def delete(self, key: str) -> None:
        if key not in self.store:
            return
        self.revision += 1
        del self.store[key]
        self.lease_of.pop(key, None)
        kind, _, name = key.partition("/")
        gone = {
            "members": e.MemberGone(name=name, revision=self.revision),
            "leader": e.LeaderGone(revision=self.revision),
            "proposal": e.ProposalGone(revision=self.revision),
        }.get(kind)
        if gone is not None:
            self.publish(gone)

    def publish(self, event: e.Event) -> None:
        for name in list(self.cores):
            if name not in self.cut:
                self.later(0.001, lambda name=name: None if name in self.cut else self.to(name, event))

    def list(self, name: str, *, gap: bool = True) -> None:
        items = tuple(self.event(key) for key in self.store)
        self.to(name, e.Listed(items=items, revision=self.revision, gap=gap))

    def event(self, key: str):
        value, created, modified = self.store[key]
        name = key.partition("/")[2]
        match value:
            case MemberRecord():
                return e.MemberPut(record=value, order=created, revision=modified)
            case Report():
                return e.ReportPut(name=name, report=value, revision=modified)
            case Tomb():
                return e.TombPut(name=name, tomb=value, revision=modified)
            case Claim():
                return e.LeaderPut(claim=value, revision=modified)
            case Generation():
                return e.GenerationPut(generation=value, revision=modified)
            case Proposal():
                return e.ProposalPut(proposal=value, revision=modified)
            case _:
                return e.EndPut(end=value, revision=modified)

    @staticmethod
    def show(generation: Generation) -> str:
        nodes = " ".join(node.name for node in generation.nodes)
        spares = f" spare {' '.join(node.name for node in generation.spares)}" if generation.spares else ""
        layout = f" as {generation.layout.pp}x{generation.layout.dp}" if generation.layout else ""
        return f"{generation.number} ({generation.cause}): {nodes}{layout}{spares}"
