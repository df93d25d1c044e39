"""Heartbeat connections between the members of one job.

Each member listens, and echoes every byte it is sent. A member that watches a peer sends a byte every `interval` and
takes the echo as its heartbeat. End of file is a hint, not a death: the watcher dials again, and only a refused
connection - the host is up, nobody listens - is a death. Silence for `silence` seconds ends the veto, nothing more; a
silent connection is given up for a new one, so that a path that was mended need not wait for TCP's own, ever slower,
repetitions.

A restarted peer listens on another port, so that a connection that succeeds is always to the incarnation meant.
One thread, one selector; callbacks run on it and must not block.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic3d.clock import SYSTEM, Clock
from elastic3d.membership import events as e

Peer = tuple[str, str, str, int]
"""name, incarnation, address, port."""


@dataclass(slots=True)
class _Dial:
    peer: Peer
    socket: socket.socket | None = None
    connected: bool = False
    heard_at: float = 0.0
    sent_at: float = 0.0
    retry_at: float = 0.0
    alive: bool = False
    started_at: float = field(default=0.0)


class Links:
    """Listens for those who watch this member, and watches whom it is told to."""

    def __init__(
        self,
        address: str,
        tell: Callable[[e.PeerHeard | e.PeerRefused], None],
        *,
        interval: float = 0.25,
        silence: float = 1.5,
        clock: Clock = SYSTEM,
    ) -> None:
        self._tell, self._interval, self._silence, self._clock = tell, interval, silence, clock
        self._listener = socket.create_server((address, 0), family=_family(address), backlog=64)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._dials: dict[Peer, _Dial] = {}
        self._wanted: tuple[Peer, ...] = ()
        self._tell_again = False
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="elastic3d-links", daemon=True)
        self._thread.start()

    def watch(self, peers: tuple[Peer, ...]) -> None:
        """Watch these peers and nobody else; those already heard are told again."""
        self._wanted = peers
        self._tell_again = True
        if not self._closed:
            self._wake_in.send(b"w")

    def close(self) -> None:
        """Stop listening and watching."""
        if not self._closed:
            self._closed = True
            self._wake_in.send(b"c")
            self._thread.join(timeout=5)
            self._wake_in.close()

    def _loop(self) -> None:
        while not self._closed:
            for key, _mask in self._selector.select(timeout=self._interval / 2):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_out:
                    self._wake_out.recv(64)
                elif isinstance(key.data, _Dial):
                    self._dialled(key.data)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._echo(key.fileobj)
            self._sync()
            self._beat(self._clock.monotonic())
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, None)

    def _echo(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(256)
            if data:
                connection.send(data[:1])
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._selector.unregister(connection)
        connection.close()

    def _sync(self) -> None:
        again, self._tell_again = self._tell_again, False
        wanted = set(self._wanted)
        for peer in [peer for peer in self._dials if peer not in wanted]:
            self._drop(self._dials.pop(peer))
        for peer in self._wanted:
            if peer not in self._dials:
                self._dials[peer] = _Dial(peer=peer)
            elif again and self._dials[peer].alive:
                self._tell(e.PeerHeard(name=peer[0], incarnation=peer[1], alive=True))

    def _beat(self, now: float) -> None:
        for dial in self._dials.values():
            if dial.socket is None:
                if now >= dial.retry_at:
                    self._dial(dial, now)
            elif dial.connected and now - max(dial.heard_at, dial.started_at) >= self._silence:
                self._redial(dial, now)
            elif dial.connected and now - dial.sent_at >= self._interval:
                dial.sent_at = now
                try:
                    dial.socket.send(b".")
                except BlockingIOError:
                    pass
                except OSError:
                    self._redial(dial, now)
            elif not dial.connected and now - dial.started_at >= self._silence:
                self._drop(dial)
                dial.retry_at = now + self._interval
            if dial.alive and now - dial.heard_at >= self._silence:
                dial.alive = False
                self._tell(e.PeerHeard(name=dial.peer[0], incarnation=dial.peer[1], alive=False))

    def _dial(self, dial: _Dial, now: float) -> None:
        dial.socket = socket.socket(_family(dial.peer[2]), socket.SOCK_STREAM)
        dial.socket.setblocking(False)
        dial.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        dial.connected, dial.started_at = False, now
        try:
            code = dial.socket.connect_ex((dial.peer[2], dial.peer[3]))
        except (OSError, OverflowError, TypeError, ValueError):
            # A record with an address that is none: this peer is heard by nobody, the others are.
            code = errno.EADDRNOTAVAIL
        if code in (0, errno.EINPROGRESS):
            self._selector.register(dial.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, dial)
        else:
            self._failed(dial, code, now)

    def _dialled(self, dial: _Dial) -> None:
        """Take a connection's news: it stands, it speaks, or it broke."""
        now = self._clock.monotonic()
        if dial.socket is None:
            return
        if not dial.connected:
            code = dial.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._failed(dial, code, now)
                return
            dial.connected, dial.sent_at = True, 0.0
            self._selector.modify(dial.socket, selectors.EVENT_READ, dial)
            return
        try:
            data = dial.socket.recv(256)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._redial(dial, now)
            return
        dial.heard_at = now
        if not dial.alive:
            dial.alive = True
            self._tell(e.PeerHeard(name=dial.peer[0], incarnation=dial.peer[1], alive=True))

    def _redial(self, dial: _Dial, now: float) -> None:
        self._drop(dial)
        self._dial(dial, now)

    def _failed(self, dial: _Dial, code: int, now: float) -> None:
        self._drop(dial)
        dial.retry_at = now + self._interval
        if code == errno.ECONNREFUSED:
            name, incarnation, address, port = dial.peer
            dial.retry_at = now + self._silence
            self._tell(
                e.PeerRefused(
                    name=name, incarnation=incarnation, evidence=f"{address}:{port} refuses the heartbeat connection"
                )
            )

    def _drop(self, dial: _Dial) -> None:
        if dial.socket is not None:
            try:
                self._selector.unregister(dial.socket)
            except KeyError:
                pass
            dial.socket.close()
        dial.socket, dial.connected = None, False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
