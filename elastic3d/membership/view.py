"""What a member knows of the job: the latest of each record, as the watch delivered them.

Events may come twice (the answer to an own write, then its echo in the watch) and a listing may be older than an event
already heard; each record therefore keeps its revision, and only newer ones count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic3d.membership import events as e
from elastic3d.membership.records import Claim, End, MemberRecord, Proposal, Report, Tomb
from elastic3d.values import Generation, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """A registered member; `order` says who came first."""

    record: MemberRecord
    order: int

    @property
    def node(self) -> Node:
        """The node itself."""
        return self.record.node


@dataclass(slots=True)
class View:
    """The job as known here. Changed only by `apply`."""

    members: dict[str, Present] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    tombs: dict[str, Tomb] = field(default_factory=dict)
    leader: Claim | None = None
    token: int = 0
    generation: Generation | None = None
    generation_revision: int = 0
    proposal: Proposal | None = None
    end: End | None = None
    listed: bool = False
    newest_join: float = 0.0
    _revisions: dict[str, int] = field(default_factory=dict)

    def apply(self, event: e.Event, now: float) -> None:
        """Take in one event of the watch; other events are none of the view's business."""
        match event:
            case e.Listed():
                self._list(event, now)
            case e.MemberPut() if self._newer(f"members/{event.record.node.name}", event.revision):
                known = self.members.get(event.record.node.name)
                if known is None or known.node.incarnation != event.record.node.incarnation:
                    self.newest_join = now
                self.members[event.record.node.name] = Present(record=event.record, order=event.order)
            case e.MemberGone() if self._newer(f"members/{event.name}", event.revision):
                self.members.pop(event.name, None)
                self.reports.pop(event.name, None)
            case e.ReportPut() if self._newer(f"reports/{event.name}", event.revision):
                self.reports[event.name] = event.report
            case e.TombPut() if self._newer(f"tombs/{event.name}", event.revision):
                self.tombs[event.name] = event.tomb
            case e.LeaderPut() if self._newer("leader", event.revision):
                self.leader, self.token = event.claim, event.revision
            case e.LeaderGone() if self._newer("leader", event.revision):
                self.leader, self.token = None, 0
            case e.GenerationPut() if self._newer("generation", event.revision):
                self.generation, self.generation_revision = event.generation, event.revision
            case e.ProposalPut() if self._newer("proposal", event.revision):
                self.proposal = event.proposal
            case e.ProposalGone() if self._newer("proposal", event.revision):
                self.proposal = None
            case e.EndPut() if self._newer("end", event.revision):
                self.end = event.end
            case _:
                pass

    def revision(self, key: str) -> int:
        """Return the newest revision heard of a key below the run's root, 0 for none."""
        return self._revisions.get(key, 0)

    def _newer(self, key: str, revision: int) -> bool:
        if revision <= self._revisions.get(key, 0):
            return False
        self._revisions[key] = revision
        return True

    def _list(self, event: e.Listed, now: float) -> None:
        newer = {key: revision for key, revision in self._revisions.items() if revision > event.revision}
        there: set[str] = set()
        for item in event.items:
            match item:
                case e.MemberPut():
                    there.add(f"members/{item.record.node.name}")
                case e.ReportPut() | e.TombPut():
                    there.add(("reports/" if isinstance(item, e.ReportPut) else "tombs/") + item.name)
                case e.LeaderPut():
                    there.add("leader")
                case e.ProposalPut():
                    there.add("proposal")
                case _:
                    pass
            self.apply(item, now)
        keep = there | newer.keys()
        for kind, known in (("members/", self.members), ("reports/", self.reports), ("tombs/", self.tombs)):
            for name in [name for name in known if kind + name not in keep]:
                del known[name]
        if "leader" not in keep:
            self.leader, self.token = None, 0
        if "proposal" not in keep:
            self.proposal = None
        self.listed = True

    def is_out(self, node: Node) -> bool:
        """Return whether this incarnation is known to be gone for good."""
        tomb = self.tombs.get(node.name)
        if tomb is not None and tomb.incarnation == node.incarnation:
            return True
        present = self.members.get(node.name)
        return present is not None and present.node.incarnation != node.incarnation

    def is_registered(self, node: Node) -> bool:
        """Return whether this very incarnation stands in etcd."""
        present = self.members.get(node.name)
        return present is not None and present.node.incarnation == node.incarnation

    def report(self, node: Node) -> Report | None:
        """Return the report of this very incarnation."""
        report = self.reports.get(node.name)
        return report if report is not None and report.incarnation == node.incarnation else None

    def active(self, name: str, incarnation: str) -> bool:
        """Return whether the node trains in the sealed generation."""
        return self.generation is not None and self.generation.first_rank(name, incarnation) is not None

    def broken(self) -> str:
        """Return why the sealed generation cannot go on, "" while it can: an active node of it is out."""
        if self.generation is None:
            return ""
        return next((node.name for node in self.generation.nodes if self.is_out(node)), "")
