"""Refs decided in etcd, for stores that have no conditional writes.

`checkpointing` asks for a register: a few small values under names, decided in one place. Here they are keys of the
cluster that decides the job's membership, and each change is one transaction on a key's revision. They stay when the
job is over, as the store does; collection deletes those of the checkpoints that it deletes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from checkpointing.errors import StoreError
from checkpointing.format.encoding import hexdigest
from checkpointing.stores.protocol import Versioned
from elastic3d.errors import EtcdError
from elastic3d.etcd import Compare, EtcdClient, Put


class EtcdRegister:
    """See checkpointing/stores/register.py. Safe to use from several threads; owns its client."""

    def __init__(self, client: EtcdClient, prefix: str, url: str) -> None:
        """Keep the values of the store at `url` below `prefix`: all runs that write there share them."""
        self._client = client
        self._root = f"{prefix}/stores/{hexdigest(url.rstrip('/').encode())[:32]}/"

    def read(self, name: str) -> Versioned | None:
        """Return a value and its token, as the cluster has it now; None if there is none."""
        with self._errors("read", name):
            entry = self._client.get(self._root + name)
        return None if entry is None else Versioned(data=entry.value, token=str(entry.mod_revision))

    def create(self, name: str, data: bytes) -> bool:
        """Set a value; False if there was one."""
        key = self._root + name
        with self._errors("create", name):
            return self._client.txn([Compare.absent(key)], [Put(key, data)]).succeeded

    def swap(self, name: str, expected: str, data: bytes) -> bool:
        """Replace a value if its token is `expected`; False if it is not."""
        if not expected.isdecimal() or not int(expected):
            return False  # the token of an object that the register does not know
        key = self._root + name
        with self._errors("swap", name):
            return self._client.txn([Compare.mod_revision(key, int(expected))], [Put(key, data)]).succeeded

    def delete(self, name: str) -> None:
        """Remove a value; nothing happens if there is none."""
        with self._errors("delete", name):
            self._client.delete(self._root + name, idempotent=True)

    def close(self) -> None:
        """Close the client."""
        self._client.close()

    @contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except EtcdError as error:
            # Whether a write happened may be unknown: callers read back, as they do with any store.
            raise StoreError(f"register in etcd: cannot {verb} {name}: {error}") from error
