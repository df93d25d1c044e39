"""Ports that strangers cannot exhaust: accepting goes on when descriptors run out, and few callers may be unproved.

A failed accept() is never the end of a port. If the process has no descriptor left, one kept in reserve is given up for
the moment it takes to accept the caller and hang up: the caller dials again, and the port does not spin over it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from elastic3d.clock import SYSTEM, Clock

WAITING = 64
"""Most connections of a port that may be unproved at one time."""

KNOWN = 4096
"""Most proved connections of a port at one time, if the process may have four times as many descriptors."""

BACKLOG = 1024
"""Connections that wait in the system to be accepted: beyond it, a caller tries again only after a second."""

ACCEPTED_AT_ONCE = 16
"""Connections that a loop accepts before it serves others again."""

PAUSE = 0.1
"""Seconds to wait before the next accept() after a failed one."""

MOST_FILES = 65536
"""Most descriptors asked for: programs that a script starts may go through all that they are allowed."""

TELL_SECONDS = 10.0
"""Seconds between two reports of refusals at one port."""

_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OVER = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)

T = TypeVar("T", bound=Hashable)


def raise_file_limit() -> int:
    """Raise this process's limit of descriptors as far as it may, up to `MOST_FILES`; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return soft


def most_known() -> int:
    """Return how many proved connections one port takes: at most a quarter of the descriptors allowed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return KNOWN if soft == resource.RLIM_INFINITY else max(16, min(KNOWN, soft // 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A caller was turned away. port: which of ours. peer: its address. more: how many others since the last report."""

    port: str
    peer: str
    reason: str
    more: int = 0

    def __str__(self) -> str:
        more = f" more={self.more}" if self.more else ""
        return f"port={self.port} peer={self.peer or 'somebody'} reason={self.reason}{more}"


class Refusals:
    """Reports refusals, at most one in `TELL_SECONDS`: a flood is one line with a number. Thread-safe enough."""

    def __init__(self, port: str, tell: Callable[[Refusal], None], *, clock: Clock = SYSTEM) -> None:
        self._port, self._tell, self._clock = port, tell, clock
        self._next_at = 0.0
        self._untold = 0

    def __call__(self, peer: str, reason: str) -> bool:
        """Report a refusal, or count it; return whether it was reported."""
        now = self._clock.monotonic()
        if now < self._next_at:
            self._untold += 1
            return False
        self._next_at, more, self._untold = now + TELL_SECONDS, self._untold, 0
        self._tell(Refusal(port=self._port, peer=peer, reason=reason, more=more))
        return True


class Listener:
    """A listening socket that survives failures. `accept` blocks if the socket does."""

    def __init__(self, listening: socket.socket, refused: Refusals) -> None:
        self.socket, self._refused = listening, refused
        self._reserve = _reserve()

    @property
    def port(self) -> int:
        """Number of the port."""
        return int(self.socket.getsockname()[1])

    def accept(self) -> tuple[socket.socket, str] | float | None:
        """Return a connection and the address it comes from, or the seconds to wait before the next try.

        None: no caller is there (on a socket that does not block), or the socket was closed.
        """
        try:
            connection, address = self.socket.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in _OVER:
                return None
            if error.errno in _SHORT:
                self._refused("", f"{error.strerror}: connections are closed until there are descriptors again")
                return 0.0 if self._hang_up() else PAUSE
            # The caller is gone already; after any other failure the next one may be fine.
            return 0.0 if error.errno == errno.ECONNABORTED else PAUSE
        return connection, str(address[0]) if isinstance(address, tuple) else ""

    def _hang_up(self) -> bool:
        """Close one waiting caller with the reserve; return whether that was possible."""
        if self._reserve is None:
            self._reserve = _reserve()
            return False
        os.close(self._reserve)
        self._reserve = None
        before = self.socket.gettimeout()
        try:
            # It may have gone meanwhile, and a socket that blocks would wait for the next one.
            self.socket.settimeout(0)
            self.socket.accept()[0].close()
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                self.socket.settimeout(before)
            self._reserve = _reserve()
        return True

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None


def _reserve() -> int | None:
    try:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


class Waiting(Generic[T]):
    """The connections that have not proved themselves yet, oldest first, at most `most`.

    If there is one too many another has to go: the oldest of the address that has the most waiting. A stranger's flood
    pushes itself out before anybody else; a process of the run needs only a moment.
    """

    def __init__(self, most: int = WAITING) -> None:
        self._most = most
        self._waiting: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def all(self) -> list[T]:
        """Return all of them, oldest first."""
        return list(self._waiting)

    def add(self, one: T, address: str) -> T | None:
        """Take in a connection; return the one that has to go for it, if any."""
        self._waiting[one] = address
        if len(self._waiting) <= self._most:
            return None
        crowded = Counter(self._waiting.values()).most_common(1)[0][0]
        oldest = next(each for each, where in self._waiting.items() if where == crowded)
        del self._waiting[oldest]
        return oldest

    def remove(self, one: T) -> None:
        """Take note that it has proved itself, or is gone."""
        self._waiting.pop(one, None)


def family(address: str) -> socket.AddressFamily:
    """Return the family of an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
