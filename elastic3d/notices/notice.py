"""A notice: somebody said that this machine will not stay."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NoticeKind(StrEnum):
    """Who said it."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"
    SIGNAL = "signal"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudNotice:
    """One notice, as heard.

    seconds: what was left at the least when it was heard, 0 where the end may come at any moment; None where the source
    does not say. detail: what was said, for a person. action: what will happen, in the source's own word and in small
    letters ("terminate", "stop", "preempt", "reboot", "rebalance"...).
    """

    kind: NoticeKind
    seconds: float | None
    detail: str
    action: str


ADVICE = frozenset({"rebalance", "freeze", "migrate", "maintenance"})
"""Actions after which the machine is still there: a risk, a pause of seconds, or a word not known here."""
