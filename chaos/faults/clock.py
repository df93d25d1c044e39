"""Faults of clocks: a node's wall clock is set, as by somebody, or by a time service that has been away."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Self

from chaos.faults.fault import About, Ends, Need, OfNode, Place, node_name
from chaos.faults.live import LiveJob
from chaos.faults.moment import When
from chaos.machine.clocks import LEAST, MOST
from elastic3d.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockJump(OfNode):
    """A node's wall clock jumps by `seconds`, backwards where they are negative, and is off from then on."""

    WORD = "clock"
    LASTING = True
    seconds: float = 3600.0
    ABOUT = About(
        place=Place.CLOCK,
        enters="a library between its processes and the C library's clock (`LD_PRELOAD`)",
        promised="nothing happens: leases, time limits and verdicts go by monotonic clocks",
        row="a node's wall clock jumps, or is far off",
        needs=frozenset({Need.COMPILER}),
        ends=Ends.NOTHING,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Set it."""
        job.note(self.WORD, name)
        job.clocks.shift(name, self.seconds)
        return True

    def check(self) -> None:
        """Refuse what is no jump, and what would be before the build."""
        OfNode.check(self)
        if not LEAST <= abs(self.seconds) <= MOST:
            raise UsageError(f"{self}: seconds= is from {LEAST:g} to {MOST:g}, or as many below 0")

    @classmethod
    def drawn(cls, chance: Random, *, nodes: int, steps: int) -> Self:
        """Return one of an hour, in either direction."""
        node = chance.choice((*map(node_name, range(nodes)), "leader", "stage0"))
        return cls(node=node, when=When(step=chance.randrange(1, steps)), seconds=chance.choice((-3600.0, 3600.0)))

    def __str__(self) -> str:
        return f"{self.WORD} {self.node} by {self.seconds:+g} s {self.when}"


KINDS = (ClockJump,)
