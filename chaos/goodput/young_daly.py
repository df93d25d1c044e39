"""How often to save: the optimum of Young and Daly.

Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9), and Daly 2006, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), equation 37.
"""

from __future__ import annotations

import math


def optimum(stall: float, between: float) -> float:
    """Return the seconds of work between two checkpoints that lose the least time.

    stall: seconds for which one holds training up. between: mean seconds between interruptions; infinite for none.
    """
    if math.isinf(between):
        return math.inf
    if stall >= 2.0 * between:
        return between
    ratio = stall / (2.0 * between)
    return math.sqrt(2.0 * stall * between) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - stall
