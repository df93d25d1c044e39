"""What the leader knows beyond the board: which members are registered, what they report, who shall leave or stay out.

Every question the leader asks after each event is answered by a set that is kept up to date with each event, so that an
event costs the same at 10,000 nodes as at ten; only a decision that is taken looks at all members.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from elastic3d.membership import events as e
from elastic3d.membership.machine.apart import apart
from elastic3d.membership.machine.generation_index import GenerationIndex, index_of
from elastic3d.membership.machine.reports import Reports, discard
from elastic3d.membership.machine.stalls import Stalls
from elastic3d.membership.records import SIGNAL, Drain, Flap, MemberRecord, Quarantine, Report, Tomb
from elastic3d.values import Generation, Node


class Board(Protocol):
    """What the roster is read against: the sealed and the coming generation, and the members that are out."""

    tombs: dict[str, Tomb]
    restored: int

    @property
    def index(self) -> GenerationIndex | None:
        """The members of the sealed generation."""
        ...

    @property
    def coming(self) -> Generation | None:
        """The generation proposed to follow it."""
        ...

    def active(self, id: str) -> bool:
        """Return whether the node trains in the sealed generation."""
        ...

    def takes_part(self, id: str) -> bool:
        """Return whether the node is in the sealed generation, active or a spare."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """A registered member; `order` says who came first."""

    record: MemberRecord
    order: int

    @property
    def node(self) -> Node:
        """The node itself."""
        return self.record.node


@dataclass(frozen=True, slots=True, kw_only=True)
class DepartureOrder:
    """Why a node shall leave, since when that is known here, and when it must be gone; None: no deadline.

    stopping: its processes were sent a signal to end, and the sender waits for them.
    """

    reason: str
    since: float
    deadline: float | None
    stopping: bool = False


class Roster:
    """The roster as known to the member `me`. All dicts are by id unless said otherwise.

    eligible: may be active in the next generation. unfit: registered, but may not. missing: active, not out and not
    registered, since when. uncertain: of the proposed generation, out or not registered. refused: may not take part,
    and why. replaced: by which other incarnation under its name. apart: stands aside because it and these cannot
    connect to each other. version: counts the changes of eligible and unfit. changed_at: when a member last came, or
    was told to go.
    """

    def __init__(self, me: MemberRecord, board: Board) -> None:
        self._me, self._board = me, board
        self.listed = False
        self.members: dict[str, Present] = {}
        self.reports = Reports()
        self.stalls = Stalls()
        self.eligible: dict[str, None] = {}
        self.unfit: dict[str, None] = {}
        self.draining: dict[str, DepartureOrder] = {}
        self.missing: dict[str, float] = {}
        self.uncertain: dict[str, None] = {}
        self.refused: dict[str, str] = {}
        self.replaced: dict[str, str] = {}
        self.apart: dict[str, tuple[str, ...]] = {}
        self.drains: dict[str, tuple[Drain, float]] = {}
        self.quarantines: dict[str, Quarantine] = {}
        self.flaps: dict[str, Flap] = {}
        self.version = 0
        self.changed_at = 0.0
        self._by_name: dict[str, dict[str, None]] = {}
        self._by_place: dict[str, dict[str, None]] = {}
        self._revisions: dict[str, int] = {}

    def named(self, name: str) -> tuple[str, ...]:
        """Return the registered incarnations under a name."""
        return tuple(self._by_name.get(name, ()))

    def kept_out(self, id: str) -> bool:
        """Return whether the member's machine is in quarantine."""
        present = self.members.get(id)
        return present is not None and present.node.place in self.quarantines

    def order(self, id: str) -> tuple[int, int]:
        """Return a member's place in the order in which a generation is formed."""
        index = self._board.index
        if index is not None and id in index.node_ranks:
            return (0, index.node_ranks[id])
        if index is not None and id in index.spares:
            return (1, index.spares[id])
        return (2, self.members[id].order)

    def apply(self, event: e.Event, now: float) -> None:
        """Take in one event of the roster."""
        match event:
            case e.MemberPut() if self._newer(f"members/{event.record.node.id}", event.revision):
                self._put(event.record, event.order, now)
            case e.MemberGone() if self._newer(f"members/{event.id}", event.revision):
                self._gone(event.id, now)
            case e.ReportPut() if self._newer(f"reports/{event.id}", event.revision):
                if event.id != self._me.node.id:
                    self.hear(event.id, event.report, now)
            case e.ReportGone() if self._newer(f"reports/{event.id}", event.revision):
                if event.id != self._me.node.id:
                    self._unsay(event.id, now)
            case e.DrainPut() if self._newer(f"drains/{event.name}", event.revision):
                self.drains[event.name] = (event.drain, now)
                self._drained(event.name, now)
            case e.DrainGone() if self._newer(f"drains/{event.name}", event.revision):
                self.drains.pop(event.name, None)
                self._drained(event.name, now)
            case e.QuarantinePut() if self._newer(f"quarantine/{event.place}", event.revision):
                self.quarantines[event.place] = event.quarantine
                self._quarantined(event.place, now)
            case e.QuarantineGone() if self._newer(f"quarantine/{event.place}", event.revision):
                self.quarantines.pop(event.place, None)
                self._quarantined(event.place, now)
            case e.FlapPut() if self._newer(f"flaps/{event.place}", event.revision):
                self.flaps[event.place] = event.flap
            case e.FlapGone() if self._newer(f"flaps/{event.place}", event.revision):
                self.flaps.pop(event.place, None)
            case e.StallPut() if self._newer(f"stalls/{event.id}", event.revision):
                self.stalls.hear(event.id, event.stall, event.created, now)
            case e.StallGone() if self._newer(f"stalls/{event.id}", event.revision):
                self.stalls.forget(event.id, now)
            case e.Unreadable() if self._newer(f"members/{event.id}", event.revision):
                # A member that takes part was readable: its record was overwritten, and it will write it again.
                known = event.id in self.members or self._board.takes_part(event.id)
                self._gone(event.id, now)
                if not known:
                    self.refused[event.id] = event.detail
            case _:
                pass

    def list(self, event: e.Listed, now: float) -> None:
        """Take in all of the roster at once; what is not listed is gone, unless newer news of it came."""
        if event.rolled_back:
            self._revisions.clear()
        keep = {key for key, revision in self._revisions.items() if revision > event.revision}
        for item in event.items:
            match item:
                case e.MemberPut():
                    keep.add(f"members/{item.record.node.id}")
                case e.Unreadable():
                    keep.add(f"members/{item.id}")
                case e.ReportPut():
                    keep.add(f"reports/{item.id}")
                case e.DrainPut():
                    keep.add(f"drains/{item.name}")
                case e.QuarantinePut():
                    keep.add(f"quarantine/{item.place}")
                case e.FlapPut():
                    keep.add(f"flaps/{item.place}")
                case e.StallPut():
                    keep.add(f"stalls/{item.id}")
                case _:
                    pass
            self.apply(item, now)
        for id in [id for id in (*self.members, *self.refused) if f"members/{id}" not in keep]:
            self._gone(id, now)
        for id in [id for id in self.reports.ids() if f"reports/{id}" not in keep and id != self._me.node.id]:
            self._unsay(id, now)
        for name in [name for name in self.drains if f"drains/{name}" not in keep]:
            del self.drains[name]
            self._drained(name, now)
        for place in [place for place in self.quarantines if f"quarantine/{place}" not in keep]:
            del self.quarantines[place]
            self._quarantined(place, now)
        for place in [place for place in self.flaps if f"flaps/{place}" not in keep]:
            del self.flaps[place]
        for id in [id for id in self.stalls.ids() if f"stalls/{id}" not in keep]:
            self.stalls.forget(id, now)
        if not self.listed:
            self.listed = True
            self.reformed(now)
            self.proposed()

    # News of the board.

    def buried(self, id: str) -> None:
        """A tomb was put up, or cleared away, or lost when etcd was rolled back and the member's key came back."""
        self.missing.pop(id, None)
        self._find_twins(id.partition("@")[0])
        self._judge(id)
        self._propose(id)
        self._part()

    def reformed(self, now: float) -> None:
        """A generation was sealed: the set of active nodes has changed."""
        index = self._board.index
        active = index.ids if index is not None else ()
        known, out = self.missing, self._board.tombs
        self.missing = {id: known.get(id, now) for id in active if id not in self.members and id not in out}
        for id in tuple(self.replaced):
            self._find_twins(id.partition("@")[0])
        self.version += 1
        self._part()

    def wait_anew(self, now: float) -> None:
        """Nobody could register until now: members that are missing count as missing from now on."""
        self.missing = dict.fromkeys(self.missing, now)

    def wait_for(self, id: str, now: float) -> None:
        """Etcd knows that a member is not missing: news of it is on its way, and from now on its time runs again."""
        if id in self.missing:
            self.missing[id] = now

    def wait_longer(self, seconds: float, now: float) -> None:
        """Etcd was away for so many seconds: they do not count."""
        self.missing = {id: min(now, since + seconds) for id, since in self.missing.items()}

    def proposed(self) -> None:
        """A proposal was made or withdrawn."""
        formed, out = self._board.coming, self._board.tombs
        self.uncertain = {}
        if formed is not None:
            ids = index_of(formed).ids
            self.uncertain = {id: None for id in ids if id not in self.members or id in out}

    # News of the roster itself.

    def hear(self, id: str, report: Report, now: float) -> None:
        """Take in a report."""
        known = self.reports.get(id)
        before = known.unreachable if known is not None else ()
        if self.reports.hear(id, report, now):
            self.changed_at = now
            self._judge(id)
        if before != report.unreachable:
            self._part()

    def _put(self, record: MemberRecord, order: int, now: float) -> None:
        id, node = record.node.id, record.node
        if id not in self.members:
            self.changed_at = now
        self.members[id] = Present(record=record, order=order)
        self._by_name.setdefault(node.name, {})[id] = None
        self._by_place.setdefault(node.place, {})[id] = None
        self.missing.pop(id, None)
        why = refusal(record, self._me)
        if why:
            self.refused[id] = why
        self._find_twins(node.name)
        self._judge(id)
        self._propose(id)
        self._part()

    def _gone(self, id: str, now: float) -> None:
        present = self.members.pop(id, None)
        self.refused.pop(id, None)
        self.replaced.pop(id, None)
        if present is not None:
            discard(self._by_name, present.node.name, id)
            discard(self._by_place, present.node.place, id)
            self._find_twins(present.node.name)
        if self._board.active(id) and id not in self._board.tombs:
            self.missing.setdefault(id, now)
        if id != self._me.node.id:
            self._unsay(id, now)
        self._judge(id)
        self._propose(id)
        self._part()

    def _unsay(self, id: str, now: float) -> None:
        if self.reports.forget(id, now):
            self.changed_at = now
            self._judge(id)
        self._part()

    def _find_twins(self, name: str) -> None:
        """Mark the older of two incarnations under one name: the one in the generation, or registered earlier.

        What stood in etcd when it came back rolled back may be a backup's, and older than the generation. Until the one
        in the generation has registered again, or is out, it is not known which is.
        """
        rivals = dict.fromkeys(self.named(name))
        index = self._board.index
        sealed = index.names.get(name) if index is not None else None
        if sealed is not None:
            rivals[sealed] = None
        rivals = {id: None for id in rivals if id not in self._board.tombs and id not in self.refused}
        restored, age = self._board.restored, {}
        for id in rivals:
            order = self.members[id].order if id in self.members else math.inf
            age[id] = (id != sealed and order > restored, order)
        newest = max(rivals, key=lambda id: age[id], default="")
        for id in rivals:
            if id != newest:
                self.replaced[id] = newest
            elif self.replaced.pop(id, None) is None:
                continue
            self._judge(id)

    def _drained(self, name: str, now: float) -> None:
        self.changed_at = now
        for id in self.named(name):
            self._judge(id)

    def _quarantined(self, place: str, now: float) -> None:
        self.changed_at = now
        for id in self._by_place.get(place, ()):
            self._judge(id)

    def _judge(self, id: str) -> None:
        """Bring up to date whether this member may be active."""
        there = id in self.members and id not in self._board.tombs
        leaving = self._leaving(id) if there else None
        if leaving is None:
            was = self.draining.pop(id, None)
        else:
            was = self.draining.get(id)
            self.draining[id] = leaving
        kept_out = id in self.refused or id in self.replaced or id in self.apart or self.kept_out(id)
        fit = there and leaving is None and not kept_out
        unfit = there and not fit
        if fit != (id in self.eligible) or unfit != (id in self.unfit) or was != leaving:
            self.version += 1
        _set(self.eligible, id, fit)
        _set(self.unfit, id, unfit)

    def _leaving(self, id: str) -> DepartureOrder | None:
        """Return the order to leave, by the member's notice or by an operator, whichever has the earlier deadline."""
        orders = []
        if id in self.reports.notices:
            notice, since = self.reports.notices[id]
            detail = f"{notice.kind}: {notice.detail}" if notice.detail else notice.kind
            ends = None if notice.seconds is None else since + notice.seconds
            stopping = notice.kind == SIGNAL
            orders.append(DepartureOrder(reason=detail, since=since, deadline=ends, stopping=stopping))
        name, _, incarnation = id.partition("@")
        if name in self.drains:
            drain, since = self.drains[name]
            if drain.incarnation in ("", incarnation):
                said = drain.reason or "an operator's order"
                orders.append(DepartureOrder(reason=said, since=since, deadline=since + drain.seconds))
        return min(orders, key=lambda one: float("inf") if one.deadline is None else one.deadline, default=None)

    def _part(self) -> None:
        """Bring up to date which nodes stand aside because they and another cannot connect to each other."""
        if not self.reports.apart and not self.apart:
            return
        there = self.members.keys() - self._board.tombs.keys()
        pairs = {
            frozenset((id, other))
            for id in self.reports.apart
            for other in self.reports[id].unreachable
            if id in there and other in there and id != other
        }
        before, self.apart = self.apart, apart(pairs, self.order)
        for id in {**before, **self.apart}:
            if (id in before) != (id in self.apart):
                self._judge(id)

    def _propose(self, id: str) -> None:
        formed = self._board.coming
        if formed is not None and id in index_of(formed).node_ranks:
            _set(self.uncertain, id, id not in self.members or id in self._board.tombs)

    def _newer(self, key: str, revision: int) -> bool:
        if revision <= self._revisions.get(key, 0):
            return False
        self._revisions[key] = revision
        return True


def refusal(theirs: MemberRecord, mine: MemberRecord) -> str:
    """Return why a node cannot take part in the job of the other, "" if it can."""
    if len(theirs.node.slots) != len(mine.node.slots):
        return (
            f"this node has {len(theirs.node.slots)} slot(s), the job's nodes have {len(mine.node.slots)}: "
            "start every node with the same --nproc-per-node"
        )
    if theirs.encrypted != mine.encrypted:
        which = "encrypts its connections to other nodes, and the job's nodes do not"
        if mine.encrypted:
            which = "does not encrypt its connections to other nodes, and the job's nodes do"
        return f"this node {which}: give cert= and key= to every node of the run, or to none"
    if mine.device is not None and theirs.device is not None:
        here, there = theirs.device.unlike(mine.device)
        if here:
            return (
                f"this node computes on {here}, the job's nodes on {there}: the same step would give other bits. Give "
                "the job nodes of one kind, or this one a run id of its own"
            )
    if (mine.profile.digest if mine.profile else "") != (theirs.profile.digest if theirs.profile else ""):
        return (
            "this node's model, batch sizes or seed differ from those of the job that runs under this run id: "
            "start it with the same script and arguments, or choose another --rdzv-id"
        )
    if mine.profile is not None and theirs.profile is not None:
        for field, what in (("script", "script"), ("schedule", "optimizer or learning-rate schedule")):
            if getattr(mine.profile, field) != getattr(theirs.profile, field):
                return (
                    f"this node's {what} differs from that of the job that runs under this run id: start it with the "
                    "same file and arguments, or choose another --rdzv-id"
                )
        if mine.profile.code and theirs.profile.code and mine.profile.code != theirs.profile.code:
            return (
                "this node's model is made of something else than that of the job that runs under this run id, in the "
                "same shapes: a file that the script imports from its folder differs, the version of a package of "
                "which it has modules, or its configuration. Compare `git rev-parse HEAD`, `git status` and `pip "
                "freeze` of both"
            )
        if mine.profile.samples and theirs.profile.samples and mine.profile.samples != theirs.profile.samples:
            return (
                "this node's data set makes other samples of the same numbers than that of the job which runs under "
                "this run id: some would be trained twice, and others never. Give it the same files, and sort what it "
                "lists: glob and os.listdir have an order of their own on each machine"
            )
        if mine.profile.health != theirs.profile.health:
            here, there = (
                ", ".join(sorted(set(one) - set(other))) or "no such option"
                for one, other in (
                    (theirs.profile.health, mine.profile.health),
                    (mine.profile.health, theirs.profile.health),
                )
            )
            return (
                f"this node's health= says {here}, that of the job which runs under this run id {there}: every rank "
                "has to decide alike, so give all nodes the same, or choose another --rdzv-id"
            )
    return ""


def _set(known: dict[str, None], key: str, there: bool) -> None:
    if there:
        known[key] = None
    else:
        known.pop(key, None)
