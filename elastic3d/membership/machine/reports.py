"""What all members report, and which members report the same: kept up to date with each report."""

from __future__ import annotations

from typing import TypeVar

from elastic3d.membership.records import Notice, Report, SavedStep

K = TypeVar("K")

FIELDS = ("prepared", "left", "finished", "failed", "error", "peer_lost", "unread")
"""The fields of a report that name a generation's key, or the revision of its record."""


class Reports:
    """The newest report of each member, by id.

    accusing: members that do not hear a neighbour. apart: members that cannot connect to some node. returning: members
    that say, of whatever generation, that the run has to go back. saved: how many report each saved step. notices: of
    members that have to leave soon, and since when each is known here.
    """

    def __init__(self) -> None:
        self.accusing: dict[str, None] = {}
        self.apart: dict[str, None] = {}
        self.returning: dict[str, None] = {}
        self.saved: dict[SavedStep, int] = {}
        self.notices: dict[str, tuple[Notice, float]] = {}
        self._reports: dict[str, Report] = {}
        self._said: dict[tuple[str, str], dict[str, None]] = {}

    def get(self, id: str) -> Report | None:
        """Return the member's newest report."""
        return self._reports.get(id)

    def __getitem__(self, id: str) -> Report:
        return self._reports[id]

    def ids(self) -> tuple[str, ...]:
        """Return the ids that reported anything."""
        return tuple(self._reports)

    def who(self, field: str, key: str) -> dict[str, None]:
        """Return the ids that report `key` in `field`, one of `FIELDS`."""
        return self._said.get((field, key), {})

    def step(self) -> int:
        """Return the newest step that anybody made, 0 for none."""
        return max((report.step for report in self._reports.values()), default=0)

    def safe(self) -> int:
        """Return the newest step that anybody knows to be held by all ranks, 0 for none."""
        return max((report.safe for report in self._reports.values()), default=0)

    def hear(self, id: str, report: Report, now: float) -> bool:
        """Take in a report; return whether its notice is news."""
        old = self._reports.get(id) or Report(incarnation=report.incarnation)
        self._reports[id] = report
        if old is report:
            return False
        for field in FIELDS:
            before, after = getattr(old, field), getattr(report, field)
            if before != after:
                if before:
                    discard(self._said, (field, before), id)
                if after:
                    self._said.setdefault((field, after), {})[id] = None
        if old.saved != report.saved:
            self._save(old.saved, -1)
            self._save(report.saved, 1)
        _put(self.accusing, id, bool(report.silent))
        _put(self.apart, id, bool(report.unreachable))
        _put(self.returning, id, bool(report.goes_back))
        if old.notice == report.notice:
            return False
        if report.notice is None:
            del self.notices[id]
        else:
            self.notices[id] = (report.notice, now)
        return True

    def forget(self, id: str, now: float) -> bool:
        """Take in that a member's report is gone; return whether a notice went with it."""
        report = self._reports.get(id)
        if report is None:
            return False
        news = self.hear(id, Report(incarnation=report.incarnation), now)
        del self._reports[id]
        return news

    def _save(self, saved: SavedStep | None, count: int) -> None:
        if saved is not None:
            left = self.saved.get(saved, 0) + count
            if left:
                self.saved[saved] = left
            else:
                del self.saved[saved]


def _put(known: dict[str, None], id: str, belongs: bool) -> None:
    if belongs:
        known[id] = None
    else:
        known.pop(id, None)


def discard(known: dict[K, dict[str, None]], key: K, id: str) -> None:
    """Take `id` out of the set under `key`, and an empty set with it."""
    held = known.get(key)
    if held is not None:
        held.pop(id, None)
        if not held:
            del known[key]
