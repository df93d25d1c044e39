"""The global generators of Python and numpy, which models and data sets may draw from besides torch's.

They belong to the whole process: any thread may draw from them, and nothing tells who did. What draws from them here
does so under a key, while nothing of ours draws beside it, and leaves them to the script as they were.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_MT19937_BYTES = 625 * 4  # the words of its state, and which is next


def seed(number: int) -> None:
    """Seed both."""
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


def state() -> Any:
    """Return what their states can be compared by."""
    given: Any = np.random.get_state(legacy=False)
    numbers = [value.tobytes() if isinstance(value, np.ndarray) else value for value in given["state"].values()]
    return random.getstate(), given["bit_generator"], numbers, given["has_gauss"]


def quick_state() -> Any:
    """Return the same, but for a normal number that numpy keeps for its next call.

    numpy takes 50 µs to copy its generator's state; here it is read where numpy's ctypes interface says that it is.
    """
    generator: Any = np.random.mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return state()
    return random.getstate(), ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def taken() -> tuple[Any, Any]:
    """Return what they can be put back to."""
    return random.getstate(), np.random.get_state(legacy=False)


def put_back(states: tuple[Any, Any]) -> None:
    """Have them as they were when these were taken."""
    random.setstate(states[0])
    np.random.set_state(states[1])


@contextmanager
def lent() -> Iterator[None]:
    """Have them as they were, once the block is over."""
    states = taken()
    try:
        yield
    finally:
        put_back(states)


@contextmanager
def keyed(number: int) -> Iterator[None]:
    """Have them seeded for a block, and as they were afterwards."""
    with lent():
        seed(number)
        yield


class Repeated:
    """A function that draws again what it drew in its first call, whenever it is called again."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._drawn_from: tuple[Any, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function does."""
        if self._drawn_from is None:
            self._drawn_from = taken()
            return self._function(*args, **kwargs)
        with lent():
            put_back(self._drawn_from)
            return self._function(*args, **kwargs)
