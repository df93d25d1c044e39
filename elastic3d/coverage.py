"""How much of what a job computes is looked at: what trainers find out of themselves, and people are told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCoverage:
    """What audits of one generation see."""

    every: int = 0
    """One step in so many is audited, 0 for none."""
    pieces: float = 0.0
    """Share of what an audited step computes that two ranks compute and compare."""
    nodes: int = 0
    """Fewest nodes that can be heard over one piece; 1: what a node computes is repeated on that node only."""
    sums: float = 0.0
    """Share of the sums of gradients that a second rank adds up again in an audited step, on the rank with the least.
    What is sent and gathered is compared as a whole in such a step."""
    off: str = ""
    """Why nothing is audited, "" if something is."""
