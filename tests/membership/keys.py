"""A key-value store that is always consistent: the etcd of a story."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic3d.etcd import Delete, KeyValue, Put
from elastic3d.etcd.operations import CompareTarget
from elastic3d.membership.transactions import Transaction


@dataclass(frozen=True)
class Changed:
    """One key after a transaction; None: it is gone."""

    key: str
    item: KeyValue | None
    revision: int


@dataclass
class Keys:
    """All keys, with their leases."""

    revision: int = 1
    items: dict[str, KeyValue] = field(default_factory=dict)

    def transact(self, transaction: Transaction) -> list[Changed] | None:
        """Run the operations if all conditions hold; return what changed, None if they do not hold."""
        for condition in transaction.conditions:
            item = self.items.get(condition.key)
            values = {
                CompareTarget.MOD_REVISION: item.mod_revision if item else 0,
                CompareTarget.CREATE_REVISION: item.create_revision if item else 0,
            }[condition.target]
            if values != condition.expected:
                return None
        changed = []
        for operation in transaction.operations:
            if isinstance(operation, Put):
                changed.append(self._put(operation))
            elif isinstance(operation, Delete):
                changed += self._delete(operation.key, prefix=operation.prefix)
        if changed:
            self.revision += 1
        return changed

    def end(self, lease: int) -> list[Changed]:
        """Delete all keys of a lease."""
        keys = [key for key, item in self.items.items() if item.lease == lease]
        changed = [gone for key in keys for gone in self._delete(key, prefix=False)]
        if changed:
            self.revision += 1
        return changed

    def _put(self, put: Put) -> Changed:
        at, old = self.revision + 1, self.items.get(put.key)
        item = KeyValue(
            key=put.key,
            value=put.value,
            create_revision=old.create_revision if old else at,
            mod_revision=at,
            version=old.version + 1 if old else 1,
            lease=put.lease,
        )
        self.items[put.key] = item
        return Changed(key=put.key, item=item, revision=at)

    def _delete(self, key: str, *, prefix: bool) -> list[Changed]:
        keys = [k for k in self.items if k.startswith(key)] if prefix else [key] * (key in self.items)
        for one in keys:
            del self.items[one]
        return [Changed(key=one, item=None, revision=self.revision + 1) for one in keys]
