"""The store of a job's checkpoints as this node reaches it: reads, writes, conditions, its clock and its bandwidth.

Nothing is left there. What is written to a directory is below a folder of the check's own, so that doctors of many
nodes and a job at work do not meet; in other stores it is below `probe/`, which nobody else reads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import StoreDenied, StoreError, StoreFull, StoreUnfit, StoreUnreachable
from checkpointing.format.names import PROBE
from checkpointing.retention.store_clock import modified_at
from checkpointing.stores.address import parse, redacted
from checkpointing.stores.local import LocalStore
from checkpointing.stores.opening import IN_PLACE, open_store
from checkpointing.stores.probing import probe
from checkpointing.stores.protocol import Store
from elastic3d.clock import SYSTEM, Clock
from elastic3d.doctor import clock as clocks
from elastic3d.doctor import directory as directories
from elastic3d.doctor.clock import ClockReading
from elastic3d.doctor.directory import DirectoryFacts
from elastic3d.doctor.findings import NodeFinding, Subject, failure, ok, warning
from elastic3d.doctor.running import CheckRun
from elastic3d.doctor.words import spell_rate, spell_size, spell_time

PATIENCE = 8.0
"""Seconds for which an operation is tried again where the store is busy or away."""

SMALL = 64 << 10
ROUNDS = 3

FIRST, LARGEST = 256 << 10, 64 << 20
"""Bytes of the objects whose bandwidth is measured: they grow until one takes about a second."""

SECONDS, MOST = 3.0, 256 << 20
"""Seconds and bytes for one direction, about."""

SLOW = 10e6
"""Bytes a second below which people are warned: a checkpoint of 10 GB takes a quarter of an hour."""

_KINDS = {
    errno.EACCES: StoreDenied,
    errno.EPERM: StoreDenied,
    errno.EROFS: StoreDenied,
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
}

_FOLDER = ".elastic3d-doctor-"

_SWAPS = "use S3, Google Cloud Storage, Azure or a directory; or let etcd decide: Checkpointing(register='etcd')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What was moved in one direction: bytes a second, and the largest object it was measured with."""

    rate: float
    size: int


@dataclass(slots=True, kw_only=True)
class StoreFacts:
    """What was seen, as far as it came. stopped: the error that ended it, None where it came to its end.

    small: median seconds of a small write. whole: what was written came back. unfit: what else the format needs and is
    not there, "" for nothing.
    """

    url: str
    directory: DirectoryFacts | None = None
    stopped: StoreError | None = None
    small: float | None = None
    whole: bool = True
    creates: bool | None = None
    swaps: bool | None = None
    conditions: str = ""
    unfit: str | None = None
    writes: Flow | None = None
    reads: Flow | None = None
    clock: ClockReading | None = None


def judge(facts: StoreFacts, *, register: bool) -> tuple[NodeFinding, ...]:
    """Say whether checkpoints can be kept there. register: etcd decides what the store cannot."""
    findings = [] if facts.directory is None else directories.judge(facts.directory, facts.url)
    if facts.small is not None:
        seen = f"a small object in {spell_time(facts.small)}, and back"
        findings.append(
            ok(Subject.STORE, "write and read", seen)
            if facts.whole
            else failure(
                Subject.STORE,
                "write and read",
                "other bytes came back than were written",
                "suspect a proxy, a network device or the store itself; do not keep checkpoints there",
            )
        )
    scheme = facts.url.partition("://")[0]
    if scheme in IN_PLACE and facts.small is not None:
        findings.append(
            warning(
                Subject.STORE,
                "whole objects",
                f"{scheme}:// writes files in place: a node that dies meanwhile leaves half a ref, manifest or record",
                "use SFTP, an object store or a mounted directory, where an object is there whole or not at all",
            )
        )
    if facts.stopped is not None:
        findings.append(_stopped(facts.stopped))
    findings += _conditions(facts, register=register)
    if facts.unfit is not None:
        findings.append(
            failure(Subject.STORE, "ranges, listings, deletions", facts.unfit, "keep checkpoints in another store")
            if facts.unfit
            else ok(Subject.STORE, "ranges, listings, deletions", "as the format needs them")
        )
    findings += [
        _flow(name, flow)
        for name, flow in (("bandwidth, write", facts.writes), ("bandwidth, read", facts.reads))
        if flow
    ]
    return tuple(findings)


def _stopped(error: StoreError) -> NodeFinding:
    remedy = "look at the URL, and at the store's own log"
    match error:
        case StoreDenied():
            remedy = "give this user, or these credentials, the right to read, write, list and delete there"
        case StoreUnreachable():
            remedy = "look at the URL, the network and the store's own state; proxies count, too"
        case StoreFull():
            remedy = "free space, raise the quota, or give another place"
        case StoreUnfit():
            remedy = "correct the URL, or use another store"
    # The folder is the check's own, and gone by now.
    seen = re.sub(rf"/{re.escape(_FOLDER)}[0-9a-f]+", "", str(error).removeprefix("store "))
    return failure(Subject.STORE, "reach", seen, remedy)


def _conditions(facts: StoreFacts, *, register: bool) -> list[NodeFinding]:
    name = "conditional writes"
    if facts.creates is None and not facts.conditions:
        return []
    missing = facts.conditions or " and ".join(
        text for text, there in (("create-only writes", facts.creates), ("compare-and-swap", facts.swaps)) if not there
    )
    if not missing:
        return [ok(Subject.STORE, name, "created once, swapped once, and refused after that")]
    seen = missing if facts.conditions else f"it takes {missing} and does not honour them"
    if register:
        return [ok(Subject.STORE, name, f"{seen}; etcd decides instead")]
    return [failure(Subject.STORE, name, seen, _SWAPS)]


def _flow(name: str, flow: Flow) -> NodeFinding:
    seen = f"{spell_rate(flow.rate)}, one at a time, objects up to {spell_size(flow.size)}"
    if flow.rate < SLOW:
        return warning(
            Subject.STORE,
            name,
            f"{seen}: 10 GB take {10e9 / flow.rate / 60:.0f} minutes",
            "put the store nearer, or save more rarely (checkpoint_every)",
        )
    return ok(Subject.STORE, name, seen)


def measure(facts: StoreFacts, run: CheckRun, clock: Clock = SYSTEM) -> None:
    """Try everything out, and note it in `facts` as it comes; a StoreError that ends it is noted as well."""
    try:
        run.go_on("the store's address")
        path = parse(facts.url).path
        if path is None:
            store, name = open_store(facts.url, write=False, patience=PATIENCE), f"{PROBE}doctor-{secrets.token_hex(8)}"
            _try_out(store, name, run, facts, clock)
            return
        facts.directory = directories.measure(path)
        inside = path if facts.directory.there else Path(facts.directory.inside)
        with _folder(inside, run) as folder:
            _try_out(LocalStore(folder), "object", run, facts, clock, folder, facts.directory.free)
    except StoreError as error:
        facts.stopped = error
    except OSError as error:
        kind = _KINDS.get(error.errno or 0, StoreError)
        facts.stopped = kind(f"store {redacted(facts.url)}: {error.strerror or error}")


@contextmanager
def _folder(inside: Path, run: CheckRun) -> Iterator[Path]:
    """Give a folder of our own and remove it with all that is in it."""
    folder = inside / f"{_FOLDER}{secrets.token_hex(8)}"
    run.making(f"folder {folder}")
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            run.removed(f"folder {folder}")


def _try_out(
    store: Store,
    name: str,
    run: CheckRun,
    facts: StoreFacts,
    clock: Clock,
    folder: Path | None = None,
    free: int | None = None,
) -> None:
    what = f"object {name} in {store.url}"
    data = secrets.token_bytes(SMALL)
    run.go_on("a small object")
    if folder is None:
        run.making(what)
    try:
        store.put(name, data)
    except (StoreDenied, StoreUnreachable, StoreUnfit):
        if folder is None:
            run.removed(what)  # it never came to be
        raise
    try:
        times = []
        for _ in range(ROUNDS):
            run.go_on()
            before = clock.wall()
            times.append(_timed(clock, lambda: store.put(name, data)))
            after = clock.wall()
        facts.small, facts.whole = statistics.median(times), store.get(name) == data
        run.go_on("its clock")
        modified = modified_at(store, name)
        if modified is not None:
            # S3 counts seconds; whoever counts finer is not hurt by half a second.
            place = "the store" if folder is None else "the store's file system"
            facts.clock = clocks.reading(place, before=before, after=after, theirs=modified, grain=1.0)
        run.go_on("conditional writes")
        _try_conditions(store, facts)
        if not facts.conditions and facts.creates and facts.swaps:
            run.go_on("ranges, listings, deletions")
            facts.unfit = ""
            try:
                probe(store)
            except StoreUnfit as error:
                facts.unfit = str(error)
        most = MOST if free is None else min(MOST, free // 4)
        facts.writes = _write(store, name, run, clock, most)
        if facts.writes is not None:
            facts.reads = _read(store, name, run, clock, facts.writes.size, folder)
    finally:
        if folder is None:
            store.delete(name)
            run.removed(what)


def _try_conditions(store: Store, facts: StoreFacts) -> None:
    """Note whether the store creates once and swaps once, on an object of its own."""
    name = f"{PROBE}doctor-{secrets.token_hex(8)}"
    first, second, third = (secrets.token_bytes(32) for _ in range(3))
    try:
        created, again = store.put_if_absent(name, first), store.put_if_absent(name, second)
        entry = store.read(name)
        facts.creates = created and not again and entry is not None and entry.data == first
        if entry is None:
            facts.swaps = False
            return
        swapped = store.compare_and_swap(name, entry.token, second)
        stale = store.compare_and_swap(name, entry.token, third)
        facts.swaps = swapped and not stale and store.get(name) == second
    except StoreUnfit as error:
        facts.conditions = str(error).removeprefix("store ")
    finally:
        with contextlib.suppress(StoreError):
            store.delete(name)


def _write(store: Store, name: str, run: CheckRun, clock: Clock, most: int) -> Flow | None:
    """Write ever larger objects for some seconds; None where there is no room for any."""
    size, moved, spent = FIRST, 0, 0.0
    block = secrets.token_bytes(FIRST)
    largest = 0
    while size <= most - moved and spent < SECONDS:
        run.go_on(f"writing, {spell_size(moved)} so far" + (f" at {spell_rate(moved / spent)}" if spent else ""))
        data = block * (size // FIRST)
        spent += _timed(clock, lambda data=data: store.put(name, data))  # type: ignore[misc]
        moved += size
        largest = size
        # The next takes about a second, or as much time as is left.
        rate = moved / max(spent, 1e-6)
        size = min(LARGEST, 4 * size, max(FIRST, int(rate * min(1.0, max(0.1, SECONDS - spent))) // FIRST * FIRST))
    return Flow(rate=moved / max(spent, 1e-6), size=largest) if moved else None


def _read(store: Store, name: str, run: CheckRun, clock: Clock, size: int, folder: Path | None) -> Flow:
    """Read the object again and again for some seconds; from the disk, where it is on one."""
    moved, spent = 0, 0.0
    while not moved or (spent < SECONDS and moved < MOST):
        run.go_on(f"reading, {spell_size(moved)} so far")
        if folder is not None:
            _forget(folder / name)
        spent += _timed(clock, lambda: store.get(name))
        moved += size
    return Flow(rate=moved / max(spent, 1e-6), size=size)


def _forget(path: Path) -> None:
    """Have the kernel read a file from its disk the next time."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _timed(clock: Clock, call: Callable[[], object]) -> float:
    start = clock.monotonic()
    call()
    return clock.monotonic() - start
