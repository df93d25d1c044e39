"""Which jobs there are, and one of them read from etcd at one revision."""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d import etcd_keys as keys
from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import EtcdRefused, JobUnknown, UsageError
from elastic3d.etcd import EtcdClient
from elastic3d.membership.inspection.derivation import status
from elastic3d.membership.inspection.keys import RunKeys, find
from elastic3d.membership.inspection.status import Status

# What follows "/" in the order of keys: the end of everything below a path.
_AFTER_SLASH = chr(ord("/") + 1)
SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run id, and the prefix all its keys lie under."""

    run_id: str
    root: str


def jobs(client: EtcdClient, prefix: str) -> tuple[str, ...]:
    """Return the run ids under `prefix`, in order: two or three small reads for each."""
    run_ids: list[str] = []
    start, end = f"{prefix}/", prefix + _AFTER_SLASH
    while True:
        key = client.next_key(start, end)
        if key is None:
            return tuple(sorted(run_ids))
        run_id = key.removeprefix(f"{prefix}/").partition("/")[0]
        root = f"{prefix}/{run_id}/"
        if run_id and any(key.startswith(root + tier) or client.exists(root + tier) for tier in keys.TIERS):
            run_ids.append(run_id)
        start = f"{prefix}/{run_id}{_AFTER_SLASH}"


def job(client: EtcdClient, prefix: str, run_id: str) -> Job:
    """Return the job of this run id, or with "" the only one that is not over, or the only one there is.

    JobUnknown if there is none. UsageError if there is more than one to choose from: it names them.
    """
    if run_id:
        root = f"{prefix}/{run_id}/"
        if any(client.exists(root + tier) for tier in keys.TIERS):
            return Job(run_id=run_id, root=root)
        try:
            there = jobs(client, prefix)
            others = f"those that are there: {_listed(there)}" if there else "there is none at all"
        except EtcdRefused:
            others = "this etcd user may not read which there are"
        raise JobUnknown(f"there is no job {run_id!r} under {prefix}; {others}")
    there = jobs(client, prefix)
    if not there:
        raise JobUnknown(f"there is no job under {prefix}: see --endpoint and --prefix")
    running = [name for name in there if client.get(f"{prefix}/{name}/{keys.END}") is None]
    for only in (running, there):
        if len(only) == 1:
            return Job(run_id=only[0], root=f"{prefix}/{only[0]}/")
    over = len(there) - len(running)
    which = running or there
    raise UsageError(
        f"there are {len(which)} jobs under {prefix}: {_listed(which)}"
        + (f" (and {over} that {'is' if over == 1 else 'are'} over)" if running and over else "")
        + "; name one with --id"
    )


def read_status(client: EtcdClient, job: Job, *, clock: Clock = SYSTEM) -> Status:
    """Return how the job stands: one read of all its keys, and one of each lease that ends a quarantine or a refusal.

    JobUnknown where all its keys are gone.
    """
    return read_job(client, job, clock=clock)[0]


def read_job(client: EtcdClient, job: Job, *, clock: Clock = SYSTEM) -> tuple[Status, RunKeys]:
    """Return the same, and the records that it was derived from."""
    items, revision = client.range(job.root)
    if not items:
        raise JobUnknown(f"job {job.run_id!r} is gone: nothing stands under {job.root} any more")
    run_keys = find(job.root, items)
    remaining = {}
    for lease in sorted(set(run_keys.leases.values())):
        seconds = client.time_to_live(lease)
        if seconds is not None:
            remaining[lease] = seconds
    return status(job.run_id, run_keys, revision=revision, remaining=remaining, wall=clock.wall()), run_keys


def _listed(names: tuple[str, ...] | list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
