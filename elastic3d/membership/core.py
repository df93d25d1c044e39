"""The state machine of one member: `handle(event, now)` returns what to do about it.

It does no I/O and reads no clock, so that the same code runs against a real etcd, in transcripts, and in simulations of
thousands of nodes. Its state is changed in place, which keeps an event's cost independent of the number of members.

A member is always two things at once:

*A follower* brings its own trainers to where the records say they should be. Per generation key its trainers are
`preparing` -> `prepared` -> `running` -> (`left` | `finished` | `stopped`); the report tells the others.

*Perhaps the leader*: every member would lead. The first in order campaigns at once when the place is free, the next
ones a little later each. Leading is a key in etcd, and its mod revision fences every write (etcd's own locks are not
sound; a revision compared in the same transaction is).

Losing etcd: a member that alone has lost it, as the step votes tell it, stops its trainers before the lease and the
grace are over. While every member has lost it nobody can be sealed out, and training goes on. A member that hears no
votes cannot go on by itself either: a step needs every rank.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from elastic3d.membership import events as e
from elastic3d.membership.leader import Planner, Timers, decide
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import MemberRecord, Out, Report, SavedStep, Tomb
from elastic3d.membership.view import View
from elastic3d.values import Generation

ALONE = 0.8
"""Of lease and grace together: how long a member that alone has lost etcd goes on. The others put it out after all
of it. Some members hear from etcd again before others do, so that a vote or two against this one mean nothing yet."""

RETRY = 0.1
"""Seconds after a write that failed before the leader decides again: by then the watch has told why."""

STAGGER = 0.3
"""Seconds between the campaigns of one candidate and the next."""


class Phase(StrEnum):
    """How far the own trainers of one generation are."""

    PREPARING = "preparing"
    PREPARED = "prepared"
    RUNNING = "running"
    OVER = "over"


class Core:
    """One member of one job. All times are the member's own monotonic seconds."""

    def __init__(self, record: MemberRecord, policy: Policy, planner: Planner) -> None:
        self.record = record
        self.policy = policy
        self.view = View()
        self.report = Report(incarnation=record.node.incarnation)
        self._planner = planner
        self._timers = Timers(missing={})
        self._phase: dict[str, Phase] = {}
        self._asked = ""
        self._heard: set[tuple[str, str]] = set()
        self._watched: tuple[tuple[str, str, str, int], ...] = ()
        self._busy: e.Write | None = None
        self._retry_at = 0.0
        self._lost_since: float | None = None
        self._outvoted_since: float | None = None
        self._vacant_since: float | None = None
        self._buried: set[tuple[str, str]] = set()
        self._registered_at = -1
        self._was_registered = False
        self._fenced = 0
        self._committing: tuple[SavedStep, int] | None = None
        self.exited = False

    @property
    def leads(self) -> bool:
        """Whether this member holds the leader's key, as far as it knows."""
        claim, node = self.view.leader, self.record.node
        return claim is not None and (claim.name, claim.incarnation) == (node.name, node.incarnation)

    @property
    def running(self) -> Generation | None:
        """The sealed generation whose trainers run here, if any."""
        generation = self.view.generation
        return generation if generation and self._phase.get(generation.key) is Phase.RUNNING else None

    def handle(self, event: e.Event, now: float) -> list[e.Action]:
        """Take in one event and return what to do, in order."""
        if self.exited:
            return []
        actions: list[e.Action] = []
        led = self.leads
        self.view.apply(event, now)
        if isinstance(event, e.Listed) and event.gap:
            self._timers.leading = now
        self._hear(event, actions, now)
        if self.leads and not led:
            self._timers = Timers(missing={}, leading=now, attempt=self.view.token)
            self._busy, self._fenced, self._committing = None, 0, None
        if self.view.listed and self._lost_since is None:
            self._membership(actions)
            if not self.exited:
                self._follow(actions)
                self._lead(actions, now)
        elif self._lost_since is not None:
            self._endure(actions, now)
        if not self.exited:
            self._watch_peers(actions)
        return actions

    def _hear(self, event: e.Event, actions: list[e.Action], now: float) -> None:
        """Take in what concerns this member alone."""
        before = self.report
        match event:
            case e.EtcdLost():
                self._lost_since, self._outvoted_since = event.since, None
            case e.EtcdBack():
                self._lost_since = None
            case e.WriteDone() if event.write is self._busy:
                self._busy = None
                self._retry_at = now if event.ok else now + RETRY
            case e.PeerHeard():
                # News of a peer no longer watched would never be followed by news of its end.
                identity = (event.name, event.incarnation)
                watched = any(peer[:2] == identity for peer in self._watched)
                (self._heard.add if event.alive and watched else self._heard.discard)(identity)
            case e.PeerRefused():
                self._heard.discard((event.name, event.incarnation))
                self._bury(event, actions)
            case e.Prepared() if self._phase.get(event.key) is Phase.PREPARING:
                self._phase[event.key] = Phase.PREPARED
                self.report = replace(self.report, prepared=event.key)
            case e.Left():
                self._phase[event.key] = Phase.OVER
                self.report = replace(self.report, left=event.key, step=max(self.report.step, event.step))
            case e.Finished():
                self._phase[event.key] = Phase.OVER
                self.report = replace(self.report, finished=event.key)
            case e.Faulted() if event.key in self._phase and self.report.error != event.key:
                self._phase[event.key] = Phase.OVER
                if event.error:
                    self.report = replace(self.report, error=event.key, detail=event.detail)
                else:
                    self.report = replace(self.report, fault=event.key, detail=event.detail)
            case e.Interrupted() if event.key in self._phase:
                self._phase[event.key] = Phase.OVER
                self.report = replace(self.report, interrupted=event.key)
            case e.Progress():
                # Steps alone are not worth a write each: they travel with the next one.
                if event.etcd_away:
                    self._outvoted_since = None
                elif self._outvoted_since is None:
                    self._outvoted_since = now
                self.report = before = replace(self.report, step=max(self.report.step, event.step))
            case e.Saved():
                self.report = replace(self.report, saved=event.saved)
            case e.LeaveAsked():
                self._leave(actions)
                return
            case e.Broken():
                self._stop_all(actions, "this node cannot go on")
                actions.append(e.Exit(failed=True, detail=event.detail))
                self.exited = True
                return
            case _:
                pass
        still_heard = tuple(
            sorted(
                node.name
                for node in (self.view.generation.nodes if self.view.generation else ())
                if (node.name, node.incarnation) in self._heard and not self.view.is_registered(node)
            )
        )
        if still_heard != self.report.hears and self.view.listed:
            self.report = replace(self.report, hears=still_heard)
        if self.report != before and not self.exited:
            actions.append(e.PutReport(report=self.report))

    def _leave(self, actions: list[e.Action]) -> None:
        """Go in good order: stop the own trainers, delete the own keys."""
        self._stop_all(actions, "this node leaves the job")
        tomb = Tomb(incarnation=self.record.node.incarnation, how=Out.LEFT, by=self.record.node.name)
        actions.append(e.Bury(name=self.record.node.name, tomb=tomb))
        actions.append(e.Exit(failed=False, detail="left the job"))
        self.exited = True

    def _bury(self, event: e.PeerRefused, actions: list[e.Action]) -> None:
        """Tell everyone that a peer is dead, and take over if it led: both are fenced by its incarnation."""
        identity = (event.name, event.incarnation)
        node = self.view.members.get(event.name)
        if identity in self._buried or (node is not None and node.node.incarnation != event.incarnation):
            return
        self._buried.add(identity)
        if self.view.active(*identity):
            self._stop_generation(actions, f"{event.name} is dead")
        known = self.view.tombs.get(event.name)
        if known is None or known.incarnation != event.incarnation:
            tomb = Tomb(incarnation=event.incarnation, how=Out.DEAD, detail=event.evidence, by=self.record.node.name)
            actions.append(e.Bury(name=event.name, tomb=tomb))
        claim = self.view.leader
        if claim is not None and (claim.name, claim.incarnation) == identity:
            actions.append(e.Campaign(expected=self.view.token))

    def _membership(self, actions: list[e.Action]) -> None:
        """Stay registered; go when the job is over or this incarnation is out."""
        node, view = self.record.node, self.view
        tomb = view.tombs.get(node.name)
        if tomb is not None and tomb.incarnation == node.incarnation:
            self._stop_all(actions, f"this incarnation is out: {tomb.how}")
            detail = tomb.detail or f"declared {tomb.how} by {tomb.by}"
            actions.append(e.Exit(failed=tomb.how is not Out.LEFT, detail=detail))
            self.exited = True
        elif view.end is not None:
            self._stop_all(actions, "the job is over")
            actions.append(e.Exit(failed=view.end.failed, detail=view.end.detail))
            self.exited = True
        elif view.is_registered(node):
            self._was_registered = True
        elif self._was_registered and node.name in view.members:
            self._stop_all(actions, "another process took this node's name")
            detail = f"another process registered as node {node.name}: give every node a name of its own"
            actions.append(e.Exit(failed=True, detail=detail))
            self.exited = True
        else:
            seen = view.revision(f"members/{node.name}")
            if seen != self._registered_at:
                self._registered_at = seen
                actions.append(e.PutMember(record=self.record))
                actions.append(e.PutReport(report=self.report))

    def _follow(self, actions: list[e.Action]) -> None:
        """Bring the own trainers to where the records say they should be."""
        node, view = self.record.node, self.view
        current, proposal = view.generation, view.proposal
        wanted: set[str] = set()
        if current is not None and view.active(node.name, node.incarnation):
            wanted.add(current.key)
            why = view.broken()
            if why and self._phase.get(current.key) in (Phase.PREPARING, Phase.PREPARED, Phase.RUNNING):
                self._stop(actions, current.key, f"{why} is out")
        if proposal is not None and (current is None or proposal.generation.number == current.number + 1):
            formed = proposal.generation
            if formed.first_rank(node.name, node.incarnation) is not None:
                wanted.add(formed.key)
                if formed.key not in self._phase:
                    self._phase[formed.key] = Phase.PREPARING
                    actions.append(e.Prepare(generation=formed))
            running = current is not None and self._phase.get(current.key) is Phase.RUNNING
            if proposal.switch and current is not None and running and self._asked != current.key:
                self._asked = current.key
                actions.append(e.AskLeave(key=current.key))
        for key in [key for key, phase in self._phase.items() if key not in wanted]:
            if self._phase[key] is not Phase.OVER:
                self._stop(actions, key, "another generation was sealed")
            del self._phase[key]
        if current is None or current.key not in wanted or view.broken():
            return
        if current.key not in self._phase:
            self._phase[current.key] = Phase.PREPARING
            actions.append(e.Prepare(generation=current))
        elif self._phase[current.key] is Phase.PREPARED:
            self._phase[current.key] = Phase.RUNNING
            members = tuple(present.record for present in view.members.values())
            actions.append(e.Go(generation=current, members=members))

    def _stop(self, actions: list[e.Action], key: str, why: str) -> None:
        self._phase[key] = Phase.OVER
        actions.append(e.Stop(key=key, why=why))

    def _stop_generation(self, actions: list[e.Action], why: str) -> None:
        current = self.view.generation
        if current is not None and self._phase.get(current.key, Phase.OVER) is not Phase.OVER:
            self._stop(actions, current.key, why)

    def _stop_all(self, actions: list[e.Action], why: str) -> None:
        for key, phase in self._phase.items():
            if phase is not Phase.OVER:
                self._stop(actions, key, why)

    def _lead(self, actions: list[e.Action], now: float) -> None:
        """Campaign when nobody leads, decide when this member does; a stranger to the job does neither."""
        current, mine = self.view.generation, self.record.profile
        if current is not None and current.nodes and mine is not None and current.job != mine.digest:
            return
        ready = self._busy is None and now >= self._retry_at
        if self.view.leader is None:
            if self._vacant_since is None:
                self._vacant_since = now
            if ready and now - self._vacant_since >= STAGGER * self._turn():
                self._busy = e.Campaign(expected=0)
                actions.append(self._busy)
            return
        self._vacant_since = None
        if not self.leads or not ready or not self.view.is_registered(self.record.node):
            return
        self._keep_checkpoints(actions)
        heard = frozenset(name for name, _incarnation in self._heard)
        write = decide(self.view, self.record, self.policy, self._planner, self._timers, heard, now)
        if write is not None:
            self._busy = write
            actions.append(write)

    def _keep_checkpoints(self, actions: list[e.Action]) -> None:
        """Fence the store for this generation; commit what all its nodes, or what is left of an older one, wrote."""
        current = self.view.generation
        if current is None or not current.nodes:
            return
        if self._fenced != current.number:
            self._fenced = current.number
            actions.append(e.Fence(number=current.number))
        saved = [report.saved for report in self.view.reports.values() if report.saved is not None]
        if not saved:
            return
        newest = max(saved, key=lambda s: (s.step, s.made_in, s.attempt))
        nodes = saved.count(newest)
        complete = nodes >= len(current.nodes) or newest.made_in != current.number
        if complete and self._committing != (newest, nodes):
            self._committing = (newest, nodes)
            actions.append(e.Commit(saved=newest, number=current.number))

    def _turn(self) -> int:
        """Return how many others campaign before this member: the active ones first, in rank order."""
        node, generation = self.record.node, self.view.generation
        active = [n.name for n in generation.nodes if self.view.is_registered(n)] if generation else []
        if node.name in active:
            return active.index(node.name)
        me = self.view.members.get(node.name)
        order = me.order if me is not None else 0
        return len(active) + sum(p.order < order and p.node.name not in active for p in self.view.members.values())

    def _endure(self, actions: list[e.Action], now: float) -> None:
        """Without etcd: go on while nobody has it, stop before the others could have sealed us out."""
        assert self._lost_since is not None
        alone_since = None if self._outvoted_since is None else max(self._outvoted_since, self._lost_since)
        if alone_since is not None and now - alone_since >= ALONE * (self.policy.lease + self.policy.grace):
            generation = self.view.generation
            if generation is not None and self._phase.get(generation.key) is Phase.RUNNING:
                self._stop(actions, generation.key, "this node alone lost etcd")
                detail = "this node alone lost etcd"
                self.report = replace(self.report, fault=generation.key, detail=detail)
                actions.append(e.PutReport(report=self.report))

    def _watch_peers(self, actions: list[e.Action]) -> None:
        """Hold heartbeat connections to the next two members, so that each is watched by two."""
        node, view = self.record.node, self.view
        ring = list(view.generation.nodes) if view.generation else []
        there = {n.name for n in ring}
        others = (p.node for p in sorted(view.members.values(), key=lambda p: p.order) if p.node.name not in there)
        ring = [n for n in (*ring, *others) if not view.is_out(n)]
        at = next((i for i, n in enumerate(ring) if n.name == node.name), None)
        if at is None:
            return
        near = [ring[(at + i) % len(ring)] for i in (1, 2)] if len(ring) > 1 else []
        peers = tuple(
            dict.fromkeys((n.name, n.incarnation, n.address, n.heartbeat_port) for n in near if n.name != node.name)
        )
        if peers != self._watched:
            self._watched = peers
            self._heard &= {(name, incarnation) for name, incarnation, *_ in peers}
            actions.append(e.Watch(peers=peers))
