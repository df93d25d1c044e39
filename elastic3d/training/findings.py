"""What follows where a check finds that a rank is wrong: its generation ends, or it is only said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic3d.port import AuditReport, Port


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRank:
    """A rank of the generation: the node it is on, the name of its device, and whether the node is a newcomer."""

    node: str
    device: str
    newcomer: bool = False


class Convicted(Exception):
    """A rank computes wrongly, again and again. Never leaves this package: `Run` has the port end the trainer."""

    def __init__(self, report: AuditReport) -> None:
        super().__init__(report.detail)
        self.report = report


def end(port: Port, report: AuditReport, *, certain: bool) -> None:
    """Raise Convicted, or only report where nobody is named for certain, or nothing is to be done about it."""
    if certain and port.assignment.audit_acts:
        raise Convicted(report)
    why = "" if certain else "; training goes on, since it is not certain whose"
    detail = report.detail + (why or ". act='log' has training go on with it")
    port.audited(replace(report, detail=detail, acted=False))


def nodes_of(ranks: Sequence[int], peers: Sequence[AuditedRank]) -> tuple[str, ...]:
    return tuple(sorted({peers[rank].node for rank in ranks}))
