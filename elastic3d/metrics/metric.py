"""What a metric is: its kind, its labels, who has it, and the rules by which events change it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

OTHER = "other"
"""The value of a label where none of those that are listed fits."""

COMMON = ("run", "node")
"""Labels of every sample: torchrun's `--rdzv-id`, and the node's name."""


class MetricKind(StrEnum):
    """Prometheus' types; a summary has a sum and a count only."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


class Source(StrEnum):
    """Which nodes have a metric; the values are words for people.

    FIRST: gauges are gone when rank 0 moves to another node; counters stay where they were counted.
    """

    NODE = "every node, of itself"
    ALL = "every node, of the job"
    FIRST = "the node of rank 0"
    LEADER = "the node that leads"


class Teller(StrEnum):
    """Whose events count, where several tell the same."""

    ANY = "any"
    RANK_0 = "rank 0"
    LEADER = "the leader's node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What an event does to a metric.

    amount: the event's field that is added (counters), set (gauges) or observed (histograms, summaries), of a list its
    length; "" for `value`. least: a gauge has no value where the amount is below. labels: the values of the metric's
    labels, or, with a $ before them, the names of fields that hold them. where: a field that has to be true.
    """

    event: str
    amount: str = ""
    value: float = 1.0
    least: float | None = None
    labels: tuple[str, ...] = ()
    where: str = ""
    teller: Teller = Teller.ANY


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label beside `COMMON`, and its values; `OTHER` is one, too, where they come from events."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. rules: the events that it is made of; () where it is read when it is scraped, or computed."""

    name: str
    kind: MetricKind
    source: Source
    help: str
    labels: tuple[Label, ...] = ()
    rules: tuple[Rule, ...] = ()
    buckets: tuple[float, ...] = field(default=())
