"""Whole numbers in given proportions: the arithmetic behind strata and mixtures, exact and without a table.

Sums over many steps have a closed form (`floor_sum`), and a walk by `golden_step` visits all places of a circle, each
next one far from those before, so that every stretch of the walk is spread evenly (the three-gap theorem).
"""

from __future__ import annotations

from math import gcd

GOLDEN = 0x9E3779B97F4A7C15
"""(sqrt(5) - 1) / 2 in units of 2**-64."""


def golden_step(places: int) -> int:
    """Return a step without a common divisor with `places`, next to the golden section of it; 0 for one place."""
    if places == 1:
        return 0
    step = max(1, places * GOLDEN >> 64)
    while gcd(step, places) > 1:
        step += 1
    return step % places


def floor_sum(count: int, divisor: int, factor: int, start: int) -> int:
    """Return the sum of (factor * i + start) // divisor over i in 0..count-1, in O(log divisor) steps.

    The algorithm is Euclid's (as in AtCoder's library, `floor_sum`); factor and start may be negative.
    """
    total = 0
    while count > 0:
        whole, factor = divmod(factor, divisor)
        total += whole * (count * (count - 1) // 2)
        whole, start = divmod(start, divisor)
        total += whole * count
        reached = factor * count + start
        if reached < divisor:
            break
        # The lattice points below the line, counted by columns, are counted by rows from here on.
        count, start, divisor, factor = reached // divisor, reached % divisor, factor, divisor
    return total
