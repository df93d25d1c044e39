"""Minimising a failing schedule by trying smaller ones (Zeller's delta debugging)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


def shrink(failing: _T, smaller: Callable[[_T], Iterator[_T]], fails: Callable[[_T], bool], *, tries: int) -> _T:
    """Return the last of a chain, each one of those `smaller` names for the one before, that still fails.

    At most `tries` of them are tried.
    """
    left = tries
    going = True
    while going and left:
        going = False
        for candidate in smaller(failing):
            left -= 1
            if fails(candidate):
                failing, going = candidate, True
                break
            if not left:
                break
    return failing


def with_less(items: tuple[_T, ...]) -> Iterator[tuple[_T, ...]]:
    """Yield the items without a run of them: half of them first, then a quarter, down to single ones."""
    size = len(items) // 2
    while size:
        for at in range(0, len(items), size):
            yield items[:at] + items[at + size :]
        size //= 2
