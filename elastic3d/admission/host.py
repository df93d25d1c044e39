"""Check this machine: memory for the snapshots, a clock that runs, and disks that keep what is written."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime

from elastic3d.admission.check import Unfit
from elastic3d.clock import Clock
from elastic3d.control_groups import memory_left
from elastic3d.snapshots.holdings import HOME_BUFFERS, most_copies
from elastic3d.values import ModelProfile

BUILT = datetime(2026, 1, 1, tzinfo=UTC)
"""No correct clock shows a time before the year in which this was written."""

STEP = 0.05
"""Seconds by which the wall clock may drift from the monotonic one while it is checked."""

AWAY = 10.0
"""Seconds for which a store's folder may be away before it is taken to be missing on this machine."""

_FOR_GOOD = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})

_STATE_BYTES = 3 * 4
"""A parameter and two moments of its optimizer, fp32."""

_SAMPLE = 64 * 1024


def room(profile: ModelProfile, *, least: int, most: int, available: int, devices: int = 0) -> str:
    """Check that the snapshots of a node fit `available` bytes, from the parameters: state is spread over all nodes.

    least, most: nodes of the job. devices: slots of this node whose state lies in a device's own memory: it passes
    through the host's when it is restored, all of it, and through pinned buffers when it is copied. Unfit only if not
    even a world of `most` nodes leaves room; a remark if a world of `least` would not.
    """
    needed = {nodes: _snapshot_bytes(profile, nodes, devices) for nodes in (least, most)}
    staged = f", one on its way to the devices, {_gib(staging(devices))} of pinned buffers" if devices else ""
    words = (
        f"snapshots of {profile.parameters:,} parameters (3 fp32 values each, {HOME_BUFFERS} snapshots at home and as "
        "many for the buddy{staged}) take {needed} of memory on each of {nodes} node(s); this one has {available}"
    )

    def said(nodes: int) -> str:
        return words.format(staged=staged, needed=_gib(needed[nodes]), nodes=nodes, available=_gib(available))

    if needed[most] > available:
        raise Unfit(f"{said(most)}: use more or larger nodes, raise the memory limit, or set snapshot_every=0")
    return said(least) if needed[least] > available else ""


def _snapshot_bytes(profile: ModelProfile, nodes: int, devices: int) -> int:
    copies = most_copies(buddy=nodes > 1) + (devices > 0)
    return profile.parameters * _STATE_BYTES * copies // nodes + staging(devices)


def staging(devices: int) -> int:
    """Return the bytes of pinned buffers through which the snapshots of so many devices pass."""
    from elastic3d.devices import PINNED  # brings torch, without which commands answer at once

    return devices * 2 * PINNED


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


def available_memory(read: Callable[[str], str]) -> int:
    """Return the bytes this process may still use: what the kernel calls available, and its control groups leave.

    read: returns a file's text, raises OSError if there is none.
    """
    available = next(
        int(line.split()[1]) * 1024 for line in read("/proc/meminfo").splitlines() if line.startswith("MemAvailable:")
    )
    return min([available, *memory_left(read)])


def clock_goes(clock: Clock, *, rounds: int = 5, pause: float = 0.02) -> str:
    """Check that both clocks advance alike, and that the wall clock shows a plausible time."""
    first = _both(clock)
    if first[1] < BUILT.timestamp():
        shown = datetime.fromtimestamp(first[1], UTC)
        raise Unfit(
            f"the clock shows {shown:%Y-%m-%d %H:%M}, which is past: set it (chrony, ntp); certificates and "
            "credentials depend on it"
        )
    for _ in range(rounds):
        clock.sleep(pause)
        now = _both(clock)
        if now[0] <= first[0]:
            raise Unfit("the monotonic clock stands still: deadlines would never come; restart this machine")
        # The wall clock is read between two readings of the other: a pause of this process is not a step of the clock.
        moved = now[1] - first[1]
        if not now[0] - first[2] - STEP <= moved <= now[2] - first[0] + STEP:
            raise Unfit(
                f"the wall clock moved {moved:.3f} s in {now[0] - first[0]:.3f} s: it is being stepped; "
                "wait until it is synchronised"
            )
    return ""


def _both(clock: Clock) -> tuple[float, float, float]:
    before = clock.monotonic()
    wall = clock.wall()
    return before, wall, clock.monotonic()


def disk(folder: str) -> str:
    """Check that a file can be written in `folder`, reaches the disk, reads back as written, and can be removed."""
    path = os.path.join(folder, f".elastic3d-admission-{secrets.token_hex(8)}")
    data = secrets.token_bytes(_SAMPLE)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
            # So that it is read from the disk, if there is one, and not from the cache.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            back = os.pread(file, _SAMPLE + 1, 0)
        finally:
            os.close(file)
            os.unlink(path)
    except OSError as error:
        raise Unfit(
            f"{folder} cannot be written ({error.strerror}): free space, correct its permissions, or name another"
        ) from error
    if back != data:
        raise Unfit(f"{folder} does not keep what is written: other bytes come back; take this disk out of service")
    return ""


def store_folder(folder: str, clock: Clock, *, patience: float = AWAY) -> str:
    """Check the folder that the store is as `disk` does, again for `patience` seconds while it is away.

    A job that trains goes on without its store for a while; a node that joins it just then has no fault of its own.
    """
    until = clock.monotonic() + patience
    while True:
        try:
            return disk(folder)
        except Unfit as error:
            why = error.__cause__
            if not isinstance(why, OSError) or why.errno in _FOR_GOOD or clock.monotonic() >= until:
                raise
        clock.sleep(0.2)
