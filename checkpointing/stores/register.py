"""For stores without conditional writes: another place decides, the store holds the bytes.

A register is something small that can compare and swap: an etcd, or another store. It holds refs whole. Of a record,
which only one of several writers may create, it holds the digest; the bytes are first put under a name that no other
writer uses (`claims/...`), then the register decides, then they are put under their own name. A writer that dies in
between leaves what the next reader or writer needs to finish. Objects under their own names are for readers without the
register: they are whole too, but refs may be some moments old. If a ref there is newer than the register's, that one
was restored from a backup, and the ref there counts (`checkpointing.reading.naming`). All other objects have names that
no other writer uses, and go only to the store: a register grows with the checkpoints that are kept, not with ranks and
saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from checkpointing.errors import StoreError, StoreNotFound, StoreUnfit
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest
from checkpointing.stores.protocol import Data, Entry, Store, Versioned, check_name

_CLAIM = b"claim "  # and the digest of the bytes
_WHOLE = b"whole "  # and the bytes
LARGEST = 1 << 20  # of a value in a register: etcd accepts 1.5 MiB
_PUBLISHED = 8


class Register(Protocol):
    """A few small values by name, decided in one place. Safe to use from several threads.

    An operation that raises StoreError may still have happened.
    """

    def read(self, name: str) -> Versioned | None:
        """Return a value and its token, as of now; None if there is none."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Set a value; False if there was one."""
        ...

    def swap(self, name: str, expected: str, data: bytes) -> bool:
        """Replace a value if its token is `expected`; False if it is not."""
        ...

    def delete(self, name: str) -> None:
        """Remove a value; nothing happens if there is none."""
        ...


class StoreRegister:
    """A register in a store with conditional writes, such as a shared directory, for a store without them."""

    def __init__(self, store: Store) -> None:
        """Keep values as objects of `store`; nothing else should be in it."""
        self._store = store

    def read(self, name: str) -> Versioned | None:
        """Return a value and its token; None if there is none."""
        return self._store.read(name)

    def create(self, name: str, data: bytes) -> bool:
        """Set a value; False if there was one."""
        return self._store.put_if_absent(name, data)

    def swap(self, name: str, expected: str, data: bytes) -> bool:
        """Replace a value if its token is `expected`."""
        return self._store.compare_and_swap(name, expected, data)

    def delete(self, name: str) -> None:
        """Remove a value."""
        self._store.delete(name)


class RegisteredStore:
    """A store whose conditional writes are decided in a register.

    Every writer must be given the same register; one that has none would not be fenced.
    """

    decides_creations = False

    def __init__(self, store: Store, register: Register) -> None:
        """Wrap `store`, which needs only whole writes, reads, listings and deletions."""
        self._store = store
        self._register = register

    @property
    def url(self) -> str:
        """The place, for messages."""
        return self._store.url

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object, of the version in the store."""
        try:
            return self._store.get(name, start, stop)
        except StoreNotFound:
            versioned = self.read(name)
            if versioned is None:
                raise
            return versioned.data[start : max(start, stop) if stop is not None else None]

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token, from the register, or from the store if the register does not know it.

        StoreUnfit for a ref that the register does not know: another one has decided it, or none.
        """
        check_name(name)
        decided = self._register.read(name)
        if decided is None:
            try:
                data = self._store.get(name)
            except StoreNotFound:
                return None
            if not name.startswith(names.REFS):
                # Written without a condition: the token is that of the bytes, and only good for comparing.
                return Versioned(data=data, token=f"bytes {hexdigest(data)}")
            decided = self._register.read(name)  # it may have been decided just now
            if decided is None:
                raise self._foreign(name)
        if decided.data.startswith(_WHOLE):
            return Versioned(data=decided.data[len(_WHOLE) :], token=decided.token)
        return Versioned(data=self._claimed(name, decided.data[len(_CLAIM) :].decode()), token=decided.token)

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        try:
            return self._store.size(name)
        except StoreNotFound:
            versioned = self.read(name)
            if versioned is None:
                raise
            return len(versioned.data)

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object that needs no decision, such as a pack."""
        self._store.put(name, data, check=check)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object; False if one was there. Names that no other writer uses do not go to the register."""
        check_name(name)
        with contextlib.suppress(StoreNotFound):
            # Also where the register does not know it any more: what was decided once is never written over.
            self._store.size(name)
            return False
        if _is_unique(name):
            self._store.put(name, data)
            return True
        digest = hexdigest(data)
        aside = _aside(name, digest)
        self._store.put(aside, data)
        created = self._register.create(name, _CLAIM + digest.encode())
        if not created:
            decided = self._register.read(name)
            if decided is None or decided.data != _CLAIM + digest.encode():
                self._store.delete(aside)
                return False
        # Ours, or the same bytes: finish whatever may have been left undone.
        self._store.put(name, data)
        self._store.delete(aside)
        return created

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object if its token is `expected`; StoreError if it is too large for a register."""
        check_name(name)
        if len(data) > LARGEST:
            raise StoreError(
                f"store {self.url}: {name} would have {len(data)} bytes, and a register holds at most {LARGEST}: "
                "collect garbage, so that fewer checkpoints are listed"
            )
        whole = _WHOLE + data
        register = self._register
        done = register.create(name, whole) if expected is None else register.swap(name, expected, whole)
        if done:
            # It is decided; readers without the register may see it late, which is no failure. Where the place stays
            # away for longer than `open_store` is patient, the next swap brings it.
            with contextlib.suppress(StoreError):
                self._publish(name, data)
        return done

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, sorted."""
        return self._store.list(prefix)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects whose names begin with `prefix`, sorted by name."""
        return self._store.entries(prefix)

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        check_name(name)
        # Only older versions have put parts of the history, tombstones and manifests into registers.
        unknown = names.parse_pack(name) or names.manifest_write_id(name)
        decided = None if unknown else self._register.read(name)
        claimed = decided is not None and decided.data.startswith(_CLAIM)
        if claimed:
            # Before the bytes: whoever dies in between must not leave a claim on bytes that are gone.
            self._register.delete(name)
        self._store.delete(name)
        if decided is not None and claimed:
            self._store.delete(_aside(name, decided.data[len(_CLAIM) :].decode()))
        elif decided is not None:
            self._register.delete(name)

    def _claimed(self, name: str, digest: str) -> bytes:
        """Return the bytes that were decided on, and put them under their own name, where readers look for them."""
        # Its own name twice: a creator puts them there before it removes the claim.
        for place in (name, _aside(name, digest), name):
            with contextlib.suppress(StoreNotFound):
                data = self._store.get(place)
                if hexdigest(data) == digest:
                    if place != name:
                        self._store.put(name, data)
                    return data
        raise StoreError(f"store {self.url}: {name} is in the register, and its bytes are not in the store")

    def _foreign(self, name: str) -> StoreUnfit:
        return StoreUnfit(
            f"store {self.url}: {name} is there, and the register does not know it: another register has decided it, "
            "or none, and who writes by that would not be fenced. Give the register that all its writers have had; if "
            "that is lost, write to a new place, into which `elastic3d ckpt export` and `import` bring a checkpoint"
        )

    def _publish(self, name: str, data: bytes) -> None:
        """Put decided bytes where readers without the register look, until the newest are there."""
        for _ in range(_PUBLISHED):
            self._store.put(name, data)
            decided = self._register.read(name)
            if decided is None or decided.data == _WHOLE + data:
                return
            data = decided.data[len(_WHOLE) :]


def _is_unique(name: str) -> bool:
    """Return whether only one writer ever uses a name, always for the same bytes."""
    return bool(names.manifest_write_id(name)) or names.is_history(name) or names.is_tombstone(name)


def _aside(name: str, digest: str) -> str:
    return f"{names.CLAIMS}{hexdigest(f'{name} {digest}'.encode())}"
