"""What a simulated etcd holds: keys, their history by revision, and leases. Pure: no time, no randomness."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from elastic3d import etcd_keys as keys
from elastic3d.etcd import Compare, Delete, Get, KeyValue, Put
from elastic3d.etcd.operations import CompareTarget
from elastic3d.membership import events as e
from elastic3d.membership.reading import gone, read
from elastic3d.membership.transactions import Transaction

ROOT = "/elastic3d/simulated/"

FORMED = (ROOT + keys.GENERATION, ROOT + keys.PROPOSAL)
"""Keys of records that may hold only changes."""

LOST_LEASE = 4.0
"""Seconds that a lease which ended after the backup lives again."""


class Change:
    """One key as one revision left it, with its meaning: decoded once for all watchers.

    whole: for a record of the board, the whole record beside it, for readers who do not know its base.
    """

    __slots__ = ("_event", "_read", "item", "key", "revision", "whole")

    def __init__(self, key: str, revision: int, item: KeyValue | None) -> None:
        self.key, self.revision, self.item = key, revision, item
        self.whole: KeyValue | None = None
        self._event: e.OfRoster | e.OfBoard | e.Broken | None = None
        self._read = False

    @property
    def event(self) -> e.OfRoster | e.OfBoard | e.Broken | None:
        """The event that the production reader makes of it."""
        if not self._read:
            self._read = True
            whole = self.whole.value if self.whole is not None else b""
            item = self.item
            self._event = gone(ROOT, self.key, self.revision) if item is None else read(ROOT, item, whole=whole)
        return self._event

    @property
    def size(self) -> int:
        """Bytes of it in an answer."""
        return len(self.key) + 40 + (len(self.item.value) if self.item is not None else 0)


@dataclass(slots=True, eq=False)
class Lease:
    """deadline: when etcd ends it if no keepalive comes, None while they come."""

    id: int
    ttl: float
    granted: float
    deadline: float | None
    keys: dict[str, None] = field(default_factory=dict)
    over: bool = False


class Log:
    """The changes of a tier. A position counts all that there ever were; the oldest may be forgotten."""

    def __init__(self, changes: list[Change]) -> None:
        self._changes, self._forgotten = changes, 0

    def __len__(self) -> int:
        return self._forgotten + len(self._changes)

    def append(self, change: Change) -> None:
        """Add the newest change."""
        self._changes.append(change)

    def between(self, position: int, until: int) -> list[Change]:
        """Return the changes from one position up to another; those that are forgotten are missing."""
        first = self._forgotten
        return self._changes[max(0, position - first) : max(0, until - first)]

    def all(self) -> list[Change]:
        """Return all changes; nothing may be forgotten."""
        assert not self._forgotten
        return self._changes

    def forget(self, revision: int) -> None:
        """Forget the changes up to a revision."""
        count = bisect_right(self._changes, revision, key=lambda change: change.revision)
        del self._changes[:count]
        self._forgotten += count


class Store:
    """The keys and their history. Pure: no time, no randomness."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self.tiers: dict[str, dict[str, Change]] = {}
        self.logs: dict[str, Log] = {}
        self.leases: dict[int, Lease] = {}
        self.history = 0
        self._next_lease = 1

    def get(self, key: str) -> KeyValue | None:
        """Return a key as it is."""
        stored = self.tiers.get(tier_of(key), {}).get(key)
        return stored.item if stored is not None else None

    def all_of(self, tier: str) -> list[Change]:
        """Return all keys of a tier, in order of key as etcd returns them."""
        keys = self.tiers.get(tier, {})
        return [keys[key] for key in sorted(keys)]

    def log(self, tier: str) -> Log:
        """Return the changes of a tier."""
        return self.logs.setdefault(tier, Log([]))

    def holds(self, condition: Compare) -> bool:
        """Return whether a condition holds now."""
        item = self.get(condition.key)
        match condition.target:
            case CompareTarget.MOD_REVISION:
                return (item.mod_revision if item else 0) == condition.expected
            case CompareTarget.CREATE_REVISION:
                return (item.create_revision if item else 0) == condition.expected
            case CompareTarget.VERSION:
                return (item.version if item else 0) == condition.expected
            case CompareTarget.VALUE:
                return item is not None and item.value == condition.expected

    def apply(self, transaction: Transaction) -> list[Change] | None:
        """Run a transaction; return what changed, None if its conditions do not hold."""
        if not all(self.holds(condition) for condition in transaction.conditions):
            return None
        changes: list[Change] = []
        revision = self.revision + 1
        for operation in transaction.operations:
            match operation:
                case Put():
                    changes.append(self._put(operation, revision))
                case Delete(prefix=True):
                    there = self.tiers.get(tier_of(operation.key), {})
                    for key in [key for key in there if key.startswith(operation.key)]:
                        changes += self._delete(key, revision)
                case Delete():
                    changes += self._delete(operation.key, revision)
                case Get():
                    pass
        if changes:
            self.revision = revision
        for change in changes:
            if change.key in FORMED:
                change.whole = self.get(keys.whole(change.key))
        return changes

    def grant(self, ttl: float, now: float) -> Lease:
        """Return a new lease, whose deadline nobody extends yet."""
        lease = Lease(id=self._next_lease, ttl=ttl, granted=now, deadline=now + ttl)
        self._next_lease += 1
        self.leases[lease.id] = lease
        return lease

    def end(self, lease: Lease) -> list[Change]:
        """End a lease; its keys go with it, in one revision."""
        lease.over = True
        self.leases.pop(lease.id, None)
        changes: list[Change] = []
        for key in list(lease.keys):
            changes += self._delete(key, self.revision + 1)
        if changes:
            self.revision += 1
        return changes

    def roll_back(self, revision: int, now: float) -> None:
        """Restore the data of an earlier revision and its leases: those that have ended since expire again."""
        kept, self.tiers = self.logs, {}
        self.logs = {tier: Log([one for one in log.all() if one.revision <= revision]) for tier, log in kept.items()}
        for lease in self.leases.values():
            lease.over = True
            lease.keys.clear()
        alive, self.leases = self.leases, {}
        for tier, log in self.logs.items():
            for change in log.all():
                if change.item is None:
                    self.tiers[tier].pop(change.key, None)
                else:
                    self.tiers.setdefault(tier, {})[change.key] = change
            for change in self.tiers.get(tier, {}).values():
                assert change.item is not None
                if number := change.item.lease:
                    ended = Lease(id=number, ttl=LOST_LEASE, granted=now, deadline=now + LOST_LEASE)
                    lease = self.leases.setdefault(number, alive.get(number, ended))
                    lease.over = False
                    lease.keys[change.key] = None
        self.revision = revision
        self.compacted = min(self.compacted, revision)
        self.history += 1

    def forget(self, revision: int) -> None:
        """Forget the changes up to a revision; the keys stay."""
        for log in self.logs.values():
            log.forget(revision)

    def _put(self, put: Put, revision: int) -> Change:
        tier = self.tiers.setdefault(tier_of(put.key), {})
        known = tier.get(put.key)
        before = known.item if known is not None else None
        if before is not None and before.lease != put.lease and before.lease in self.leases:
            self.leases[before.lease].keys.pop(put.key, None)
        if put.lease:
            self.leases[put.lease].keys[put.key] = None
        item = KeyValue(
            key=put.key,
            value=put.value,
            create_revision=before.create_revision if before else revision,
            mod_revision=revision,
            version=before.version + 1 if before else 1,
            lease=put.lease,
        )
        change = Change(put.key, revision, item)
        tier[put.key] = change
        self.log(tier_of(put.key)).append(change)
        return change

    def _delete(self, key: str, revision: int) -> list[Change]:
        tier = self.tiers.get(tier_of(key), {})
        known = tier.pop(key, None)
        if known is None or known.item is None:
            return []
        if known.item.lease in self.leases:
            self.leases[known.item.lease].keys.pop(key, None)
        change = Change(key, revision, None)
        self.log(tier_of(key)).append(change)
        return [change]


def tier_of(key: str) -> str:
    """Return "board", "roll" and so on: what of the run a key belongs to."""
    return key[len(ROOT) :].partition("/")[0]
