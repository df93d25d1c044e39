"""A cable that passes packets late, in part, or slowly: what `tc netem` does, for kernels that are built without it.

It can also lose what is on some TCP connections alone, as a firewall does that has forgotten them.

A thread reads the frames at either end from a packet socket and sends them at the other end (packet(7)). Frames keep
the header that says which checksum is still to be made and how they are to be cut (PACKET_VNET_HDR), so that the large
ones which hosts hand over uncut pass as they are; each counts as one.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import select
import socket
import threading
from dataclasses import dataclass

from elastic3d import threads
from elastic3d.clock import SYSTEM

_SOL_PACKET, _IGNORE_OUTGOING, _VNET_HDR = 263, 23, 15
_ALL = 0x0003
_HEADER = 10  # bytes of a vnet header, before that of Ethernet
_IPV4, _TCP = 0x0800, 6
_LARGEST = 1 << 17
_IDLE = 0.2

QUEUE = 0.5
"""Seconds of its rate for which a slow cable holds what it cannot send yet; what comes then is lost, as at a router."""


End = tuple[str, int]
"""An IPv4 address and a port."""

Connection = frozenset[End]
"""The two ends of a TCP connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Impairment:
    """What a cable does, in either direction: seconds by which it is late, a share that it loses, bytes a second.

    rate: 0 for no limit. forgets: it loses everything on the connections that there are when it begins.
    """

    late: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    forgets: bool = False


class ImpairedCable:
    """Passes frames between two network devices of this machine until it is closed.

    Needs root. OSError where a device is not there. forgotten: connections on which it loses everything. seed: of which
    other frames are lost; lost: how many it has lost.
    """

    def __init__(
        self,
        ends: tuple[str, str],
        impairment: Impairment,
        *,
        forgotten: frozenset[Connection] = frozenset(),
        seed: int = 0,
    ) -> None:
        self._impairment, self._forgotten, self._chance = impairment, forgotten, random.Random(seed)
        self._over = threading.Event()
        self._ends = [_opened(end) for end in ends]
        self._free = [0.0, 0.0]
        self._due: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self.lost = 0
        self._thread = threads.start(self._pass, name="elastic3d-cable", edge=threads.Edge.ALONE)

    def close(self) -> None:
        """Pass nothing any more."""
        self._over.set()
        self._thread.join()
        for end in self._ends:
            end.close()

    def _pass(self) -> None:
        while not self._over.is_set():
            wait = max(0.0, min(_IDLE, self._due[0][0] - SYSTEM.monotonic())) if self._due else _IDLE
            ready, _, _ = select.select(self._ends, (), (), wait)
            for end in ready:
                self._take(self._ends.index(end))
            while self._due and self._due[0][0] <= SYSTEM.monotonic():
                _, _, to, frame = heapq.heappop(self._due)
                # A device whose queue is full, or which has just gone, loses it as any network would.
                with contextlib.suppress(OSError):
                    self._ends[to].send(frame)

    def _take(self, at: int) -> None:
        """Take the frames that have come at one end, and say when they leave at the other one, if they do."""
        with contextlib.suppress(BlockingIOError, OSError):
            while True:
                frame = self._ends[at].recv(_LARGEST)
                now, harm = SYSTEM.monotonic(), self._impairment
                free = max(now, self._free[at])
                forgotten = self._forgotten and connection_of(frame[_HEADER:]) in self._forgotten
                if forgotten or self._chance.random() < harm.loss or (harm.rate and free - now > QUEUE):
                    self.lost += 1
                    continue
                if harm.rate:
                    free += len(frame) / harm.rate
                self._free[at] = free
                heapq.heappush(self._due, (free + harm.late, next(self._order), 1 - at, frame))


def connection_of(frame: bytes) -> Connection | None:
    """Return the TCP connection over IPv4 that an Ethernet frame belongs to, None for any other frame.

    RFC 791, 9293: no later fragment of a packet names ports; TCP does not send any.
    """
    if len(frame) < 34 or int.from_bytes(frame[12:14]) != _IPV4 or frame[23] != _TCP:
        return None
    packet = frame[14:]
    ports = (packet[0] & 15) * 4
    if len(packet) < ports + 4 or int.from_bytes(packet[6:8]) & 0x1FFF:
        return None
    ends = (
        (socket.inet_ntoa(packet[at : at + 4]), int.from_bytes(packet[port : port + 2]))
        for at, port in ((12, ports), (16, ports + 2))
    )
    return frozenset(ends)


def _opened(device: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    try:
        end.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        end.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
        end.bind((device, _ALL))
    except OSError:
        end.close()
        raise
    return end
