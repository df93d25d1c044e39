"""Converts our values to etcd's messages and back: keys get the namespace on the way out and lose it on the way in."""

from __future__ import annotations

from typing import Any

from elastic3d.etcd import messages
from elastic3d.etcd.operations import Compare, CompareTarget, Delete, Get, KeyValue, Operation, Put

_TARGETS = {
    CompareTarget.VERSION: 0,
    CompareTarget.CREATE_REVISION: 1,
    CompareTarget.MOD_REVISION: 2,
    CompareTarget.VALUE: 3,
}


class Codec:
    """Encode and decode under one namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def key(self, key: str) -> bytes:
        """Return `key` as etcd has it. Keys that others wrote may be any bytes: undecodable ones become surrogates."""
        return (self.namespace + key).encode("utf-8", "surrogateescape")

    def span(self, key: str, *, prefix: bool) -> dict[str, bytes]:
        """Return the fields `key` and `range_end` for one key, or for all that begin with it."""
        first = self.key(key)
        if not prefix:
            return {"key": first}
        return {"key": first or b"\0", "range_end": messages.prefix_end(first)}

    def key_value(self, kv: Any) -> KeyValue:
        """Return the value of a `KeyValue` message."""
        return KeyValue(
            key=kv.key.decode("utf-8", "surrogateescape").removeprefix(self.namespace),
            value=bytes(kv.value),
            create_revision=kv.create_revision,
            mod_revision=kv.mod_revision,
            version=kv.version,
            lease=kv.lease,
        )

    def compare(self, compare: Compare) -> Any:
        """Return the message of a condition."""
        fields: dict[str, Any] = {str(compare.target): compare.expected}
        return messages.new("Compare", target=_TARGETS[compare.target], key=self.key(compare.key), **fields)

    def operation(self, operation: Operation) -> Any:
        """Return the message of an operation within a transaction."""
        match operation:
            case Put(key, value, lease):
                put = messages.new("PutRequest", key=self.key(key), value=value, lease=lease)
                return messages.new("RequestOp", request_put=put)
            case Delete(key, prefix):
                delete = messages.new("DeleteRangeRequest", **self.span(key, prefix=prefix))
                return messages.new("RequestOp", request_delete_range=delete)
            case Get(key, prefix):
                get = messages.new("RangeRequest", **self.span(key, prefix=prefix))
                return messages.new("RequestOp", request_range=get)
