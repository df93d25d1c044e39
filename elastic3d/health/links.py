"""Which end of a link is at fault, where what one rank sent is not what another one received: pure.

Neither end can tell: what the sender's memory lost, or the wire, or the receiver's memory, looks the same to both. So
the first time it is an accident, and the step is made again. All that happens within an hour of a generation is then
looked at together. A node is convicted at the second time or later if it is an end of every link that failed, if no
other one is, and if the other ends are of three nodes: two broken nodes whose links to the same honest one fail would
otherwise convict it. So with fewer than four nodes there is no telling them apart, and steps are only made again. What
a node sends to itself tells of nobody else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastic3d.health.hearing import Finding, Hearing

HOUR = 3600.0
"""Seconds for which an accident counts."""

PARTNERS = 3
"""Nodes at the other ends of a node's links that say together that it is the node."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RankLink:
    """From one rank to another."""

    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"from rank {self.sender} to rank {self.receiver}"


class FailedLinks:
    """What has failed within the last hour. nodes: of each rank."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._failed: list[tuple[float, frozenset[RankLink]]] = []

    def hear(self, links: Collection[RankLink], now: float) -> Hearing:
        """Return what follows from links that have failed at once; transient and without a culprit at first."""
        before = [(at, failed) for at, failed in self._failed if now - at < HOUR]
        self._failed = [*before, (now, frozenset(links))]
        failed = sorted({link for _, together in self._failed for link in together})
        named = "; ".join(str(link) for link in sorted(links)[:4]) + ("; and more" if len(links) > 4 else "")
        detail = f"what was sent {named} arrived as something else"
        ends = [{self._nodes[link.sender], self._nodes[link.receiver]} for link in failed]
        common, all_ends = set.intersection(*ends), set().union(*ends)
        alone = any(len(pair) == 1 for pair in ends)
        if not before or len(common) != 1 or not (alone or len(all_ends - common) >= PARTNERS):
            more = f", the {_nth(len(self._failed))} time within an hour" if before else ""
            return Hearing(
                finding=Finding.TRANSIENT, detail=f"{detail}{more}; which end is at fault neither of them can tell"
            )
        (node,) = common
        culprits = {end for link in failed for end in (link.sender, link.receiver) if self._nodes[end] == node}
        return Hearing(
            finding=Finding.PERSISTENT,
            culprits=tuple(sorted(culprits)),
            detail=f"{detail}, the {_nth(len(self._failed))} time within an hour, and {node} is an end of every link "
            "that failed",
        )


def _nth(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
