"""One process of etcd that dies with its owner, and ports that it can come back to.

The parent-death signal fires when the *thread* that started the process ends: start them from a thread that lives as
long as they shall.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Below the range from which the system gives ports to outgoing connections, one of which might sit on ours by the time
# a killed server comes back for it.
PORTS = range(20_000, 32_768)

# Sets the signal in the process that becomes etcd, and leaves at once if the owner is gone already. Not a preexec_fn:
# that would run Python in a forked copy of an owner with threads.
_LAUNCH = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""

_ARCHITECTURE = "ETCD_UNSUPPORTED_ARCH"
"""No flag of etcd's: without it, older ones do not start on ARM."""


def launch(arguments: Sequence[str], log: Path, *, own_group: bool = False) -> subprocess.Popen[bytes]:
    """Start a program, with its output at the end of `log`. own_group: a terminal's Ctrl-C does not reach it.

    Variables that etcd would take for flags are not passed on: it ends where a flag is given, too.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("ETCD_") or name == _ARCHITECTURE
    }
    command = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *arguments]
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=environment,
            process_group=0 if own_group else None,
        )


def free_ports(count: int) -> list[int]:
    """Return ports that are free at the moment; all are held until all are found, so they differ."""
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            candidate = socket.socket()
            try:
                candidate.bind(("127.0.0.1", random.choice(PORTS)))
            except OSError:
                candidate.close()
                continue
            held.append(candidate)
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
