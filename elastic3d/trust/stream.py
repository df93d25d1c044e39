"""A connection that never blocks, encrypted or not, for a loop that serves many of them.

Bytes that the system's buffer does not take wait here, and go with the next `flush`. TLS runs between buffers in
memory, so that no step of it waits for a peer: half a record, or half a handshake, is simply what has arrived so far.
Until its owner says that the other side has `proved` itself, only a limited amount is taken from it.
"""

from __future__ import annotations

import socket
import ssl

from elastic3d.trust.encryption import Encryption, not_agreed
from elastic3d.trust.handshake import LIMIT, HandshakeRejected, plain

ENCRYPTED_LIMIT = 16 << 10
"""Bytes taken from a side that encrypts before it has proved itself: certificates and keys need more than `LIMIT`."""

_TLS = (0x15, 0x16)
"""First bytes of an alert, and of a step towards encryption."""


class Stream:
    """One connection, already set not to block. answers: whether the other side dialled. encryption: None for none."""

    __slots__ = ("_agreed", "_incoming", "_left", "_outgoing", "_tls", "_unsent", "binding", "socket")

    def __init__(self, connection: socket.socket, encryption: Encryption | None, *, answers: bool) -> None:
        self.socket = connection
        self.binding = b""
        self._unsent = bytearray()
        # Bytes that may still come before the proof; None for no limit, or if the handshake itself counts them.
        self._left: int | None = None if encryption is None else ENCRYPTED_LIMIT
        self._agreed = encryption is None
        self._tls: ssl.SSLObject | None = None
        if encryption is not None:
            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            context = encryption.server if answers else encryption.client
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=answers)
            self.binding = encryption.binding if answers else b""

    @property
    def agreed(self) -> bool:
        """Whether it can carry messages: encryption is agreed on, or there is none."""
        return self._agreed

    @property
    def unsent(self) -> bool:
        """Whether the system's buffer has not taken everything."""
        return bool(self._unsent)

    @property
    def untouched(self) -> bool:
        """Whether nothing arrived that was to be decrypted; True if nothing is encrypted."""
        return self._left is None or self._left == ENCRYPTED_LIMIT

    def proved(self) -> None:
        """Take any amount from now on."""
        self._left = None

    def begin(self) -> bool:
        """Begin to agree on encryption, as the side that dialled; False if the connection ended."""
        if self._tls is not None:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                pass
        return self.flush()

    def send(self, data: bytes | bytearray) -> bool:
        """Send, or keep until `flush`; False if the connection ended."""
        if self._tls is None:
            if self._unsent:
                self._unsent += data
                return self.flush()
            try:
                sent = self.socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return False
            self._unsent += data[sent:]
            return True
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        return self.flush()

    def flush(self) -> bool:
        """Send what waits, as far as the system takes it; False if the connection ended."""
        if self._tls is not None and self._outgoing.pending:
            self._unsent += self._outgoing.read()
        if self._unsent:
            try:
                del self._unsent[: self.socket.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:
                return False
        return True

    def receive(self, most: int = LIMIT) -> bytes | None:
        """Return what arrived, None for nothing yet, b"" at the connection's end. HandshakeRejected.

        most: bytes taken from the system at a time.
        """
        if self._tls is not None:
            most = max(most, ENCRYPTED_LIMIT)
        try:
            data = self.socket.recv(most)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        if self._tls is None or not data:
            return data
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise HandshakeRejected("sent too much before it had proved itself")
        return self._decrypted(self._tls, data)

    def hang_up(self, farewell: bytes = b"") -> None:
        """Send this in the clear, if the connection takes it, and end it."""
        if farewell:
            try:
                # Unread bytes would make the system discard what is sent.
                self.socket.recv(ENCRYPTED_LIMIT)
            except OSError:
                pass
            try:
                self.socket.send(farewell)
            except OSError:
                pass
        self.socket.close()

    def _decrypted(self, tls: ssl.SSLObject, data: bytes) -> bytes | None:
        if not self._agreed:
            self._agree(tls, data)
        else:
            self._incoming.write(data)
        plaintext = bytearray()
        try:
            while self._agreed and (part := tls.read(65536)):
                plaintext += part
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            return bytes(plaintext)
        except ssl.SSLError as error:
            raise HandshakeRejected(f"sent something other than encrypted records: {error.reason or error}") from error
        self.flush()
        return bytes(plaintext) or None

    def _agree(self, tls: ssl.SSLObject, data: bytes) -> None:
        """Take what arrived as a step towards encryption. HandshakeRejected."""
        first = self._left == ENCRYPTED_LIMIT - len(data)
        refusal = plain(data) if first and tls.server_side else None
        if refusal is not None:
            raise refusal
        self._incoming.write(data)
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            if first and not tls.server_side and data[0] not in _TLS:
                raise HandshakeRejected("does not speak elastic3d's protocol", foreign=True) from error
            raise not_agreed(error) from error
        finally:
            self.flush()
        self._agreed = True
        if not tls.server_side:
            self.binding = tls.getpeercert(binary_form=True) or b""
