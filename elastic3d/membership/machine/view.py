"""What a member knows of the job: the latest of each record, as the watches delivered them.

Events may come twice (the answer to this member's write, then its echo in the watch) and a listing may be older than an
event already heard; each record therefore keeps its revision, and only newer ones count.

Every member knows the board. One that leads, or judges the leader, knows the roster too.
"""

from __future__ import annotations

from dataclasses import replace

from elastic3d import etcd_keys as keys
from elastic3d.distrust import Distrust
from elastic3d.membership import events as e
from elastic3d.membership.machine.generation_index import GenerationIndex, Ring, index_of, ring_of
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.records import Claim, Doubt, End, MemberRecord, Out, Proposal, Tomb
from elastic3d.rollback import Rollback
from elastic3d.values import Generation


class View:
    """The job as known to the member `me`. Changed by `apply`, `open_roster` and `close_roster` alone.

    outs: active nodes of the sealed generation that are out, by id, with the time when that was heard. fallen: members
    of it or of the proposed generation that died, with their machines, until the next is sealed. generation_revision:
    of the value under the generation's key, which is not the generation while `spoiled`. outdated: since when that is
    an older record because etcd was rolled back; None otherwise. forgotten: the greatest revision heard of before that
    (the sum of them if it happened more than once), 0 if it never did. restored: the revision at which that was heard
    of, 0 if it never was. garbage: revisions of keys that are to be swept.
    sealed_at: when the generation was heard of. tombs_at, doubts_at: the same for these.
    """

    def __init__(self, me: MemberRecord) -> None:
        self.me = me
        self.leader: Claim | None = None
        self.token = 0
        self.generation: Generation | None = None
        self.generation_revision = 0
        self.spoiled = False
        self.outdated: float | None = None
        self.forgotten = self.restored = 0
        self.garbage: dict[str, int] = {}
        self.sealed_at = 0.0
        self.proposal: Proposal | None = None
        self.end: End | None = None
        self.tombs: dict[str, Tomb] = {}
        self.tombs_at: dict[str, float] = {}
        self.doubts: dict[str, Doubt] = {}
        self.doubts_at: dict[str, float] = {}
        self.outs: dict[str, float] = {}
        self.fallen: dict[str, str] = {}
        self.listed = False
        self.roster: Roster | None = None
        self._revisions: dict[str, int] = {}

    @property
    def index(self) -> GenerationIndex | None:
        """The members of the sealed generation; None before the first."""
        return index_of(self.generation) if self.generation is not None else None

    @property
    def standing(self) -> Generation | None:
        """What the generation's key holds at `generation_revision`, None if that is no record or an older one."""
        return None if self.spoiled else self.generation

    @property
    def distrusted(self) -> tuple[Distrust, ...]:
        """Rules for states that the sealed generation must not go on from."""
        return self.generation.distrusted if self.generation is not None else ()

    @property
    def rollbacks(self) -> tuple[Rollback, ...]:
        """What the sealed generation leaves out since the loss jumped up."""
        return self.generation.rollbacks if self.generation is not None else ()

    @property
    def unread(self) -> str:
        """The revision of the generation's record if it cannot be read and no generation is known; else ""."""
        known = self.generation is not None or not self.spoiled
        return "" if known or not self.generation_revision else str(self.generation_revision)

    @property
    def coming(self) -> Generation | None:
        """The generation proposed to follow the sealed one."""
        if self.proposal is None:
            return None
        formed = self.proposal.generation
        number = self.generation.number if self.generation is not None else 0
        return formed if formed.number == number + 1 else None

    @property
    def ring(self) -> Ring:
        """The ring along which members watch each other, before buried ones are left out."""
        return ring_of(self.generation, self.coming)

    @property
    def leader_id(self) -> str:
        """The id of the leader, "" for none."""
        return f"{self.leader.name}@{self.leader.incarnation}" if self.leader is not None else ""

    @property
    def led_by_newcomer(self) -> bool:
        """Whether etcd came back without the job, and the one that leads now cannot write it there again.

        It would form a first generation of a job that is well under way.
        """
        known, lost = self.index, self.forgotten > 0 and self.spoiled and self.generation_revision == 0
        if known is None or not known.node_ranks or not lost or self.leader is None:
            return False
        return not self.takes_part(self.leader_id)

    def active(self, id: str) -> bool:
        """Return whether the node trains in the sealed generation."""
        return self.generation is not None and id in index_of(self.generation).node_ranks

    def takes_part(self, id: str) -> bool:
        """Return whether the node is in the sealed generation, active or a spare."""
        index = self.index
        return index is not None and (id in index.node_ranks or id in index.spares)

    def place(self, id: str) -> str | None:
        """Return the machine of a member of the sealed or the proposed generation."""
        for generation in (self.generation, self.coming):
            if generation is not None:
                node = index_of(generation).nodes.get(id)
                if node is not None:
                    return node.place
        return None

    def broken(self) -> str:
        """Return the name of the first active node of the sealed generation that is out, "" for none."""
        return next(iter(self.outs), "").partition("@")[0]

    def open_roster(self) -> None:
        """Begin to know the roster; it counts once it is listed."""
        self.roster = Roster(self.me, self)

    def close_roster(self) -> None:
        """Forget the roster."""
        self.roster = None

    def apply(self, event: e.Event, now: float) -> None:
        """Take in one event of a watch; other events do not concern the view."""
        match event:
            case e.Listed(tier=e.Tier.BOARD):
                self._list(event, now)
            case e.Listed():
                for item in event.items:
                    if isinstance(item, e.Garbage):
                        self.apply(item, now)
                if self.roster is not None:
                    self.roster.list(event, now)
            case e.TombPut() if self._newer(f"tombs/{event.id}", event.revision):
                self.tombs[event.id] = event.tomb
                self.tombs_at.setdefault(event.id, now)
                if self.active(event.id):
                    self.outs.setdefault(event.id, now)
                place = self.place(event.id)
                if event.tomb.how is Out.DEAD and place is not None:
                    self.fallen[event.id] = place
                if self.roster is not None:
                    self.roster.buried(event.id)
            case e.TombGone() if self._newer(f"tombs/{event.id}", event.revision):
                self._unbury(event.id)
            case e.DoubtPut() if self._newer(f"doubts/{event.id}", event.revision):
                self.doubts[event.id] = event.doubt
                self.doubts_at[event.id] = now
            case e.DoubtGone() if self._newer(f"doubts/{event.id}", event.revision):
                self.doubts.pop(event.id, None)
                self.doubts_at.pop(event.id, None)
            case e.LeaderPut() if self._newer("leader", event.revision):
                self.leader, self.token = event.claim, event.revision
            case e.LeaderGone() if self._newer("leader", event.revision):
                self.leader, self.token = None, event.token
            case e.GenerationSpoiled() if self._newer("generation", event.revision):
                self.generation_revision, self.spoiled, self.outdated = event.stands, True, None
            case e.Garbage():
                self.garbage[event.key] = event.revision
            case e.GenerationPut() if self._newer("generation", event.revision):
                # Its record may be written again with what was learnt meanwhile.
                mended = self.generation is not None and self.generation.key == event.generation.key
                self.generation, self.generation_revision = event.generation, event.revision
                self.spoiled, self.outdated = False, None
                if not mended:
                    self.sealed_at = now
                    self.fallen = {}
                index = index_of(event.generation).node_ranks
                self.outs = {id: self.tombs_at[id] for id in self.tombs if id in index}
                if self.roster is not None:
                    self.roster.reformed(now)
            case e.ProposalPut() if self._newer("proposal", event.revision):
                self._propose(event.proposal)
            case e.ProposalGone() if self._newer("proposal", event.revision):
                self._propose(None)
            case e.EndPut() if self._newer("end", event.revision):
                self.end = event.end
            case _:
                if self.roster is not None:
                    self.roster.apply(event, now)

    def wait_longer(self, seconds: float, now: float) -> None:
        """Etcd was away for so many seconds: they do not count for members that could neither register nor answer."""
        self.doubts_at = {id: min(now, at + seconds) for id, at in self.doubts_at.items()}
        if self.outdated is not None:
            # All leases begin anew when etcd is back, that of a leader in the backup too, who may be long gone.
            self.outdated = now
        if self.roster is not None:
            self.roster.wait_longer(seconds, now)

    def _propose(self, proposal: Proposal | None) -> None:
        self.proposal = proposal
        if self.roster is not None:
            self.roster.proposed()

    def _unbury(self, id: str) -> None:
        self.tombs.pop(id, None)
        self.tombs_at.pop(id, None)
        self.outs.pop(id, None)
        if self.roster is not None:
            self.roster.buried(id)

    def _newer(self, key: str, revision: int) -> bool:
        if revision <= self._revisions.get(key, 0):
            return False
        self._revisions[key] = revision
        return True

    def _list(self, event: e.Listed, now: float) -> None:
        if event.rolled_back:
            self.forgotten += max(self._revisions.values(), default=0)
            self.restored = event.revision
            self._revisions.clear()
            event = self._without_the_past(event, now)
        keep = {key for key, revision in self._revisions.items() if revision > event.revision}
        for item in event.items:
            match item:
                case e.TombPut():
                    keep.add(f"tombs/{item.id}")
                case e.DoubtPut():
                    keep.add(f"doubts/{item.id}")
                case e.LeaderPut() | e.LeaderGone():
                    keep.add("leader")
                case e.GenerationPut() | e.GenerationSpoiled():
                    keep.add("generation")
                case e.ProposalPut():
                    keep.add("proposal")
                case _:
                    pass
            self.apply(item, now)
        for id in [id for id in self.tombs if f"tombs/{id}" not in keep]:
            self._unbury(id)
        for id in [id for id in self.doubts if f"doubts/{id}" not in keep]:
            del self.doubts[id], self.doubts_at[id]
        if "leader" not in keep:
            self.leader, self.token = None, 0
        if "generation" not in keep and self.generation is not None and self.outdated is None:
            self.generation_revision, self.spoiled = 0, True
        if "proposal" not in keep:
            self._propose(None)
        self.listed = True

    def _without_the_past(self, event: e.Listed, now: float) -> e.Listed:
        """Return a listing of a rolled back etcd without the records that had been replaced before the rollback.

        The leader writes the generation that it knows over an older one. An end beside an older generation was an
        earlier job's.
        """
        known = self.generation
        past = next((item for item in event.items if isinstance(item, e.GenerationPut)), None)
        if known is None or past is None or past.generation.number > known.number or past.generation == known:
            return event
        self.generation_revision, self.spoiled = past.revision, True
        self.outdated = now if self.outdated is None else self.outdated
        self._revisions["generation"] = past.revision
        items: list[e.OfRoster | e.OfBoard] = []
        for item in event.items:
            if isinstance(item, e.EndPut):
                items.append(e.Garbage(key=keys.END, revision=item.revision))
            elif item is not past:
                items.append(item)
        return replace(event, items=tuple(items))
