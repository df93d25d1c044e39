"""Everything about one node: which checks there are, and what is made of what they find."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from elastic3d.clock import SYSTEM
from elastic3d.doctor import clock, devices, etcd, host, network, peers, store
from elastic3d.doctor.clock import ClockReading
from elastic3d.doctor.etcd import EtcdPlace, MemberFacts, WriteFacts
from elastic3d.doctor.findings import Examination, NodeFinding, Subject, ordered, worst
from elastic3d.doctor.peers import PeerAddress, Versions
from elastic3d.doctor.running import CheckRun, NodeCheck, Stopped
from elastic3d.doctor.store import StoreFacts
from elastic3d.etcd import Endpoint

HOST, ETCD, STORE, PEER = 15.0, 30.0, 45.0, 45.0
"""Seconds for the checks of each kind; devices have `devices.ASKED` and more."""

DEVICE = devices.ASKED + devices.DRIVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be looked at. endpoint: etcd's as the person wrote it. slots: 0 for one on each device.

    wait: seconds for which a peer that does not listen yet is tried again.
    """

    endpoint: str = ""
    etcd: EtcdPlace | None = None
    store: str = ""
    register: bool = False
    slots: int = 0
    peers: tuple[PeerAddress, ...] = ()
    wait: float = 0.0
    id: str = ""


class Checkup:
    """The checks of one node, and what they find together. All are made at the same time, each on its own thread."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._here = Versions.here()
        self._own: tuple[str, bool | None] | None = None
        self._readings: list[ClockReading] = []
        self._members: list[MemberFacts] = []
        self._write: WriteFacts | None = None

    def checks(self) -> list[NodeCheck]:
        """Return the checks to be made."""
        wanted = self._wanted
        made = [
            NodeCheck(subject=Subject.DEVICE, name="devices", run=self._devices, limit=DEVICE),
            NodeCheck(subject=Subject.NETWORK, name="network", run=self._network, limit=HOST),
            NodeCheck(subject=Subject.CLOCK, name="clock", run=self._clock, limit=HOST),
        ]
        if wanted.etcd is not None:
            for endpoint in wanted.etcd.endpoints:
                run = partial(self._member, wanted.etcd, endpoint)
                made.append(NodeCheck(subject=Subject.ETCD, name=str(endpoint), run=run, limit=ETCD))
            run = partial(self._written, wanted.etcd)
            made.append(NodeCheck(subject=Subject.ETCD, name="write", run=run, limit=ETCD))
        if wanted.store:
            made.append(NodeCheck(subject=Subject.STORE, name="store", run=self._store, limit=STORE))
        for peer in wanted.peers:
            run = partial(self._peer, peer)
            made.append(NodeCheck(subject=Subject.PEERS, name=str(peer), run=run, limit=PEER + wanted.wait))
        return made

    def together(self) -> tuple[NodeFinding, ...]:
        """Return what only all checks together say, once they are done."""
        findings: list[NodeFinding] = []
        if self._own is not None:
            wrong, synchronised = self._own
            findings.append(clock.judge_own(wrong=wrong, synchronised=synchronised, compared=bool(self._readings)))
        findings += map(clock.judge, self._readings)
        if self._wanted.etcd is not None:
            findings += etcd.judge_cluster(self._members)
            # Where no member lets us in, that has been said for each of them.
            if self._write is not None and any(not one.error for one in self._members):
                findings.append(etcd.judge_write(self._write, self._wanted.etcd.prefix))
        return tuple(findings)

    def _devices(self, run: CheckRun) -> None:
        # Memory is looked at before torch is asked, which takes some.
        memory = host.measure()
        try:
            facts = devices.measure(run, self._wanted.slots)
        except Stopped:
            run.tell(*host.judge(memory, self._wanted.slots or 1))
            raise
        slots = devices.slots_of(facts, self._wanted.slots)
        run.tell(*devices.judge(facts, slots), *host.judge(memory, slots))

    def _network(self, run: CheckRun) -> None:
        run.go_on("addresses and names")
        run.tell(*network.judge(network.measure(self._wanted.endpoint)))

    def _clock(self, run: CheckRun) -> None:
        run.go_on("the clock")
        self._own = clock.measure(SYSTEM)

    def _member(self, place: EtcdPlace, endpoint: Endpoint, run: CheckRun) -> None:
        facts = etcd.measure_member(place, endpoint, run)
        self._members.append(facts)
        run.tell(*etcd.judge_member(facts, SYSTEM.wall()))
        if not facts.error:
            self._compared(etcd.measure_clock(place, endpoint))

    def _written(self, place: EtcdPlace, run: CheckRun) -> None:
        self._write = etcd.measure_write(place, run)

    def _store(self, run: CheckRun) -> None:
        facts = StoreFacts(url=self._wanted.store)
        try:
            store.measure(facts, run)
        finally:
            # What was seen until it was to stop is told as well.
            run.tell(*store.judge(facts, register=self._wanted.register))
            self._compared(facts.clock)

    def _peer(self, peer: PeerAddress, run: CheckRun) -> None:
        facts = peers.measure(peer, run, self._here, self._wanted.id, wait=self._wanted.wait)
        run.tell(*peers.judge(facts, self._here))
        self._compared(facts.clock)

    def _compared(self, reading: ClockReading | None) -> None:
        if reading is not None:
            self._readings.append(reading)


def skipped(wanted: Wanted) -> tuple[str, ...]:
    """Return what is not looked at, and which option would change that."""
    return tuple(
        text
        for text, given in (
            ("etcd (--endpoint)", wanted.etcd is not None),
            ("the store (--store)", bool(wanted.store)),
            ("other nodes (--peers)", bool(wanted.peers)),
        )
        if not given
    )


def examination(wanted: Wanted, findings: Sequence[NodeFinding], *, seconds: float) -> Examination:
    """Return what the command prints."""
    return Examination(
        host=socket.gethostname(),
        version=Versions.here().elastic3d,
        status=worst(findings),
        findings=ordered(findings),
        skipped=skipped(wanted),
        seconds=round(seconds, 3),
    )
