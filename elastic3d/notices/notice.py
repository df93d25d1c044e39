"""A notice that this machine will go away."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NoticeKind(StrEnum):
    """The source of a notice."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"
    SIGNAL = "signal"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudNotice:
    """One notice, as heard.

    seconds: the least time left when it was heard, 0 if the end may come at any moment; None if the source does not
    say. detail: its text, for a person. action: what will happen, in the source's own word in lower case ("terminate",
    "stop", "preempt", "reboot", "rebalance"...).
    """

    kind: NoticeKind
    seconds: float | None
    detail: str
    action: str


ADVICE = frozenset({"rebalance", "freeze", "migrate", "maintenance"})
"""Actions after which the machine is still there: a risk, a pause of seconds, or an unknown word."""
