"""Between measuring and joining the node checks itself, and stays out where it would only do harm."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from elastic3d import environment, output
from elastic3d import etcd_keys as keys
from elastic3d.admission import host
from elastic3d.admission.check import Check, CheckResult, run_checks
from elastic3d.admission.reach import ReachTarget, neighbours, reach
from elastic3d.admission.record import FailedAdmission, leave_word, take_back
from elastic3d.clock import SYSTEM, Clock
from elastic3d.devices import device_at
from elastic3d.errors import AdmissionFailed, EtcdError
from elastic3d.etcd import EtcdClient, parse_endpoints
from elastic3d.membership.reading import sealed
from elastic3d.rendezvous.connect import connect
from elastic3d.rendezvous.settings import Settings
from elastic3d.values import ModelProfile, Node
from elastic3d.worker.journal import Journal
from elastic3d.worker.options import RunOptions

LIMIT = 10.0
"""Seconds for one check of this host: a disk that takes longer would hold up every checkpoint."""

PATIENCE = 2.0
"""Seconds beyond a lease for which neighbours are tried: by then a dead one is no longer a neighbour."""


def admit(
    settings: Settings, options: RunOptions, profile: ModelProfile, computed: Sequence[CheckResult], journal: Journal
) -> None:
    """Return if this node is fit to take part; AdmissionFailed, with all reasons, if it is not.

    computed: the results of the measuring trainer, since a keeper must not use devices itself. The reasons of a refusal
    go to stderr, to the event log, and to `refused/<node>` in etcd for an hour.
    """
    fit = all(check.ok for check in computed)
    checks = (*computed, *run_checks(_works(settings, options, profile, away=host.AWAY if fit else 0.0)))
    failed = [check for check in checks if not check.ok]
    try:
        # An unfit node says so without waiting for etcd.
        client = connect(settings, patience=0.0 if failed else None)
    except EtcdError:
        if not failed:
            raise
        raise _refused(settings, failed, journal) from None
    with client:
        if not failed:
            checks = (*checks, _etcd(settings), _neighbours(client, settings))
            failed = [check for check in checks if not check.ok]
        for check in checks:
            if check.ok and check.detail:
                output.say(f"admission: {check.name}: {check.detail}")
        if not failed:
            take_back(client, settings.root, settings.node)
            return
        error = _refused(settings, failed, journal)
        word = FailedAdmission(node=settings.node, address=settings.address, checks=tuple(failed))
        try:
            leave_word(client, settings.root, word)
        except EtcdError as problem:
            output.say(f"admission: the reasons could not be written to etcd: {problem}")
        raise error


def _works(settings: Settings, options: RunOptions, profile: ModelProfile, away: float) -> list[Check]:
    """Return the checks of this host. away: seconds for which the store's folder may be away meanwhile."""
    works = [Check(name="clock", run=lambda: host.clock_goes(SYSTEM), limit=LIMIT)]
    if options.snapshot_every != 0:
        works.append(Check(name="memory", run=lambda: _memory(settings, options, profile), limit=LIMIT))
    # Python would quietly fall back from TMPDIR to another folder; other code in a trainer would not.
    works.append(
        Check(name="disk", run=lambda: host.disk(environment.TEMPORARY.read() or tempfile.gettempdir()), limit=LIMIT)
    )
    store = _folder(options.store.url if options.store is not None else None)
    if store is not None:
        works.append(
            Check(name="store", run=lambda: host.store_folder(store, SYSTEM, patience=away), limit=LIMIT + away)
        )
    return works


def _memory(settings: Settings, options: RunOptions, profile: ModelProfile) -> str:
    slots = int(environment.LOCAL_WORLD_SIZE.read())
    return host.room(
        profile,
        least=settings.policy.minimum,
        most=settings.policy.maximum,
        available=host.available_memory(lambda path: Path(path).read_text()),
        devices=slots if device_at(options.device, 0).exclusive else 0,
    )


def _folder(store: str | None) -> str | None:
    """Return the folder that a store is, None for any other store."""
    if store is None or ("://" in store and not store.startswith("file://")):
        return None
    return str(Path(store.removeprefix("file://")).expanduser().absolute())


def _etcd(settings: Settings) -> CheckResult:
    """One endpoint is enough; those that do not answer are named."""
    endpoints = parse_endpoints(settings.endpoints)
    targets = [ReachTarget(name=f"etcd {one.host}", address=one.host, port=one.port) for one in endpoints]
    return reach("etcd", targets, need=1)


def _neighbours(client: EtcdClient, settings: Settings, clock: Clock = SYSTEM) -> CheckResult:
    """Reach the majority of up to three nodes that are training: one that has just died is not this node's fault."""
    deadline = clock.monotonic() + settings.policy.lease + PATIENCE
    while True:
        targets = [
            ReachTarget(name=node.name, address=node.address, port=node.heartbeat_port)
            for node in _registered(client, settings)
        ]
        check = reach("neighbours", targets, need=(len(targets) + 1) // 2)
        if check.ok or clock.monotonic() > deadline:
            return check
        clock.sleep(0.2)


def _registered(client: EtcdClient, settings: Settings) -> list[Node]:
    """Return the neighbours whose leases are alive: the generation may name nodes that are long gone."""
    formed = sealed(settings.root, client.range(settings.root + keys.LISTED)[0])
    if formed is None:
        return []
    near = neighbours(formed, settings.node)
    return [node for node in near if client.get(settings.root + keys.member(node.id)) is not None]


def _refused(settings: Settings, failed: Sequence[CheckResult], journal: Journal) -> AdmissionFailed:
    for check in failed:
        journal.emit("admission.failed", check=check.name, detail=check.detail, seconds=check.seconds)
    reasons = "; ".join(f"{check.name}: {check.detail}" for check in failed)
    return AdmissionFailed(
        f"node {settings.node} is not fit to take part: {reasons}. Repair it and start it again; "
        "--rdzv-conf=admission=off joins without these checks"
    )
