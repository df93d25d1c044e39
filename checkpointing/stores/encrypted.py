"""Objects encrypted before they leave this machine (format.md, section 12).

AES-256-GCM over chunks of 64 KiB, so that any range can be read by itself. Every object has a key of its own, derived
from the user's and its name; each chunk is bound to the name, its number, and whether it is the last. A store can
therefore lose or roll back whole objects, which digests detect, but not change, swap, cut or mix them. Sizes stay
visible, and so do names except those of packs: a pack's id follows from its contents, so that anybody who knows or
guesses them would see that they are there. The id is encrypted deterministically (AES-SIV, RFC 5297), so that a listing
can be read back. Packs that were written before that have their ids as names, and are still read. Tokens are those of
the store below.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV

from checkpointing.errors import StoreNotFound, Tampered, WrongKey
from checkpointing.format import names
from checkpointing.format.encoding import SEALED, SEALED_BEFORE, SEALED_CHUNK
from checkpointing.format.pack import HEAD
from checkpointing.stores.keys import Key
from checkpointing.stores.protocol import Data, Entry, Store, Versioned, check_name, chunks, decides_creations

_T = TypeVar("_T")

CHUNK = SEALED_CHUNK
_HEAD = len(SEALED) + 8  # the magic, the key's id
_HIDDEN = re.compile(r"packs/[0-9a-f]{2}/([0-9a-f]{96})\.pack")
_PLAIN = (zstandard.FRAME_HEADER, HEAD)
"""What objects begin with that are not encrypted: documents, in zstd frames, and packs."""
_OF_ALL = (names.REFS, names.CHECKPOINTS, names.SAVES, names.PACKS)
"""Where objects lie that whoever opens a store has not all written itself, with whatever key."""
_NONCE = 12
_STORED = _NONCE + CHUNK + 16
_BATCH = 16  # chunks passed on at once


class EncryptedStore:
    """A store whose objects only the holder of a key can read or write."""

    def __init__(self, store: Store, key: Key) -> None:
        """Wrap `store`, all of whose objects are or will be encrypted with `key`."""
        self._store = store
        self.decides_creations = decides_creations(store)
        self._key = key
        self._fits = False
        self._pack_names = AESSIV(key.for_pack_names())
        self._cipher: Callable[[str], _Sealer] = functools.lru_cache(maxsize=256)(lambda name: _Sealer(key, name))

    @property
    def url(self) -> str:
        """The place, for messages."""
        return self._store.url

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object; Tampered or WrongKey if they cannot be decrypted."""
        if start == 0 and stop is None:
            return self._open(name, self._fetch(name))
        if stop is not None and stop <= start:
            return self._fetch(name, start, start)
        if stop is None:
            stored = self._fetch(name, _place(start // CHUNK))
            return self._open_chunks(name, stored, start // CHUNK, whole=True)[start % CHUNK :]
        return self._open_range(name, self._fetch(name, *_around(start, stop)), start, stop)

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token, None if it is not there."""
        versioned = self._store.read(name)
        if versioned is None:
            return None
        try:
            return Versioned(data=self._open(name, versioned.data), token=versioned.token)
        except Tampered as error:
            error.token = versioned.token
            raise

    def size(self, name: str) -> int:
        """Return an object's size when decrypted."""
        return _plain_size(self._either(name, self._store.size))

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object; with `check`, the encrypted bytes are compared."""
        check_name(name)
        sealed = _Sealed(self._cipher(name), data)
        # Data that can be read only once must look so, or the store below would try to send it again.
        self._store.put(self._at(name), iter(sealed) if isinstance(data, Iterator) else sealed, check=check)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object; False if one was there."""
        check_name(name)
        return self._store.put_if_absent(self._at(name), self._seal(name, data))

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object if its token is `expected`."""
        check_name(name)
        return self._store.compare_and_swap(self._at(name), expected, self._seal(name, data))

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, sorted."""
        for entry in self.entries(prefix):
            yield entry.name

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects whose names begin with `prefix`, sorted by name."""
        # Pack names are encrypted below, so all of them are listed.
        below = names.PACKS if prefix.startswith(names.PACKS) else prefix
        entries: dict[str, Entry] = {}
        for entry in self._store.entries(below):
            name = self._name_of(entry.name)
            if name.startswith(prefix):
                entries[name] = Entry(name=name, size=_plain_size(entry.size), modified=entry.modified)
        for name in sorted(entries):
            yield entries[name]

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        for place in dict.fromkeys((self._at(name), name)):
            self._store.delete(place)

    def _at(self, name: str) -> str:
        """Return the name under which an object is stored."""
        pack = names.parse_pack(name)
        if pack is None:
            return name
        hidden = self._pack_names.encrypt(bytes.fromhex(pack), None).hex()
        return f"{names.PACKS}{hidden[:2]}/{hidden}.pack"

    def _name_of(self, stored: str) -> str:
        """Return an object's name from its stored name; names that this key did not make stay as they are."""
        match = _HIDDEN.fullmatch(stored)
        if match is None:
            return stored
        try:
            return names.pack(self._pack_names.decrypt(bytes.fromhex(match[1]), None).hex())
        except InvalidTag:
            return stored

    def _fetch(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._either(name, lambda place: self._store.get(place, start, stop))

    def _either(self, name: str, ask: Callable[[str], _T]) -> _T:
        """Ask for an object under its present name, and then under the one it had in older stores."""
        place = self._at(name)
        if place != name:
            with contextlib.suppress(StoreNotFound):
                return ask(place)
        return ask(name)

    def _seal(self, name: str, data: bytes) -> bytes:
        return b"".join(_Sealed(self._cipher(name), data))

    def _open(self, name: str, stored: bytes) -> bytes:
        self._check_head(name, stored[:_HEAD])
        return self._open_chunks(name, memoryview(stored)[_HEAD:], 0, whole=True)

    def _check_head(self, name: str, head: bytes) -> None:
        """Raise WrongKey where an object is another key's, or plain; Tampered where its first bytes are damaged.

        Once an object has been opened that others have written as well, the key is the store's: what looks like another
        one's is damage then.
        """
        if head in (SEALED + self._key.id, SEALED_BEFORE + self._key.id):
            return
        where = f"store {self.url}: {name}"
        if head[: len(SEALED)] in (SEALED, SEALED_BEFORE) and len(head) == _HEAD and not self._fits:
            raise WrongKey(
                f"{where} is encrypted with the key {head[len(SEALED) :].hex()}, and {self._key.id.hex()} was given: "
                "give that key"
            )
        if head.startswith(_PLAIN) and not self._fits:
            raise WrongKey(
                f"{where} is not encrypted. A key was given: open the store without one, or give a new place to what "
                "is to be encrypted."
            )
        raise Tampered(f"{where}: its first bytes are not as they were written. Restore from elsewhere.")

    def _open_range(self, name: str, stored: bytes, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), from the chunks that hold them."""
        first, last = start // CHUNK, (stop - 1) // CHUNK + 1
        ends_early = len(stored) <= (last - first - 1) * _STORED
        plain = self._open_chunks(name, stored, first, whole=ends_early)
        return plain[start - first * CHUNK : stop - first * CHUNK]

    def _open_chunks(self, name: str, stored: bytes | memoryview, first: int, *, whole: bool) -> bytes:
        """Return the bytes of chunks `first`, ...; with `whole`, `stored` must end with the object's last chunk."""
        sealer, view = self._cipher(name), memoryview(stored)
        plain = []
        for number, offset in enumerate(range(0, len(stored), _STORED), first):
            piece = view[offset : offset + _STORED]
            at_end = offset + _STORED >= len(stored)
            # A piece shorter than a chunk, or than was asked for, must be the end; any other may be.
            final = (True,) if at_end and (whole or len(piece) < _STORED) else (False, True) if at_end else (False,)
            opened = next((out for flag in final if (out := sealer.open(piece, number, flag)) is not None), None)
            if opened is None:
                self._check_head(name, self._fetch(name, 0, _HEAD))
                raise Tampered(
                    f"store {self.url}: {name}: bytes from {number * CHUNK} on are not as they were sealed under this "
                    "name: the object is damaged, cut short or another one's. Restore from elsewhere."
                )
            plain.append(opened)
            self._fits = self._fits or name.startswith(_OF_ALL)
        if whole and not plain and first == 0:
            raise Tampered(f"store {self.url}: {name}: is cut short. Restore from elsewhere.")
        return plain[0] if len(plain) == 1 else b"".join(plain)


class _Sealer:
    """The cipher of one object."""

    __slots__ = ("_cipher", "_name", "head")

    def __init__(self, key: Key, name: str) -> None:
        self._cipher = AESGCM(key.for_object(name))
        self._name = name.encode()
        self.head = SEALED + key.id

    def seal(self, plain: bytes | memoryview, number: int, final: bool) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, plain, self._bound(number, final))

    def open(self, stored: memoryview, number: int, final: bool) -> bytes | None:
        if len(stored) < _NONCE + 16:
            return None
        try:
            return self._cipher.decrypt(stored[:_NONCE], stored[_NONCE:], self._bound(number, final))
        except InvalidTag:
            return None

    def _bound(self, number: int, final: bool) -> bytes:
        return SEALED_BEFORE + number.to_bytes(8, "little") + bytes([final]) + self._name


class _Sealed:
    """Encrypted data, a MiB at a time. Iterating it again encrypts it again, with other nonces."""

    def __init__(self, sealer: _Sealer, data: Data) -> None:
        self._sealer, self._data = sealer, data

    def __iter__(self) -> Iterator[bytes]:
        batch = [self._sealer.head]
        for number, (piece, final) in enumerate(_cut(self._data)):
            batch.append(self._sealer.seal(piece, number, final))
            if len(batch) >= _BATCH or final:
                yield b"".join(batch)
                batch = []


def _cut(data: Data) -> Iterator[tuple[bytes | memoryview, bool]]:
    """Yield the data in pieces of CHUNK bytes, the last one shorter or empty, and whether it is the last.

    The end of each chunk is copied, since it may be the last piece, and its producer may reuse its memory.
    """
    held = bytearray()
    for chunk in chunks(data):
        room = CHUNK - len(held)
        held += chunk[:room]
        rest = chunk[room:]
        if not rest.nbytes:
            continue
        yield bytes(held), False
        whole = (rest.nbytes - 1) // CHUNK * CHUNK
        for offset in range(0, whole, CHUNK):
            yield rest[offset : offset + CHUNK], False
        held = bytearray(rest[whole:])
    yield bytes(held), True


def _plain_size(stored: int) -> int:
    body = max(0, stored - _HEAD)
    count = -(-body // _STORED)
    return max(0, body - count * (_NONCE + 16))


def _around(start: int, stop: int) -> tuple[int, int]:
    """Return where the chunks that hold [start, stop) are stored."""
    return _place(start // CHUNK), _place(-(-stop // CHUNK))


def _place(number: int) -> int:
    return _HEAD + number * _STORED
