"""Packets with descriptors between a keeper, its template and a standby, over a SEQPACKET socket.

A socket takes a packet whole or not at all, and no long one: an assignment has the names of all nodes. One that is
longer than `LONGEST` travels as a file in memory, whose descriptor comes first.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

LONGEST = 64 << 10
"""Bytes that a packet has at most; Linux takes some 200 KiB where nobody has changed it."""

_DESCRIPTORS = 17
_IN_FILE = b"\0"
"""The packet beside a file; what is sent otherwise is JSON."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return a SEQPACKET pair: the keeper's end and the template's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(control: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send JSON of any length whole, with at most 16 descriptors; OSError as `socket.send`."""
    if len(data) <= LONGEST:
        socket.send_fds(control, [data], list(descriptors))
        return
    file = os.memfd_create("elastic3d-packet")
    try:
        with open(file, "wb", closefd=False) as whole:
            whole.write(data)
        socket.send_fds(control, [_IN_FILE], [file, *descriptors])
    finally:
        os.close(file)


def receive(control: socket.socket) -> tuple[bytes, list[int]] | None:
    """Return what was sent next, with its descriptors (closed on exec), None at the end; OSError as `socket.recv`."""
    data, descriptors, flags, _ = socket.recv_fds(control, LONGEST, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), "a packet was cut"
    if data == _IN_FILE:
        with open(descriptors.pop(0), "rb") as whole:
            whole.seek(0)
            data = whole.read()
    return data, descriptors
