"""Rules for every process of a node: it dies with its parent, its groups die whole, its exit code says why.

Linux only: prctl(2) for the parent-death signal and the subreaper, pidfd_open(2) to hold on to a process rather than
to a number. A parent-death signal fires when the *thread* that forked ends, so forks happen on main threads, or on
threads that live as long as their process.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import MutableMapping
from enum import IntEnum
from typing import NoReturn

from elastic3d.health.processes import stat_fields
from elastic3d.port import Assignment
from elastic3d.rendezvous import agent

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROBE_SECONDS = 2.0
_DRIVERS = ("/dev/nvidia-uvm", "/dev/kfd")
"""Open in every process that has a context: CUDA's and ROCm's."""


class ExitCode(IntEnum):
    """How a trainer ends. No code is one of torch's (1), of sysexits (64 to 78) or of a shell's (126 and above)."""

    DONE = 0
    LEFT = 81
    PEER_LOST = 82
    ERROR = 83
    MEASURED = 84
    ORPHANED = 85
    CONVICTED = 86


TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Variables of torchrun that do not hold for a trainer. LOCAL_RANK and LOCAL_WORLD_SIZE do, and stay."""


_M_ARENA_MAX = -8


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel SIGKILL this process when the thread that forked it ends.

    parent: its pid, as known before the fork. A parent that died before this call can no longer send a signal, so the
    process exits at once if its parent is another one. None: the parent at the time of the call.
    """
    expected = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:
        os._exit(ExitCode.ORPHANED)


def die_with_agent(identity: str) -> None:
    """End at once if the agent of this `identity` is gone, and from now on together with the parent.

    identity: as passed in the environment; "" for none, where the parent is taken to be the agent.
    """
    parent = os.getppid()
    die_with_parent(agent.pid_of(identity) if identity and agent.pid_of(identity) == parent else parent)
    if identity and not agent.lives(identity):
        os._exit(ExitCode.ORPHANED)


def adopt_orphans() -> None:
    """Make this process the subreaper: descendants whose parent dies become its children, to be reaped by it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def share_arenas() -> None:
    """Have the threads of this process allocate from two arenas, from now on.

    glibc gives each thread an arena until there are eight for each core, and what one thread frees is of no use to
    another. A keeper's threads come and go with generations, so that each arena in its turn reaches the most that any
    of them ever held: by some 0.2 MB a generation its memory rose, for hours. They mostly wait, and seldom meet in
    malloc. Processes that this one forked before are not affected.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has no arenas
        mallopt(_M_ARENA_MAX, 2)


def children_die_too() -> None:
    """Give every child this process forks from its main thread a parent-death signal of its own.

    For a trainer: its data-loader workers would outlive it by seconds if nobody were left to kill its group. Children
    forked on other threads are left alone: the signal would fire when that thread ends.
    """
    here = {"pid": 0, "main": False}

    def before() -> None:
        here["pid"], here["main"] = os.getpid(), threading.current_thread() is threading.main_thread()

    def after() -> None:
        if here["main"]:
            die_with_parent(here["pid"])

    os.register_at_fork(before=before, after_in_child=after)


def kill_group(group: int) -> bool:
    """SIGKILL every process of a process group, atomically even against forks; return whether there was one."""
    assert group > 1, group
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def group_exists(group: int) -> bool:
    """Return whether the group has a member, a zombie included."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def session_members(session: int) -> list[int]:
    """Return the pids of a session's processes, zombies included, from /proc."""
    members = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            fields = stat_fields(int(name))
            if fields and int(fields[3]) == session:
                members.append(int(name))
    return members


def kill_session(session: int) -> None:
    """SIGKILL every process of a session and reap those that are (or become) children of this process.

    For the processes that a dead template leaves behind. Call again until `session_members` is empty: orphans arrive
    one by one.
    """
    for pid in session_members(session):
        fields = stat_fields(pid)
        if not fields or int(fields[3]) != session:
            continue
        try:
            if fields[0] != "Z":
                os.kill(pid, signal.SIGKILL)
            elif int(fields[1]) == os.getpid():
                os.waitpid(pid, os.WNOHANG)
        except (ProcessLookupError, ChildProcessError):
            pass


def overwrite_environment(environment: MutableMapping[str, str], assignment: Assignment) -> None:
    """Replace what torchrun set for its worker with what holds for the trainer of this assignment."""
    for name in TORCHRUN_VARIABLES:
        environment.pop(name, None)
    environment["RANK"] = str(assignment.rank)
    environment["WORLD_SIZE"] = str(assignment.world)
    environment["LOCAL_RANK"] = str(assignment.slot)
    environment["MASTER_ADDR"] = assignment.store_host
    environment["MASTER_PORT"] = str(assignment.store_port)


def fork_hazard() -> str | None:
    """Return why a fork of this process could hang or misbehave, None if it is safe.

    This is judged by what has run, not by the number of threads: an idle thread that an import started does no harm,
    while a pool that has worked hangs the child. If there are other native threads, a child is forked as a trial.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised in this process"
    driver = _open_driver()
    if driver:
        return f"something opened the driver of a device ({driver}) in this process"
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"the script has started threads: {', '.join(sorted(others))}"
    if len(os.listdir("/proc/self/task")) > 1 and torch is not None and not _child_can_compute():
        return "tensor maths has run on several threads"
    return None


def _open_driver(descriptors: str = "/proc/self/fd") -> str:
    """Return the device driver's file that is open, "" for none: what opened it need not have been torch."""
    for name in os.listdir(descriptors):
        try:
            path = os.readlink(os.path.join(descriptors, name))
        except OSError:  # the descriptor of the listing itself
            continue
        if path in _DRIVERS:
            return path
    return ""


def _child_can_compute() -> bool:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            import torch

            torch.ones(512, 512).mm(torch.ones(512, 512)).sum()
            torch.ones(1 << 20).add_(1)
            os._exit(0)
        finally:
            os._exit(1)
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if not poll.poll(_PROBE_SECONDS * 1000):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        return os.waitpid(pid, 0)[1] == 0
    finally:
        os.close(handle)


def leave(code: ExitCode) -> NoReturn:
    """Flush the buffers of Python and C and end this process without running exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    ctypes.CDLL(None).fflush(None)
    os._exit(code)
