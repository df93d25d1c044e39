"""One try to connect to each of some nodes: TCP only, nothing is sent. Their ports take it for a caller that left."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Sequence

from elastic3d.clock import SYSTEM, Clock
from elastic3d.membership.actions import RingPeer
from elastic3d.membership.events import Probed
from elastic3d.trust.listening import family

SECONDS = 2.0
"""For all connections together: TCP sends a lost first packet again after one second."""

_REACHED = (0, errno.ECONNREFUSED, errno.ECONNRESET)
_UNKNOWN = (errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def probe(peers: Sequence[RingPeer], *, seconds: float = SECONDS, clock: Clock = SYSTEM) -> Probed:
    """Return which peers a connection reached, even if they refused it, and which not.

    A peer that could not even be tried, for want of descriptors or because its address is invalid, counts as reached:
    nothing is known of it.
    """
    with selectors.DefaultSelector() as waiting:
        for peer in peers:
            _begin(peer, waiting)
        until = clock.monotonic() + seconds
        failed = set()
        while waiting.get_map():
            left = until - clock.monotonic()
            # Once more at the end: this process may have been stopped, and the answers may be there.
            ready = waiting.select(max(0.0, left))
            for key, _ in ready:
                connection, peer = key.fileobj, key.data
                assert isinstance(connection, socket.socket)
                if _away(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    failed.add(peer.id)
                waiting.unregister(connection)
                connection.close()
            if not ready and left <= 0:
                break
        for key in list(waiting.get_map().values()):
            failed.add(key.data.id)
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    ids = [peer.id for peer in peers]
    return Probed(reached=tuple(id for id in ids if id not in failed), failed=tuple(id for id in ids if id in failed))


def _begin(peer: RingPeer, waiting: selectors.BaseSelector) -> None:
    try:
        connection = socket.socket(family(peer.address), socket.SOCK_STREAM)
    except OSError:
        return
    try:
        connection.setblocking(False)
        code = connection.connect_ex((peer.address, peer.port))
    except (OSError, OverflowError, TypeError, ValueError):
        connection.close()
        return
    if code in (0, errno.EINPROGRESS) or _away(code):
        # The selector reports one that failed at once like one that fails later.
        waiting.register(connection, selectors.EVENT_WRITE, peer)
    else:
        connection.close()


def _away(code: int) -> bool:
    """Return whether an outcome means that the other host was not reached; one that refuses was."""
    return code not in _REACHED and code not in _UNKNOWN
