"""Invariants that hold at every event, whatever is done to a job.

The checker knows what was really done - who was stopped, cut off, ended, and for how long - and judges from
that what members may conclude. Its messages are meant to be read beside the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from chaos.simulation.etcd_store import ROOT, Change
from chaos.simulation.lie_checks import LieChecks
from chaos.simulation.node import Member
from chaos.simulation.slowness import SlowChecks
from chaos.simulation.stuck_checks import FOUND, LATE, StuckChecks
from chaos.simulation.world import Observer, World
from elastic3d import etcd_keys as keys
from elastic3d.distrust import refused
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.driver.links import INTERVAL, SILENCE
from elastic3d.membership.records import Out
from elastic3d.rollback import Rollback
from elastic3d.values import Cause, Generation

FELT = SILENCE - INTERVAL - 0.05
"""Shorter silences, in seconds, may accuse nobody, whatever the phase of the links."""

MOMENT = 2 * INTERVAL
"""Seconds between two silences in which possibly nothing was heard."""

PLANNED = (Cause.JOIN, Cause.DRAIN, Cause.QUARANTINE, Cause.BALANCE)
"""Causes of a change that everybody leaves for at a step boundary."""

UNLINKED = 45.0
"""Seconds after the last disturbance within which a job trains again although two of its nodes do not reach each other:
to find out takes some 16, and may have to be done again for a generation that was sealed meanwhile."""

ORDERLY = ("drained", "kept out", "it went")
"""Faults that make a node leave and cost nobody a step."""

SILENCING = ("cut off", "stopped", "stopped for a moment")
"""Faults that silence a process, and go unnoticed if they end soon enough."""


@dataclass(slots=True)
class _Unwell:
    """A reason to believe a process dead: when it began, when it ended (None: not yet)."""

    why: str
    since: float
    until: float | None = None


@dataclass(slots=True)
class Checker(Observer):
    """An observer that records violations."""

    world: World
    violations: list[str] = field(default_factory=list)
    unwell: dict[str, list[_Unwell]] = field(default_factory=dict)
    disturbed_until: float = 0.0
    out_after: list[tuple[str, float]] = field(default_factory=list)
    seals: int = 0
    _sealed: dict[str, Generation] = field(default_factory=dict)
    _proposed: dict[str, None] = field(default_factory=dict)
    _number: int = 0
    _cut: bool = False
    _current: Generation | None = None
    _ranks: dict[str, dict[str, int]] = field(default_factory=dict)
    _running: dict[tuple[str, int], str] = field(default_factory=dict)
    _troubled: dict[str, None] = field(default_factory=dict)
    _died: dict[str, tuple[float, str]] = field(default_factory=dict)
    _errors: int = 0
    _broken: dict[str, None] = field(default_factory=dict)
    _stepped: dict[str, None] = field(default_factory=dict)
    _forgotten: bool = False
    _links: dict[tuple[int, ...], int] = field(default_factory=dict)
    _stuck: StuckChecks = field(init=False)
    _lies: LieChecks = field(init=False)
    slow: SlowChecks = field(init=False)

    def __post_init__(self) -> None:
        self._stuck = StuckChecks(self.world)
        self._lies = LieChecks(self.world)
        self.slow = SlowChecks(self.world)

    def violated(self, text: str) -> None:
        """Record a violation."""
        self.violations.append(f"at {self.world.loop.now:.3f}: {text}")

    # The true state.

    def bound(self) -> float:
        """Return within how many undisturbed seconds a dead node is out: a lease, twice the patience of a new leader,
        whose own predecessor may be the dead one, and the damping of a storm."""
        policy = self.world.policy
        return 2 * policy.lease + 2 * policy.grace + policy.damping + 4.0

    def disturb(self, until: float) -> None:
        """Note that the job is disturbed until `until`."""
        self.disturbed_until = max(self.disturbed_until, until)

    def interfere(self, until: float) -> None:
        """Note that until `until` something else happens than that ranks stand still."""
        self._stuck.interfered_until = max(self._stuck.interfered_until, until)

    def hinder(self, until: float) -> None:
        """Note that until `until` something else happens than that devices are convicted."""
        self._lies.disturb(until)

    def convicted(self, member: Member, generation: Generation, clean: int, seconds: float) -> None:
        """A device of this node was convicted: its machine is kept out once that is heard."""
        self._troubled[generation.key] = None
        self._lies.convicted(member, generation, clean, seconds)
        self.ail(member.id, "kept out")

    def spiked(self, generation: Generation, rollback: Rollback) -> None:
        """The loss jumped up: the generation ends, and what is left out for it stays so."""
        self._troubled[generation.key] = None
        self._lies.spiked(generation, rollback)

    def stuck(self, member: Member, key: str) -> None:
        """A rank stands still: unless something else happens, the generation has to end for it."""
        self._troubled[key] = None
        self.world.loop.later(FOUND, self._must_move, member, key)

    def _must_move(self, member: Member, key: str) -> None:
        due = self._stuck.interfered_until + LATE + 0.001
        if self.world.loop.now < due:
            self.world.loop.at(due + FOUND, self._must_move, member, key)
            return
        wrong = self._stuck.watch(member, key, self._current)
        if wrong:
            self.violated(wrong)

    def ail(self, id: str, why: str, *, since: float | None = None) -> None:
        """Note that from now on a process may be believed dead or gone."""
        now = self.world.loop.now
        kept = self.unwell.setdefault(id, [])
        if not any(each.why == why and each.until is None for each in kept):
            kept.append(_Unwell(why, now if since is None else since))

    def heal(self, id: str, why: str) -> None:
        """Note that this is over."""
        for each in self.unwell.get(id, []):
            if each.why == why and each.until is None:
                each.until = self.world.loop.now

    def regard(self) -> None:
        """Work out who is cut off from the larger part of the generation, after anything that can change that.

        A node with more than half of it on its side may not be accused, whatever the others know of each other so far.
        """
        world = self.world
        cut, self._cut = self._cut, bool(world.network.blocked)
        if not cut and not self._cut:
            return
        members = world.alive()
        if not self._cut:
            for member in members:
                self.heal(member.id, "cut off")
            return
        active = self._ranks[self._current.key] if self._current else {m.id: 0 for m in members}
        for part in self._parts(members):
            weight = sum(m.id in active and self._runs(m) for m in part)
            for member in part:
                if 2 * weight > len(active):
                    self.heal(member.id, "cut off")
                else:
                    self.ail(member.id, "cut off")

    def _runs(self, member: Member) -> bool:
        stopped = any(each.why == "stopped" and each.until is None for each in self.unwell.get(member.id, ()))
        return member.alive and not stopped

    def _parts(self, members: list[Member]) -> list[list[Member]]:
        passes = self.world.network.passes
        parts: list[list[Member]] = []
        for member in members:
            near = [p for p in parts if any(passes(m.host, member.host) and passes(member.host, m.host) for m in p)]
            joined = [m for part in near for m in part] + [member]
            parts = [part for part in parts if part not in near] + [joined]
        return parts

    def excused(self, id: str) -> str:
        """Return why this process may have been evicted, "" if it may not."""
        policy = self.world.policy
        slack = 2 * policy.lease + policy.grace + policy.damping + 3.0
        now = self.world.loop.now
        if now - self.world.network.lone.get(id, -slack) < slack:
            return "refused by one that could ask nobody"
        began = ended = -1.0
        for each in self.unwell.get(id, ()):
            until = now if each.until is None else each.until
            if each.why in SILENCING:
                # A silence soon after another counts as one with it; too short a one is not noticed.
                began, ended = (began if each.since <= ended + MOMENT else each.since), max(ended, until)
                if ended - began >= FELT and now - ended <= slack:
                    return each.why
            elif now - until <= slack:
                return each.why
        return ""

    # Observations.

    def began(self, member: Member) -> None:
        """A process started; the one it follows is replaced."""
        store = self.world.etcd.store
        if ROOT + keys.quarantine(member.record.node.place) in store.tiers.get("roll", {}):
            self.ail(member.id, "kept out")
        if self._unlinked(member.host):
            self.ail(member.id, "unlinked")
        self.regard()

    def ended(self, member: Member) -> None:
        """A process ended: from now on its days in the generation are counted."""
        now = self.world.loop.now
        how = "it went" if member.exit is not None else str(member.state)
        self.ail(member.id, how)
        self._died[member.id] = (now, how)
        for key in list(self._ranks):
            self._rest(member, key)
        self.regard()
        self.world.loop.later(self.bound(), self._must_be_out, member)

    def _must_be_out(self, member: Member) -> None:
        world = self.world
        now = world.loop.now
        due = max(self._died[member.id][0], self.disturbed_until) + self.bound()
        if now < due - 1e-9:
            world.loop.at(due, self._must_be_out, member)
            return
        current = self._current
        if current is None or world.ended or all(node.id != member.id for node in current.nodes):
            return
        if self.expected() == 0:
            return
        self.violated(f"{member.name} ended {now - self._died[member.id][0]:.1f} s ago and is still in {current.key}")

    def expected(self) -> int:
        """Return how many nodes should be active, given those present."""
        return self.world.active(len(self._there()))

    def _there(self) -> list[Member]:
        roll = self.world.etcd.store.tiers.get("roll", {})
        kept_out = {key.rpartition("/")[2] for key in roll if "quarantine/" in key}
        alive = self.world.alive()
        return [m for m in alive if m.exit is None and m.record.node.place not in kept_out and not m.leaving]

    def changed(self, changes: list[Change]) -> None:
        """Etcd's keys changed."""
        for change in changes:
            match change.event:
                case e.GenerationPut():
                    self._seal(change.event.generation, changes)
                case e.ProposalPut():
                    self._proposed[change.event.proposal.generation.key] = None
                    if change.event.proposal.switch:
                        self._prepared(change.event.proposal.generation)
                case e.TombPut():
                    self._tomb(change.event)
                case e.QuarantinePut():
                    for wrong in self._lies.kept_out(change.event):
                        self.violated(wrong)
                    for member in self._at(change.event.place):
                        self.ail(member.id, "kept out")
                case e.QuarantineGone():
                    for member in self._at(change.event.place):
                        self.heal(member.id, "kept out")
                case e.DrainPut():
                    for member in self._at(change.event.name):
                        self.ail(member.id, "drained")
                case e.EndPut():
                    if self._current is not None:
                        for wrong in self._lies.ended(self._current, change.event.end):
                            self.violated(wrong)
                    stuck = self._stuck.seals + 1 >= self.world.policy.tries
                    if change.event.end.failed and not self._errors and not self._all_broken() and not stuck:
                        self.violated(f"the job was ended without cause: {change.event.end.detail}")

    def rolled_back(self) -> None:
        """Etcd forgot: what members know of the job is written there again, and counts go on from it.

        If they do not all know the same, because etcd lost a generation, any of them may have to rejoin.
        """
        self._forgotten = True
        self._lies.forget()
        for change in self.world.etcd.store.all_of("roll"):
            # Former operators' orders are in force again.
            if isinstance(change.event, e.DrainPut | e.QuarantinePut):
                self.changed([change])
        known = {view.generation.key if view.generation else "" for view in (m.core.view for m in self.world.alive())}
        if len(known) > 1:
            for member in self.world.alive():
                self.ail(member.id, "etcd lost a generation")
                self.heal(member.id, "etcd lost a generation")

    def unlinked(self, hosts: tuple[int, ...]) -> None:
        """Note that these hosts do not reach each other: their members may have to stand aside."""
        self._links[hosts] = self._links.get(hosts, 0) + 1
        for member in self.world.alive():
            if member.host in hosts:
                self.ail(member.id, "unlinked")
        self.world.loop.later(UNLINKED, self._must_train, hosts)

    def linked(self, hosts: tuple[int, ...]) -> None:
        """Note that they reach each other again."""
        self._links[hosts] -= 1
        for member in self.world.by_id.values():
            if member.host in hosts and not self._unlinked(member.host):
                self.heal(member.id, "unlinked")

    def _unlinked(self, host: int) -> bool:
        return any(count and host in hosts for hosts, count in self._links.items())

    def _must_train(self, hosts: tuple[int, ...]) -> None:
        """While two hosts do not reach each other the job trains without one of them, if enough are left."""
        world = self.world
        due = self.disturbed_until + UNLINKED
        if world.loop.now < due - 1e-9:
            world.loop.at(due, self._must_train, hosts)
            return
        enough = world.active(self.expected() - len(hosts) + 1)
        if not self._links.get(hosts) or world.ended or not enough or not world.policy.beside:
            return
        active = [world.by_id[node.id].host for node in self._current.nodes] if self._current is not None else []
        passes = world.network.passes
        met = all(passes(one, other) for one in active for other in active if one != other)
        if not met or not self.agreed():
            names = " ".join(f"n{host}" for host in hosts)
            self.violated(f"{names} do not reach each other, and the job has not trained for {UNLINKED:g} s")

    def _at(self, place: str) -> list[Member]:
        return [member for member in self.world.alive() if member.record.node.place == place]

    def broken(self, member: Member) -> None:
        """Note that this node's code always raises: it may be evicted, and never ends the job."""
        self._broken[member.id] = None
        self.ail(member.id, "its code raises")

    def _all_broken(self) -> bool:
        """Return whether too few nodes that can be known of have code that works, or several have code that raises."""
        registered = self.world.etcd.store.tiers.get("roll", {})
        known = [member for member in self._there() if ROOT + keys.member(member.id) in registered]
        sound = [member for member in known if member.id not in self._broken]
        return len(self._broken) > 1 or not self.world.policy.beside or not self.world.active(len(sound))

    def erred(self, member: Member, *, error: bool) -> None:
        """Note an error of the script on a node, or another failure: enough of them may end the job.

        A node whose code raises before it has made a step may be evicted, and so may one when no try is left.
        """
        self._errors += 1
        tried = self._errors + self._stuck.seals >= self.world.policy.tries
        if error and (tried or member.id not in self._stepped):
            self.ail(member.id, "its code raised")
            self.heal(member.id, "its code raised")

    def stepped(self, generation: Generation, step: int) -> None:
        """A generation made a step."""
        self._stepped.update(dict.fromkeys(node.id for node in generation.nodes))

    def _tomb(self, event: e.TombPut) -> None:
        if event.tomb.how is Out.LEFT:
            return
        member = self.world.by_id.get(event.id)
        if member is not None and not self.excused(event.id):
            self.violated(
                f"{event.id} was buried by {event.tomb.by} ({event.tomb.detail}), and nothing had been done to it"
            )

    def _seal(self, formed: Generation, changes: list[Change]) -> None:
        known = self._sealed.get(formed.key)
        if self._forgotten and known is not None and _same(known, formed):
            # Written again, not sealed, by a member that may not have known yet which step is safe.
            self._forgotten = False
            self._current, self._number = formed, formed.number
            return
        if self._forgotten and formed.number <= self._number:
            # By a later node that knows of nothing: those that do are newcomers to it.
            self._current, self._number = None, 0
            self._sealed, self._ranks, self._running = {}, {}, {}
        self._forgotten = False
        before, self._current = self._current, formed
        if before is not None and formed.reached < before.reached and formed.distrusted == before.distrusted:
            self.violated(f"generation {formed.key} forgets that step {before.reached} was safe")
        if before is not None and _same(before, formed):
            # The same membership, with newer knowledge of it.
            return
        self.seals += 1
        world = self.world
        if formed.number <= self._number:
            self.violated(f"generation {formed.key} was sealed after number {self._number}")
        self._number = max(self._number, formed.number)
        if formed.key in self._sealed:
            self.violated(f"generation {formed.key} was sealed twice")
        self._sealed[formed.key] = formed
        self._ranks[formed.key] = {}
        first = 0
        for node in formed.nodes:
            self._ranks[formed.key][node.id] = first
            first += len(node.slots)
        names = [node.name for node in (*formed.nodes, *formed.spares)]
        if len(set(names)) != len(names):
            self.violated(f"generation {formed.key} holds a node twice: {' '.join(names)}")
        if before is not None and before.nodes:
            self._because(before, formed)
            for wrong in self.slow.sealed(before, formed):
                self.violated(wrong)
            if formed.cause is Cause.STUCK:
                for wrong in self._stuck.sealed(before, formed, changes):
                    self.violated(wrong)
        for wrong in self._lies.sealed(formed):
            self.violated(wrong)
        for node in formed.nodes:
            if node.id in self._died and self._died[node.id][0] < world.loop.now - self.bound() * 2:
                self.violated(f"generation {formed.key} holds {node.name}, which ended long ago")
        if world.network.blocked:
            self.regard()

    def _because(self, before: Generation, formed: Generation) -> None:
        """Every seal has a cause that the schedule, or its consequences, explains."""
        world = self.world
        kept = {node.id for node in (*formed.nodes, *formed.spares)}
        lost = [node for node in before.nodes if node.id not in kept]
        there = {node.id for node in before.nodes}
        joined = [node for node in formed.nodes if node.id not in there]
        now = world.loop.now
        for node in lost:
            why = self.excused(node.id)
            if not why:
                self.violated(
                    f"{node.name} was sealed out in {formed.key} ({formed.cause}: {formed.detail}) without cause"
                )
            elif node.id in self._died:
                died = self._died[node.id]
                if self.disturbed_until <= died[0] + 0.001:
                    self.out_after.append((died[1], now - died[0]))
        troubled = before.key in self._troubled or self._lies.ends(before)
        if not lost and not joined and not troubled:
            active = {node.id for node in formed.nodes}
            spared = [node for node in before.nodes if node.id not in active]
            if not any(self.excused(node.id) for node in spared):
                self.violated(f"{formed.key} was sealed ({formed.cause}: {formed.detail}) and nothing had happened")
        if formed.cause in (Cause.JOIN, Cause.BALANCE) and world.policy.beside and not troubled:
            for node in before.nodes:
                if (node.id, before.key) not in world.trainers.left:
                    self.violated(f"{formed.key} was sealed as planned, and {node.name} had not left {before.key}")

    def _prepared(self, formed: Generation) -> None:
        """Nobody leaves for a generation before all are ready for it, unless there is no time."""
        if formed.cause not in (Cause.JOIN, Cause.BALANCE):
            return
        for node in formed.nodes:
            if (node.id, formed.key) not in self.world.trainers.prepared:
                self.violated(f"all were to leave for {formed.key}, and {node.name} had not prepared for it")

    def acted(self, member: Member, action: acts.Action) -> None:
        """A core did something."""
        match action:
            case acts.StartTrainers():
                self._go(member, action.generation)
            case acts.Stop():
                self._rest(member, action.key)
            case acts.PutReport():
                report = action.report
                for key in (report.failed, report.error, report.peer_lost, report.left):
                    if key:
                        self._troubled[key] = None
            case acts.Exit():
                self.ail(member.id, "it went")

    def _go(self, member: Member, formed: Generation) -> None:
        sealed = self._sealed.get(formed.key)
        # That a step was safe, known since, is written into the same record.
        if sealed is not formed and (sealed is None or not _same(sealed, formed)):
            self.violated(f"{member.name} trains {formed.key}, which was never sealed so")
            return
        rank = self._ranks[formed.key].get(member.id)
        if rank is None:
            self.violated(f"{member.name} trains {formed.key} and is no part of it")
            return
        holder = self._running.setdefault((formed.key, rank), member.id)
        if holder != member.id:
            self.violated(f"rank {rank} of {formed.key} is held by {holder} and {member.id}")

    def restored(self, generation: Generation, before: int, step: int, made: int) -> None:
        """All trainers of a generation resume after a step: after a planned change, the newest made."""
        for wrong in self._lies.restored(generation, step, made):
            self.violated(wrong)
        sealed, world = list(self._sealed.values()), self.world
        at = next((at for at, one in enumerate(sealed) if one.key == generation.key), 0)
        planned = generation.cause in PLANNED and generation.key in self._proposed
        if not at or not planned or not world.policy.beside or step >= before:
            return
        left = sealed[at - 1]
        if not world.trainers.left_safely(left.key, left.nodes):
            return
        if refused(generation.distrusted, left.number, before):
            return
        nodes = (*left.nodes, *generation.nodes, *generation.spares)
        if not any(self._harmed(node.id) for node in nodes):
            self.violated(
                f"{generation.key} ({generation.cause}: {generation.detail}) was planned, and goes back from step "
                f"{before} to step {step}"
            )

    def _harmed(self, id: str) -> bool:
        """Return whether this process was disturbed lately by anything but an order to leave."""
        lately = self.world.loop.now - self.bound()
        return any(
            each.why not in ORDERLY and (each.until is None or each.until >= lately) for each in self.unwell.get(id, ())
        )

    def _rest(self, member: Member, key: str) -> None:
        """Note that a member's trainers of a generation no longer run."""
        rank = self._ranks.get(key, {}).get(member.id)
        if rank is not None and self._running.get((key, rank)) == member.id:
            del self._running[key, rank]

    def agreed(self) -> bool:
        """Return whether all live active nodes train in the sealed generation."""
        current, world = self._current, self.world
        if current is None:
            return False
        for node in current.nodes:
            running = world.by_id[node.id].core.running
            if running is None or running.key != current.key:
                return False
        return True

    def settled(self, quiet: float) -> None:
        """Everything was healed long ago: all live nodes must agree, and nothing may be written any more."""
        world, current = self.world, self._current
        self.violations += world.checkpoints.violations
        if world.ended:
            for member in world.alive():
                self.violated(f"{member.name} is still there, and the job is over")
            return
        if world.loop.now - world.written_at < quiet:
            self.violated(f"something is still written, {world.loop.now - world.written_at:.1f} s ago")
        expected = self.expected()
        if not expected:
            return
        for wrong in self._stuck.settled():
            self.violated(wrong)
        if current is None:
            self.violated(f"no generation was ever sealed, and {expected} nodes are there")
            return
        for wrong in self._lies.settled(current):
            self.violated(wrong)
        if len(current.nodes) != expected:
            names = " ".join(node.name for node in current.nodes)
            self.violated(f"{current.key} has {len(current.nodes)} nodes ({names}) where {expected} could train")
        for member in world.alive():
            if member.exit is not None:
                self.violated(f"{member.name} has not ended since it went: {member.exit.detail}")
                continue
            view = member.core.view.generation
            if view is None or view.key != current.key:
                self.violated(f"{member.name} knows of {view.key if view else 'nothing'}, {current.key} is sealed")
            active = any(node.id == member.id for node in current.nodes)
            if active != (member.core.running is not None):
                self.violated(f"{member.name} {'does not train' if active else 'trains'} in {current.key}")


def _same(before: Generation, now: Generation) -> bool:
    """Return whether this is the same membership, with newer knowledge of what is safe and what nobody goes on from."""
    newer = {name: getattr(now, name) for name in ("reached", "tried_at", "distrusted", "rollbacks", "convicted")}
    return replace(before, **newer) == now
