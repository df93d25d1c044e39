"""Kill a dead agent's workers: run as a script of its own, beside the agent, with the standard library alone.

torchrun gives its workers no parent-death signal, and an orphan goes on computing, holding its device and its sockets.
The guard waits for the agent's pidfd; when the agent is gone, it kills every process that carries the agent's token in
its environment. It ends with the agent in any case.
"""

from __future__ import annotations

import os
import select
import signal
import sys

VARIABLE = "ELASTIC3D_AGENT"


def main(agent: int, token: str) -> None:
    """Wait for process `agent` to end, then kill what carries `token`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        descriptor = os.pidfd_open(agent)
    except ProcessLookupError:
        descriptor = -1
    if descriptor >= 0:
        select.select([descriptor], [], [])
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


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
