"""How two processes of a run prove to each other that both hold its secret: pure state, no socket and no clock.

    dials    -> hello:  "elastic3d", version, role, its id, the id it means ("" for any), generation, nonce
    answers  -> answer: its id, nonce, proof
    dials    -> proof

Each message is a length of two bytes and its fields, each with a length of two bytes. A proof is BLAKE3, keyed by the
secret, over the side's label and everything said so far, `binding` included: both nonces are fresh, so that a recording
proves nothing, and the labels differ, so that no side's proof can be sent back to it. Each direction gets its own key
for what follows. Until then a side takes at most `LIMIT` bytes; the owner of the socket decides how long it waits.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from blake3 import blake3

from elastic3d.trust.credentials import Credentials

LIMIT = 1024
"""Most bytes that a side takes from the other before that has proved that it is of the run."""

SECONDS = 2.0
"""Seconds within which a side that was dialled wants the proof."""

EVERY_NODE = "give cert= and key= to every node of the run, or to none"
"""What to do if one side encrypts and the other does not."""

ALERT = b"\x15\x03\x03\x00\x02\x02\x28"
"""TLS's alert to a side with which it cannot agree, sent in the clear. Sides that encrypt understand it, ours too."""

_MAGIC = b"elastic3d"
_VERSION = b"4"
_TLS_HANDSHAKE, _TLS_ALERT = 0x16, 0x15
"""First bytes of a side that encrypts. No message of ours begins with them: it would be too long."""

_NONCE_BYTES = 32
_PROOF_BYTES = 32


class PortRole(StrEnum):
    """The purpose of a port. A proof for one kind of port does not count for another."""

    TILES = "tiles"
    LINK = "link"
    TABLE = "table"
    SLOT = "slot"


class HandshakeRejected(Exception):
    """The other side is not of this run, or sends nonsense.

    foreign: it does not speak this protocol at all. farewell: bytes that tell it why, sent in the clear before hanging
    up.
    """

    def __init__(self, reason: str, *, foreign: bool = False, farewell: bytes = b"") -> None:
        super().__init__(reason)
        self.foreign, self.farewell = foreign, farewell


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The key for this side's frames, and the one for the other side's."""

    send: bytes = field(repr=False)
    receive: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The other end, which has proved that it holds the secret.

    id: its own, as it says. meant: the id it wants to reach, "" for any or if this side dialled. generation: the one it
    speaks of, 0 for none. rest: bytes that already followed the handshake.
    """

    id: str
    keys: Keys
    meant: str = ""
    generation: int = 0
    rest: bytes = field(default=b"", repr=False)


class Dialling:
    """The side that dials: send `hello`, feed what arrives, send what `feed` returns; `peer` is there when it is over.

    binding: what else both sides must agree on, such as the certificate of an encrypted connection.
    """

    def __init__(
        self,
        credentials: Credentials,
        role: PortRole,
        *,
        meant: str = "",
        generation: int = 0,
        binding: bytes = b"",
        nonce: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._secret = credentials.secret_bytes
        self._binding, self._received = binding, b""
        number = generation.to_bytes(8, "big")
        said = (_MAGIC, _VERSION, role.encode(), _text(credentials.id), _text(meant), number, nonce(_NONCE_BYTES))
        self.hello = _pack(*said)
        self.peer: Peer | None = None
        if len(self.hello) > LIMIT:
            raise ValueError(f"{credentials.id} and {meant} are too long for a handshake")

    def bind(self, binding: bytes) -> None:
        """Set `binding`, if it is known only once the connection is established."""
        self._binding = binding

    def feed(self, data: bytes) -> bytes:
        """Take in what arrived; return what to send, nothing until the answer is complete. HandshakeRejected."""
        assert self.peer is None
        self._received += data
        if self._received[:1] == bytes([_TLS_ALERT]):
            raise HandshakeRejected(f"encrypts its connections, and this node does not: {EVERY_NODE}")
        taken = _take(self._received)
        if taken is None:
            return b""
        fields, rest = taken
        if len(fields) != 5 or fields[0] != _MAGIC:
            raise HandshakeRejected("does not speak elastic3d's protocol", foreign=True)
        if fields[1] != _VERSION:
            raise HandshakeRejected(
                "speaks another version of elastic3d's protocol; all nodes of a run need the same elastic3d"
            )
        _, _, id, nonce, proof = fields
        said = _transcript(self.hello, id, nonce, self._binding)
        if len(nonce) != _NONCE_BYTES or not hmac.compare_digest(proof, _keyed(self._secret, b"answers", said)):
            raise HandshakeRejected("does not hold this run's secret")
        keys = Keys(send=_keyed(self._secret, b"to answers", said), receive=_keyed(self._secret, b"to dials", said))
        self.peer = Peer(id=_read(id), keys=keys, rest=rest)
        return _pack(_keyed(self._secret, b"dials", said))


class Answering:
    """The side that was dialled: feed what arrives, send what `feed` returns; `peer` is there when it is over."""

    def __init__(
        self,
        credentials: Credentials,
        role: PortRole,
        *,
        binding: bytes = b"",
        nonce: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._credentials, self._role, self._binding, self._nonce = credentials, role, binding, nonce
        self._received = b""
        self._taken = 0
        self._hello: list[bytes] | None = None
        self._said = b""
        self.peer: Peer | None = None

    @property
    def untouched(self) -> bool:
        """Whether nothing arrived: somebody only checked whether the port is open."""
        return self._taken == 0

    def feed(self, data: bytes) -> bytes:
        """Take in what arrived; return what to send, if anything. HandshakeRejected."""
        assert self.peer is None
        self._received += data
        self._taken += len(data)
        answer = b""
        if self._hello is None:
            answer = self._greeted()
            if not answer:
                return b""
        self._proved()
        return answer

    def _greeted(self) -> bytes:
        if self._received[:1] == bytes([_TLS_HANDSHAKE]):
            reason = f"encrypts its connections, and this node does not: {EVERY_NODE}"
            raise HandshakeRejected(reason, farewell=ALERT)
        if self._received[2:13] != b"\x00\x09" + _MAGIC and len(self._received) >= 13:
            raise HandshakeRejected("does not speak elastic3d's protocol", foreign=True)
        taken = _take(self._received)
        if taken is None:
            return b""
        hello = self._received[: len(self._received) - len(taken[1])]
        fields, self._received = taken
        if len(fields) < 2 or fields[0] != _MAGIC:
            raise HandshakeRejected("does not speak elastic3d's protocol", foreign=True)
        if fields[1] != _VERSION or len(fields) != 7 or len(fields[5]) != 8 or len(fields[6]) != _NONCE_BYTES:
            raise HandshakeRejected(
                "speaks another version of elastic3d's protocol; all nodes of a run need the same elastic3d"
            )
        if fields[2] != self._role.encode():
            raise HandshakeRejected(f"wants a port for {_read(fields[2])[:20]!r}, not for {self._role}")
        self._hello = fields
        id, nonce = _text(self._credentials.id), self._nonce(_NONCE_BYTES)
        self._said = _transcript(hello, id, nonce, self._binding)
        return _pack(_MAGIC, _VERSION, id, nonce, _keyed(self._credentials.secret_bytes, b"answers", self._said))

    def _proved(self) -> None:
        assert self._hello is not None
        taken = _take(self._received)
        if taken is None:
            return
        fields, rest = taken
        secret = self._credentials.secret_bytes
        if len(fields) != 1 or not hmac.compare_digest(fields[0], _keyed(secret, b"dials", self._said)):
            raise HandshakeRejected("does not hold this run's secret")
        self.peer = Peer(
            id=_read(self._hello[3]),
            meant=_read(self._hello[4]),
            generation=int.from_bytes(self._hello[5], "big"),
            keys=Keys(send=_keyed(secret, b"to dials", self._said), receive=_keyed(secret, b"to answers", self._said)),
            rest=rest,
        )


def plain(data: bytes) -> HandshakeRejected | None:
    """Return why encryption cannot be agreed on with a side that begins with `data`; None if it begins to agree."""
    if not data or data[0] == _TLS_HANDSHAKE:
        return None
    try:
        taken = _take(data)
    except HandshakeRejected as error:
        return error
    if taken is None or len(taken[0]) < 4 or taken[0][0] != _MAGIC:
        return HandshakeRejected("does not speak elastic3d's protocol", foreign=True)
    name = _read(taken[0][3])[:100]
    return HandshakeRejected(
        f"calls itself {name!r}, and does not encrypt as this node does: {EVERY_NODE}", farewell=ALERT
    )


def _keyed(secret: bytes, label: bytes, said: bytes) -> bytes:
    return blake3(label + b"\x00" + said, key=secret).digest(_PROOF_BYTES)


def _transcript(hello: bytes, id: bytes, nonce: bytes, binding: bytes) -> bytes:
    return hello + _pack(id, nonce, blake3(binding).digest())


def _text(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _read(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _pack(*fields: bytes) -> bytes:
    body = b"".join(len(field).to_bytes(2, "big") + field for field in fields)
    return len(body).to_bytes(2, "big") + body


def _take(data: bytes) -> tuple[list[bytes], bytes] | None:
    """Return the fields of the first message and what follows it, None until it is complete; HandshakeRejected."""
    if len(data) < 2:
        return None
    end = 2 + int.from_bytes(data[:2], "big")
    if end > LIMIT:
        raise HandshakeRejected("does not speak elastic3d's protocol", foreign=True)
    if len(data) < end:
        return None
    fields, at = [], 2
    while at < end:
        start = at + 2
        at = start + int.from_bytes(data[at:start], "big")
        if at > end or start > end:
            raise HandshakeRejected("does not speak elastic3d's protocol", foreign=True)
        fields.append(data[start:at])
    return fields, data[end:]
