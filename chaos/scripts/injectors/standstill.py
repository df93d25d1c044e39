"""A rank that stops, waits for what never comes, or computes without an end."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from pathlib import Path

from chaos.scripts.injectors.fault import Fault

_SO_ATTACH_FILTER = 26


def stop(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold(fault: Fault) -> None:
    # PyDLL keeps the interpreter's lock during the call. A mutex that is locked twice is waited for whatever signals
    # arrive; a sleep would end with the first one.
    native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    for _ in range(2):
        native.pthread_mutex_lock(mutex)


def lock(fault: Fault) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def blocked(fault: Fault) -> None:
    _hung(fault, "data").read_bytes()


def unkillable(fault: Fault) -> None:
    _hung(fault, "never").exists()


def _hung(fault: Fault, name: str) -> Path:
    assert fault.hung is not None, f"{fault.kind} needs --hung"
    return fault.hung / name


def blackhole(fault: Fault) -> None:
    """Have the kernel lose all packets that arrive for this process's connections, as a broken path to it would.

    A filter of the socket drops them before TCP sees them, so that whoever sends them sends them again and again; what
    goes the other way arrives. Unlike the loss of all packets between two hosts it leaves the keepers' connections
    alone, by whose silence a node is found that is cut off.
    """
    nothing = ctypes.create_string_buffer(b"\x06\0\0\0\0\0\0\0", 8)  # one instruction: return 0 bytes
    # struct sock_fprog: how many instructions, and where.
    program = (1).to_bytes(8, "little") + ctypes.addressof(nothing).to_bytes(8, "little")
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                    each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        except OSError:
            continue  # it is no socket, or is gone


def spin(fault: Fault) -> None:
    while True:
        pass
