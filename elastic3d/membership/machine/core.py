"""The state machine of one member: `handle(events, now)` returns what to do about them.

It does no I/O and reads no clock, so that the same code runs against a real etcd, in transcripts, and in simulations of
thousands of nodes. Its state is changed in place, which keeps an event's cost independent of the number of members.

A member is always two things at once:

*A follower* brings its own trainers to the state that the board asks for (`trainers`), and tells the others in its
report. It hears its neighbours on the ring (`neighbours`), buries those whose port refuses, and answers doubts.

*Perhaps the leader*: every member is ready to lead. The first in rank order campaigns at once when nobody leads, each
of the next a little later. Leading is a key in etcd, and its mod revision fences every write (etcd's own locks are not
sound; a revision compared in the same transaction is). The leader watches the roster too. So does a *contender*, a
neighbour of the leader that does not hear it: together with the other neighbours it may find the leader dead.

Losing etcd: a member that learns from the step votes that it alone has lost etcd stops its trainers before the lease
and the grace are over. While every member has lost it nobody can be sealed out, and training goes on. A member that
hears no votes cannot go on by itself either: a step needs every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from elastic3d import etcd_keys as keys
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.balance import decided
from elastic3d.membership.machine.campaign import turn
from elastic3d.membership.machine.chores import sweep
from elastic3d.membership.machine.commits import Commits
from elastic3d.membership.machine.convictions import made_again, unheard, with_reason
from elastic3d.membership.machine.evictions import TOGETHER
from elastic3d.membership.machine.failure_detector import judge
from elastic3d.membership.machine.generation_index import index_of
from elastic3d.membership.machine.leader import decide
from elastic3d.membership.machine.leader_state import LeaderState
from elastic3d.membership.machine.neighbours import Neighbours
from elastic3d.membership.machine.own_speeds import OwnSpeeds
from elastic3d.membership.machine.own_stall import OwnStall
from elastic3d.membership.machine.reach import Reach
from elastic3d.membership.machine.situation import Ladder, Planner, Situation
from elastic3d.membership.machine.standstill import conclude
from elastic3d.membership.machine.suspicions import Suspicions
from elastic3d.membership.machine.trainers import Trainers, TrainersPhase
from elastic3d.membership.machine.view import View
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import SIGNAL, MemberRecord, Notice, Out, ReasonToGoBack, Report, Tomb
from elastic3d.membership.stalls import Judge
from elastic3d.values import Cause, Generation

ALONE = 0.8
"""Fraction of the time after which the others put out a member that alone has lost etcd, for which it goes on."""

NOTICING = 6.0
"""Seconds by which one member may notice later than another that the same etcd is lost. One that is connected to the
rest of a cluster without a majority hears progress from there for three more seconds, and may look for another server
for nearly as long. Until then a vote against those that know already means nothing."""

RETRY = 0.1
"""Seconds after a failed write before the leader decides again: the watch will have shown why."""


class Core:
    """One member of one job. All times are the member's own monotonic seconds.

    planner: finds layouts while this member leads; it must be the same for all. stuck: finds out, while this member
    leads, why nothing moves; None where nobody does. ladder: what is done where memory runs out, None for nothing.
    said: why the run goes back, as far as an incarnation of this process that was put out could not tell the others.
    """

    def __init__(
        self,
        record: MemberRecord,
        policy: Policy,
        planner: Planner,
        stuck: Judge | None = None,
        ladder: Ladder | None = None,
        said: tuple[ReasonToGoBack, ...] = (),
    ) -> None:
        self.record = record
        self.policy = policy
        self.view = View(record)
        self.report = Report(incarnation=record.node.incarnation, goes_back=said)
        self.exited = False
        self._id = record.node.id
        self._planner = planner
        self._stuck = stuck
        self._ladder = ladder
        self._stall = OwnStall()
        self._speeds = OwnSpeeds()
        self._trainers = Trainers(self._id)
        self._neighbours = Neighbours(self._id)
        self._reach = Reach(self._id)
        self._suspicions = Suspicions()
        self._buried: dict[str, None] = {}
        self._leader_state = LeaderState(buried=self._buried, suspicions=self._suspicions)
        self._alarm = Alarm(0.0)
        self._registered = self._registering = False
        self._registered_at = 0
        self._last_report = self.report
        self._busy: acts.Write | None = None
        self._retry_at = 0.0
        self._lost_since: float | None = None
        self._outvoted_since: float | None = None
        self._stepped = ""
        self._vacant_since: float | None = None
        self._active_in = self._newest = 0
        self._draining = self._hindered = False
        self._gone_by = math.inf
        self._led, self._awaited = 0, acts.Awaiting(nodes=0)
        self._commits = Commits()

    @property
    def leads(self) -> bool:
        """Whether this member holds the leader's key, as far as it knows."""
        return self.view.leader is not None and self.view.leader_id == self._id

    @property
    def running(self) -> Generation | None:
        """The sealed generation whose trainers run here, if any."""
        generation = self.view.generation
        return generation if generation and self._trainers.phase(generation.key) is TrainersPhase.RUNNING else None

    @property
    def _sealed(self) -> str:
        return self.view.generation.key if self.view.generation is not None else ""

    def _may_replace(self, said: str, key: str) -> bool:
        """Return whether a report may name what has ended in place of what it has `said`.

        What trains and what is prepared may end at one moment, as with their template. A proposal can be made again,
        but until the next generation is sealed nobody else tells that the trainers of the present one are gone.
        """
        return not said or said != self._sealed or key == said

    def _soonest(self, notice: Notice, now: float) -> Notice:
        """Return the notice by which this node has to be gone first, of a new one and the one it has reported.

        That a signal has come is kept, whichever it is: whoever sent it ends the node. What is left of the time is what
        a reader has that sees it now.
        """
        known = self.report.notice
        gone_by = math.inf if notice.seconds is None else now + notice.seconds
        if known is None or gone_by < self._gone_by:
            self._gone_by = gone_by
            signalled = known is not None and known.kind == SIGNAL
            return replace(notice, kind=SIGNAL) if signalled else notice
        if notice.kind != SIGNAL or known.kind == SIGNAL:
            return known
        left = None if math.isinf(self._gone_by) else max(0.0, self._gone_by - now)
        return replace(notice, seconds=left)

    def alarm(self, now: float) -> float | None:
        """Return the latest time to call `handle`, with a `Tick` if nothing else came; None for never."""
        return None if self.exited or self._alarm.next == float("inf") else max(now, self._alarm.next)

    def handle(self, events: Sequence[e.Event], now: float) -> list[acts.Action]:
        """Take in what happened, in this order, and return what to do, in order."""
        actions: list[acts.Action] = []
        if self.exited:
            for event in events:
                self._hear_why(event)
            return actions
        self._alarm = Alarm(now)
        for event in events:
            rules = self.view.distrusted
            self.view.apply(event, now)
            self.report = made_again(self.report, rules, self.view.distrusted)
            self.report = unheard(self.report, self.view.generation)
            if isinstance(event, e.Listed) and event.gap:
                self._leader_state.leading = now
                if event.rolled_back and event.tier is e.Tier.BOARD:
                    # This member's keys may be older ones now, or gone although their lease is kept.
                    self._registered = self._registering = False
                    self._registered_at = 0
                    self._stall.rolled_back()
                    # The tombs this member put up may be lost with the rest: the dead are buried again.
                    self._buried.clear()
            self._hear(event, actions, now)
            if self.exited:
                return actions
        self._suspicions.follow(self.view, now)
        if self.leads and self._led != self.view.token:
            self._led = self.view.token
            # A rolled back etcd counts its revisions anew, and attempts never repeat: neither those from before, nor
            # those of other leaders since.
            attempt = self.view.token + self.view.forgotten
            self._leader_state = LeaderState(
                buried=self._buried, leading=now, attempt=attempt, suspicions=self._suspicions
            )
            self._busy, self._commits = None, Commits()
        if self.view.listed and self._lost_since is None:
            self._take_part(actions)
            if self.exited:
                return actions
            self._trainers.follow(self.view, actions)
            self._miss_trainers()
            self._neighbours.follow(self.view, actions)
            if self.policy.beside:
                lost = self.report.peer_lost
                actions += self._reach.follow(self.view, self._trainers, self.policy, lost, self._alarm)
            self._answer()
            self._govern(actions, now)
        elif self._lost_since is not None:
            self._endure(actions)
        self._await(actions)
        # New steps alone are not worth a write: they travel with the next one. The first safe step is worth one,
        # and so is a step that no longer counts.
        last = self._last_report
        first = self.report.safe > 0 and last.safe == 0 and self._first_rank()
        back = self.report.step < last.step or self.report.safe < last.safe
        if first or back or replace(self.report, step=last.step, safe=last.safe) != last:
            self._last_report = self.report
            actions.append(acts.PutReport(report=self.report))
        self._stall.follow(self.view, actions, now)
        return actions

    def _miss_trainers(self) -> None:
        """Report that this node's trainers of the sealed generation were stopped, where nobody would ask for another.

        They were for a node that was out: an etcd that comes back from a backup does not know of that any more.
        """
        current, said = self.view.generation, self.report
        if current is None or self.view.outs or self._trainers.phase(current.key) is not TrainersPhase.OVER:
            return
        known = (said.finished, said.left, said.failed, said.error, said.peer_lost)
        if current.key not in known and self._may_replace(said.peer_lost, current.key):
            detail = "its trainers were stopped for a node that was out, and etcd was rolled back"
            self.report = replace(said, peer_lost=current.key, detail=detail)

    def _await(self, actions: list[acts.Action]) -> None:
        """Report how many nodes are missing, and why, whenever that changes, while this member leads."""
        state, awaited = self._leader_state, acts.Awaiting(nodes=0)
        if self.leads and state.below is not None:
            awaited = acts.Awaiting(nodes=state.awaited)
        elif self.leads and state.unplanned is not None:
            awaited = acts.Awaiting(nodes=1, why=state.unfit)
        if awaited != self._awaited:
            self._awaited = awaited
            actions.append(awaited)

    def _first_rank(self) -> bool:
        """Return whether this node holds rank 0, which reports what all know."""
        index = self.view.index
        return index is not None and index.node_ranks.get(self._id) == 0

    def _hear(self, event: e.Event, actions: list[acts.Action], now: float) -> None:
        """Take in what concerns this member alone."""
        trainers = self._trainers
        self._hear_why(event)
        match event:
            case e.Registered():
                self._registered, self._registered_at = True, event.revision
            case e.Unregistered():
                self._registered = self._registering = False
            case e.MemberGone() if event.id == self._id and event.revision > self._registered_at:
                self._registered = self._registering = False
            case e.TombGone() if event.id == self._id:
                # It was garbage, and in the way of this member's keys.
                self._registered = self._registering = False
            case e.EtcdLost():
                self._lost_since, self._outvoted_since = event.since, None
            case e.EtcdBack():
                if self._lost_since is not None:
                    self.view.wait_longer(now - self._lost_since, now)
                    self._leader_state.wait_longer(now - self._lost_since, now)
                self._lost_since = None
            case e.EtcdImpaired():
                self._hindered = bool(event.reason)
                if not self._hindered and self.view.roster is not None:
                    # A member that lost its lease could not register either: its time to do so begins now.
                    self.view.roster.wait_anew(now)
                    self._leader_state.wait_longer(float("inf"), now)
                    self._leader_state.leading = now
            case e.WriteDone() if event.write is self._busy:
                self._busy = None
                self._retry_at = now if event.ok else now + RETRY
                actions += decided(event)
            case e.WriteDone(write=acts.Bury(missing=True, id=id), ok=False):
                self._buried.pop(id, None)
                if self.view.roster is not None:
                    self.view.roster.wait_for(id, now)
            case e.PeerHeard():
                self._neighbours.hear(event)
            case e.Probed():
                self._reach.probed(event, now)
            case e.PeerRefused():
                self._bury(event.id, event.evidence, actions)
            case e.TrainersPrepared() if trainers.phase(event.key) is TrainersPhase.PREPARING:
                trainers.prepared(event.key)
                self.report = replace(self.report, prepared=event.key)
            case e.Left():
                trainers.over(event.key)
                self.report = replace(self.report, left=event.key, step=max(self.report.step, event.step))
            case e.MainFinished() if trainers.phase(event.key) is not None:
                trainers.over(event.key)
                self.report = replace(self.report, finished=event.key)
            case e.TrainerFailed() if trainers.phase(event.key) is not None and self.report.error != event.key:
                trainers.over(event.key)
                if event.error and self._may_replace(self.report.error, event.key):
                    self.report = replace(
                        self.report,
                        error=event.key,
                        detail=event.detail,
                        final=event.final,
                        out_of_memory=event.out_of_memory,
                        short=event.short,
                    )
                elif not event.error and self._may_replace(self.report.failed, event.key):
                    self.report = replace(self.report, failed=event.key, detail=event.detail)
            case e.TrainerLostPeer() if trainers.phase(event.key) is not None:
                trainers.over(event.key)
                # A report that a trainer failed, or that the script raised, says more than this.
                worse = event.key in (self.report.error, self.report.failed)
                detail = self.report.detail if worse else event.detail
                if self._may_replace(self.report.peer_lost, event.key):
                    self.report = replace(self.report, peer_lost=event.key, detail=detail)
            case e.StepReported():
                if self.running is not None:
                    self._reach.stepped(self.running, now)
                    self._speeds.stepped(self.view, self.running.key, now)
                if event.etcd_away:
                    self._outvoted_since = None
                elif self._outvoted_since is None:
                    self._outvoted_since = now
                key = self.running.key if self.running is not None else ""
                # A generation may have begun with an older state than those before it had come to.
                if event.step > self.report.step or key != self._stepped:
                    self.report, self._stepped = replace(self.report, step=event.step), key
                if event.safe > self.report.safe:
                    self.report = replace(self.report, safe=event.safe)
            case e.RanksSilent() if self.policy.beside and self._sealed == event.stall.key:
                self._stall.silent(event.stall, now)
            case e.RanksMoving():
                self._stall.moving(event.key)
            case e.NodesSlow():
                self._speeds.hear(event)
            case e.Saved():
                self.report = replace(self.report, saved=event.saved)
            case e.Settled():
                self._commits.settled(self._leader_state, event)
            case e.Noticed():
                self.report = replace(self.report, notice=self._soonest(event.notice, now))
                self._drain(actions, event.notice.seconds, event.notice.detail or event.notice.kind)
            case e.LeaveAsked():
                tomb = Tomb(incarnation=self.record.node.incarnation, how=Out.LEFT, by=self.record.node.name)
                self._exit(actions, "this node leaves the job", acts.Exit(failed=False, detail="left the job"), tomb)
            case e.Broken():
                self._exit(actions, "this node cannot go on", acts.Exit(failed=True, detail=event.detail))
            case _:
                pass

    def _hear_why(self, event: e.Event) -> None:
        """Report for what the run goes back, or whom it goes on without, where its trainers ended because of it.

        Whether or not another generation has been sealed since, or this incarnation is out: the next one says it then.
        """
        if not isinstance(event, e.TrainerFailed | e.TrainerLostPeer) or not (event.clean >= 0 or event.accused):
            return
        back = event.rollback if isinstance(event, e.TrainerLostPeer) else None
        word = ReasonToGoBack(
            key=event.key, clean=event.clean, accused=event.accused, rollback=back, detail=event.detail
        )
        self.report = with_reason(self.report, word)

    def _exit(self, actions: list[acts.Action], why: str, how: acts.Exit, tomb: Tomb | None = None) -> None:
        self._trainers.stop_all(actions, why)
        if tomb is not None:
            actions.append(acts.Bury(id=self._id, tomb=tomb))
        actions.append(how)
        self.exited = True

    def _drain(self, actions: list[acts.Action], seconds: float | None, detail: str) -> None:
        self._draining = True
        actions.append(acts.Draining(seconds=seconds, detail=detail))

    def _bury(self, id: str, evidence: str, actions: list[acts.Action]) -> None:
        """Declare a peer dead, and take over if it led: both are fenced by its incarnation."""
        if id not in self._buried:
            self._buried[id] = None
            current = self.view.generation
            if current is not None and self.view.active(id):
                self._trainers.stop(actions, current.key, f"{id.partition('@')[0]} is dead")
            if id not in self.view.tombs:
                tomb = Tomb(incarnation=id.partition("@")[2], how=Out.DEAD, detail=evidence, by=self.record.node.name)
                actions.append(acts.Bury(id=id, tomb=tomb))
            if self.view.leader_id == id:
                self._campaign(actions, self.view.token)

    def _take_part(self, actions: list[acts.Action]) -> None:
        """Stay registered; exit if the job is over, this incarnation is out, or the others went on without it."""
        view, current = self.view, self.view.generation
        tomb = view.tombs.get(self._id)
        if tomb is not None:
            how = acts.Exit(
                failed=tomb.how is not Out.LEFT,
                detail=tomb.detail or f"declared {tomb.how} by {tomb.by}",
                rejoin=tomb.how is Out.DEAD,
            )
            self._exit(actions, f"this incarnation is out: {tomb.how}", how)
            return
        if view.end is not None:
            self._exit(actions, "the job is over", acts.Exit(failed=view.end.failed, detail=view.end.detail))
            return
        if current is not None and current.number < self._newest:
            detail = f"etcd lost generation {self._newest}, and the others went on from {current.number}"
            self._exit(actions, "etcd was rolled back", acts.Exit(failed=True, detail=detail, rejoin=True))
            return
        if view.outdated is not None and not self.leads and view.leader is not None:
            detail = "etcd was rolled back to an older generation, and nobody wrote this node's generation again"
            if self._alarm.due(view.outdated + 2 * self.policy.lease + self.policy.grace):
                self._exit(actions, "etcd was rolled back", acts.Exit(failed=True, detail=detail, rejoin=True))
                return
        if current is not None and current.nodes:
            self._newest = current.number
            index = index_of(current)
            if self._id in index.node_ranks:
                self._active_in = current.number
            elif self._active_in and self._id not in index.spares and current.cause is not Cause.DRAIN:
                detail = f"the others went on without this node ({current.cause}: {current.detail})"
                self._exit(actions, "another generation was sealed", acts.Exit(failed=True, detail=detail, rejoin=True))
                return
        coming = view.coming
        if coming is not None and coming.cause is Cause.DRAIN and not self._draining and view.active(self._id):
            index = index_of(coming)
            if self._id not in index.node_ranks and self._id not in index.spares:
                self._drain(actions, None, coming.detail)
        if not self._registered and not self._registering:
            self._registering = True
            self._last_report = self.report
            self._stall.write_again()
            actions.append(acts.PutMember(record=self.record))
            actions.append(acts.PutReport(report=self.report))

    def _answer(self) -> None:
        """Report the silent neighbours, what cannot be read, and, if somebody doubts it, that this member lives."""
        if self.view.unread != self.report.unread:
            self.report = replace(self.report, unread=self.view.unread)
        doubt = self.view.doubts.get(self._id)
        answered = doubt.mark if doubt is not None else self.report.answered
        speeds = self._speeds.said(self.view)
        if speeds != self.report.speeds:
            self.report = replace(self.report, speeds=speeds)
        silent, unreachable = self._neighbours.silent, self._reach.unreachable
        if (silent, unreachable, answered) != (self.report.silent, self.report.unreachable, self.report.answered):
            self.report = replace(self.report, silent=silent, unreachable=unreachable, answered=answered)

    def _govern(self, actions: list[acts.Action], now: float) -> None:
        """Campaign if nobody leads, judge a silent leader, decide if this member leads; a stranger does nothing."""
        current, mine = self.view.generation, self.record.profile
        if current is not None and current.nodes and mine is not None and current.job != mine.job:
            return
        contends = not self.leads and bool(self.view.leader_id) and self.view.leader_id in self.report.silent
        self._watch_roster(actions, self.leads or contends)
        ready = self._busy is None and self._alarm.due(self._retry_at)
        if self.view.leader is None:
            self._vacant_since = now if self._vacant_since is None else self._vacant_since
            if (
                ready
                and self._registered
                and self._alarm.due(self._vacant_since + turn(self.view, leaving=self._draining))
            ):
                self._campaign(actions, self.view.token)
            return
        self._vacant_since = None
        if ready and self._registered and not self.leads and self.view.led_by_newcomer:
            self._campaign(actions, self.view.token)
            return
        tomb = keys.tomb(self._id)
        if ready and self.leads and not self._registered and tomb in self.view.garbage:
            # It is in the way of this member's keys.
            self._busy = sweep(self.view, tomb)
            actions.append(self._busy)
        roster = self.view.roster
        if roster is None or not roster.listed or not self._registered:
            return
        roster.hear(self._id, self.report, now)
        situation = Situation(
            view=self.view,
            roster=roster,
            policy=self.policy,
            planner=self._planner,
            leader_state=self._leader_state,
            alarm=self._alarm,
            judge=self._stuck,
            ladder=self._ladder,
            heard=self._speeds.heard,
        )
        if contends:
            leader = self.view.leader_id
            dead, doubts = judge(situation, only=leader)
            actions += doubts
            if leader in dead and len(dead) <= TOGETHER:
                # Once the leader is out the ring closes, and those cut off with it get new neighbours, who miss them.
                for id in dead:
                    self._bury(id, dead[id], actions)
            elif leader in dead:
                self._bury(leader, dead[leader], actions)
            return
        self._commits.follow(self.view, self._leader_state, actions)
        actions += conclude(situation, hindered=self._hindered)
        writes = decide(situation, ready=ready, hindered=self._hindered)
        if writes and isinstance(writes[-1], acts.Fenced):
            self._busy = writes[-1]
        actions += writes

    def _campaign(self, actions: list[acts.Action], expected: int) -> None:
        if self._busy is None:
            self._busy = acts.Campaign(expected=expected)
            actions.append(self._busy)

    def _watch_roster(self, actions: list[acts.Action], on: bool) -> None:
        if on and self.view.roster is None:
            self.view.open_roster()
            actions.append(acts.WatchRoster(True))
        elif not on and self.view.roster is not None:
            self.view.close_roster()
            actions.append(acts.WatchRoster(False))

    def _endure(self, actions: list[acts.Action]) -> None:
        """Without etcd: go on while nobody has it, stop before the others could have sealed us out.

        A member that trains nothing lets its lease go, should it still be kept alive: otherwise it would be taken into
        generations of which it hears nothing.
        """
        assert self._lost_since is not None
        patience = ALONE * (self.policy.lease + self.policy.grace)
        generation = self.running
        if generation is not None and self._outvoted_since is not None:
            # A neighbour that still hears this member keeps it in for `orphan` longer; with none, there are no votes.
            longest = ALONE * (self.policy.lease + self.policy.grace + self.policy.orphan)
            alone_since = max(self._outvoted_since, self._lost_since)
            if self._alarm.due(alone_since + min(max(patience, NOTICING), longest)):
                detail = "this node alone lost etcd"
                self._trainers.stop(actions, generation.key, detail)
                self.report = replace(self.report, failed=generation.key, detail=detail)
        if self.running is None and self._registered and self._alarm.due(self._lost_since + patience):
            self._registered = self._registering = False
            actions.append(acts.LetGo())
