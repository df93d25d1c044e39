"""Which data-parallel column computes which leaf of a step: a table by turn, a pure function of the columns' shares.

A leaf is a micro-batch, or several in a row that one column adds up. Leaves are dealt in turns, in the order of the
columns: with equal shares every column has one in each turn, so that leaf l belongs to column l % dp, in turn l // dp.
With shares (1, 2, 2) a column that has half of the largest share sits out every other turn, and the leaves of a turn
belong to those that are left. In any case the columns of a turn, and turns one after the other, are the leaves in
order, which is all that the order of sums needs: it is the same for all shares.

A table has as many turns as the largest share, and is dealt again from its beginning for whatever leaves are left. A
column with share n of the largest share r is in turn t where ceil(n (t + 1) / r) > ceil(n t / r): as evenly as can be,
and always in turn 0, so that each has a leaf in every step that has one for each column.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedLeaf:
    """Whose a leaf is. number: how many leaves of its step that column has before it."""

    column: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderTurn:
    """One turn of a step. senders: the columns that have a leaf in it, in order; first: the number of the first's."""

    first: int
    senders: tuple[int, ...]

    @classmethod
    def of_all(cls, number: int, dp: int, first: int = 0) -> SenderTurn:
        """Return a turn in which every column has a leaf, after as many like it; first: the number of their first."""
        return cls(first=first + number * dp, senders=tuple(range(dp)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """The table of `dp` columns. shares: of each, 1 or more leaves of every sum(shares); () for equal ones."""

    dp: int
    shares: tuple[int, ...] = ()

    def turns(self, leaves: int) -> int:
        """Return how many turns a step of so many leaves has."""
        ends = _ends(self._dealt)
        whole, rest = divmod(leaves, ends[-1])
        return whole * len(ends) + (bisect_left(ends, rest) + 1 if rest else 0)

    def turn(self, number: int) -> SenderTurn:
        """Return one turn of a step that has leaves for all of it."""
        table, ends = _table(self._dealt), _ends(self._dealt)
        whole, place = divmod(number, len(table))
        return SenderTurn(first=whole * ends[-1] + ends[place] - len(table[place]), senders=table[place])

    def steps_turns(self, leaves: int) -> tuple[SenderTurn, ...]:
        """Return all turns of a step; the last has the columns that there are leaves for."""
        turns = [self.turn(number) for number in range(self.turns(leaves))]
        return tuple(SenderTurn(first=one.first, senders=one.senders[: leaves - one.first]) for one in turns)

    def leaves_of(self, column: int, turns: int) -> list[int]:
        """Return the leaves of a column in so many turns, ascending; a step may end within the last one."""
        table, ends = _table(self._dealt), _ends(self._dealt)
        own = [
            (place, ends[place] - len(senders) + senders.index(column))
            for place, senders in enumerate(table)
            if column in senders
        ]
        tables = range(-(-turns // len(table)))
        return [
            again * ends[-1] + leaf for again in tables for place, leaf in own if again * len(table) + place < turns
        ]

    def most(self, leaves: int) -> tuple[int, ...]:
        """Return how many leaves of a step each column has."""
        turns = self.turns(leaves)
        return tuple(sum(leaf < leaves for leaf in self.leaves_of(column, turns)) for column in range(self.dp))

    def owner(self, leaf: int) -> OwnedLeaf:
        """Return whose a leaf is."""
        turns = self.turns(leaf + 1)
        last = self.turn(turns - 1)
        column = last.senders[leaf - last.first]
        return OwnedLeaf(column=column, number=len(self.leaves_of(column, turns)) - 1)

    def newest(self, column: int, turn: int) -> int:
        """Return the leaf that a column has in a turn or, if it sits that one out, in the last before it."""
        return self.leaves_of(column, turn + 1)[-1]

    @property
    def _dealt(self) -> tuple[int, ...]:
        return self.shares or (1,) * self.dp


@functools.lru_cache(maxsize=64)
def _table(shares: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    most = max(shares)
    return tuple(
        tuple(
            column for column, share in enumerate(shares) if -(-share * (turn + 1) // most) > -(-share * turn // most)
        )
        for turn in range(most)
    )


@functools.lru_cache(maxsize=64)
def _ends(shares: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many leaves there are up to the end of each turn of the table."""
    return tuple(accumulate(map(len, _table(shares))))
