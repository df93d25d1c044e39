"""Kill a dead agent's workers: a separate script beside the agent, which uses only the standard library.

torchrun gives its workers no parent-death signal, and an orphan goes on computing, holding its device and its sockets.
The guard waits for the agent's pidfd; when the agent is gone, it kills every process that carries the agent's token in
its environment, unless the agent said before that it ends in order: what is left then was detached by the user. The
token and that message come over stdin, since everybody can read the arguments of a process. The guard ends after that
message, which an agent that is part of another program may outlive, and with the agent in any case.
"""

from __future__ import annotations

import os
import select
import signal
import sys

VARIABLE = "ELASTIC3D_AGENT"
DONE = b"done\n"
"""The agent's message that it ends in order; torchrun has ended its workers before that."""


def main(agent: int, word: int) -> None:
    """Wait for process `agent` to end, then kill what carries its token. word: descriptor for the agent's messages."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        descriptor = os.pidfd_open(agent)
    except ProcessLookupError:
        descriptor = -1
    data, watched = b"", [descriptor, word]
    while descriptor >= 0:
        ready = select.select(watched, [], [])[0]
        if word not in ready:
            break
        part = os.read(word, 4096)
        data += part
        if said(data)[1]:
            return
        if not part:
            watched.remove(word)
    token, end = said(data + left(word))
    if end or not token:
        return
    mark = f"{VARIABLE}={token}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    os.kill(int(name), signal.SIGKILL)
        except OSError:
            continue


def left(word: int) -> bytes:
    """Return what is there to read, without waiting for end of file: a fork of the agent may hold the other end."""
    os.set_blocking(word, False)
    data = b""
    try:
        while part := os.read(word, 4096):
            data += part
    except BlockingIOError:
        pass
    return data


def said(data: bytes) -> tuple[str, bool]:
    """Return the agent's token, and whether it said that it ends in order."""
    token, _, rest = data.partition(b"\n")
    return token.decode(), rest == DONE


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.stdin.fileno())
