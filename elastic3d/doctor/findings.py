"""What a check found about this node: one line for a person, or one object of `elastic3d doctor --json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

SCHEMA = 1


class Subject(StrEnum):
    """What a finding is about, in the order in which people read them."""

    DEVICE = "device"
    TORCH = "torch"
    MEMORY = "memory"
    LIMITS = "limits"
    CLOCK = "clock"
    NETWORK = "network"
    ETCD = "etcd"
    STORE = "store"
    PEERS = "peers"


class FindingStatus(StrEnum):
    """How good what was found is.

    ok: nothing to do. warning: a job runs, less well or less safely. failure: a job will not run, or not as asked.
    """

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFinding:
    """One thing that was looked at."""

    subject: Subject
    """What it is about."""
    name: str
    """Which thing exactly: an endpoint, an interface, a limit."""
    status: FindingStatus
    """How good it is."""
    seen: str
    """What was found, for people."""
    remedy: str = ""
    """What to do about it, "" where it is ok."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Everything that was found on one node; with a `schema`, what `elastic3d doctor --json` prints."""

    host: str
    """Name of the machine."""
    version: str
    """Of elastic3d."""
    status: FindingStatus
    """The worst of all findings."""
    findings: tuple[NodeFinding, ...]
    """In the order of their subjects."""
    skipped: tuple[str, ...]
    """What was not looked at, since nobody said where it is."""
    seconds: float
    """How long it all took."""


def ok(subject: Subject, name: str, seen: str) -> NodeFinding:
    """Return a finding with nothing to do about it."""
    return NodeFinding(subject=subject, name=name, status=FindingStatus.OK, seen=seen)


def warning(subject: Subject, name: str, seen: str, remedy: str) -> NodeFinding:
    """Return a finding with which a job runs, less well or less safely."""
    return NodeFinding(subject=subject, name=name, status=FindingStatus.WARNING, seen=seen, remedy=remedy)


def failure(subject: Subject, name: str, seen: str, remedy: str) -> NodeFinding:
    """Return a finding with which a job will not run."""
    return NodeFinding(subject=subject, name=name, status=FindingStatus.FAILURE, seen=seen, remedy=remedy)


def worst(findings: Sequence[NodeFinding]) -> FindingStatus:
    """Return the worst status of some findings, ok of none."""
    order = tuple(FindingStatus)
    return order[max((order.index(finding.status) for finding in findings), default=0)]


def ordered(findings: Sequence[NodeFinding]) -> tuple[NodeFinding, ...]:
    """Return findings by their subjects; those of one subject stay in the order in which they were found."""
    order = tuple(Subject)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.subject)))
