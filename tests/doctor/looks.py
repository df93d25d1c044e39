"""A check under way that no command waits for."""

from __future__ import annotations

from elastic3d.clock import SYSTEM
from elastic3d.doctor.findings import FindingStatus, NodeFinding, Subject
from elastic3d.doctor.running import CheckRun, NodeCheck


def under_way(limit: float = 60.0) -> CheckRun:
    """Return a run for a measurement that the test makes itself."""
    return CheckRun(NodeCheck(subject=Subject.STORE, name="test", run=lambda run: None, limit=limit), limit, SYSTEM)


def statuses(findings: tuple[NodeFinding, ...]) -> dict[str, FindingStatus]:
    """Return the status of each finding by its name."""
    return {one.name: one.status for one in findings}


def named(findings: tuple[NodeFinding, ...], name: str) -> NodeFinding:
    """Return the only finding of this name."""
    (finding,) = [one for one in findings if one.name == name]
    return finding
