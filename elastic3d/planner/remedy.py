"""What to do about a slow node, by gain against cost: pure functions.

Nobody knows how long a node will stay slow. As one who does not know how long he will ski rents until the rent paid
equals the price, a change is made once the time that it would have saved so far equals what it costs: whatever comes,
no more than twice the cost of the best decision is lost. Each change for the sake of the same machine within an hour
doubles the price of the next one, so that a node that is slow now and then is not followed to and fro.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

HORIZON = 3600.0
"""Seconds over which gains are weighed against costs where several changes are due."""

LEAST = 0.05
"""Share of a step's time below which a gain counts for nothing: predictions are not better than that."""


class RungKind(StrEnum):
    """What can be done about a slow node."""

    SWAP = "swap"  # a spare takes its place
    RECUT = "recut"  # its stage gets fewer blocks, or it gets a lighter stage; also the way back
    SHARES = "shares"  # it gets fewer micro-batches of each step
    EVICT = "evict"  # the others go on without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One change that may be made.

    before, after: predicted seconds of a step without it and with it. cost: seconds in which no step is made because of
    it. uses: how many changes were made lately for the same machine's sake. acts: False for what is only reported.
    """

    kind: RungKind
    before: float
    after: float
    cost: float
    uses: float = 0.0
    acts: bool = True

    @property
    def gain(self) -> float:
        """The share of the time that it saves."""
        return 1.0 - self.after / self.before if self.before > 0.0 else 0.0

    @property
    def price(self) -> float:
        """Seconds that must have been lost before it is made."""
        return self.cost * math.exp2(min(self.uses, 30.0))

    @property
    def pays(self) -> bool:
        """Whether it would ever be made."""
        return self.gain >= LEAST

    @property
    def patience(self) -> float:
        """Seconds that nodes have to be slow until it is made; infinite if it does not pay."""
        return self.price / self.gain if self.pays else float("inf")

    @property
    def worth(self) -> float:
        """Seconds that it saves in all, if nodes stay as they are."""
        return self.gain * HORIZON - self.cost


def choose(rungs: Iterable[Rung], waited: float) -> Rung | None:
    """Return what to do now that nodes have been slow for `waited` seconds; None for nothing.

    Of what is due, what is worth most. Nothing that is only reported is preferred to a change that can be made: that
    is told only where no change that acts pays at all.
    """
    paying = [rung for rung in rungs if rung.pays]
    acting = [rung for rung in paying if rung.acts]
    due = [rung for rung in acting or paying if waited >= rung.patience * (1.0 - 1e-9)]
    return max(due, key=lambda rung: rung.worth, default=None)
