"""Fewer searches for cyclic garbage while a trainer begins.

Building a model makes hundreds of thousands of objects that stay. Python searches among the new ones for garbage each
time some hundred have been made, which took a sixth of the beginning and freed next to nothing.
"""

from __future__ import annotations

import gc

SELDOM = 50_000
"""Objects made between two searches meanwhile. What garbage there is does not wait for the end of the beginning."""


class FewerCollections:
    """Searches seldom from now on, until `end`. A script that has turned searching off, or down, has its way."""

    def __init__(self) -> None:
        self._before = first, *others = gc.get_threshold()
        if 0 < first < SELDOM:
            gc.set_threshold(SELDOM, *others)

    def end(self) -> None:
        """Search as often as before; without effect where the script has said otherwise since."""
        if gc.get_threshold() == (SELDOM, *self._before[1:]):
            gc.set_threshold(*self._before)
