"""What `elastic3d plan --json` prints, beside its `schema`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic3d.admission.host_memory import HostMemory
from elastic3d.planner.results import Candidate, RejectedLayout
from elastic3d.values import to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """What `elastic3d plan` found. Where an object has a `layout`, its fields stand in its place."""

    model: str
    """As it was asked for."""
    nodes: int
    """How many there are."""
    slots: int
    """Devices of each."""
    device: str
    """What they are, and whether that was measured."""
    parameters: int
    """Of the model."""
    global_batch: int
    """Samples of a step."""
    ranking: tuple[Candidate, ...]
    """Layouts that work, best first."""
    rejected: tuple[RejectedLayout, ...]
    """Those that do not."""
    slow: dict[str, float] = field(default_factory=dict)
    """By number, nodes whose work takes so many times as long."""
    host_memory: HostMemory | None = None
    """The best layout's, with `--host-memory`."""

    def data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        data: dict[str, Any] = to_json(self)
        return {**data, "ranking": [*map(_flat, data["ranking"])], "rejected": [*map(_flat, data["rejected"])]}


def _flat(one: dict[str, Any]) -> dict[str, Any]:
    return {**one["layout"], **{name: value for name, value in one.items() if name != "layout"}}
