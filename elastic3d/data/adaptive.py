"""A global batch that follows the gradient's noise: what a script asks for, as a value, since it is part of the order.

What is measured, and how the sizes follow from it, is in `noise`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from elastic3d.errors import ConfigurationError, UsageError

LINEAR, SQRT, ADASCALE = "linear", "sqrt", "adascale"
RULES = (LINEAR, SQRT, ADASCALE)

MOST_SIZES = 256
"""Sizes that a run may choose among: each layout is proved for every one of them."""


@dataclass(frozen=True, slots=True, init=False)
class Adaptive:
    """A global batch between `minimum` and `maximum` samples that follows the gradient's noise scale.

        batches = run.batches(dataset, global_batch=elastic3d.Adaptive(256, 4096, learning_rate="sqrt"), micro_batch=4)

    The noise scale is the batch size from which on a larger batch hardly makes a better step. It is measured as the run
    goes, from the gradients of single micro-batches; sizes follow it slowly, and are the same in every layout.
    """

    minimum: int
    """Samples of the smallest global batch."""
    maximum: int
    """Samples of the largest one; it stands as many `multiple` above the smallest."""
    start: int
    """Samples of the first one, for which the learning rates of the script are right; `minimum` by default."""
    multiple: int
    """Samples by which sizes differ; `minimum` by default."""
    learning_rate: str | None
    """What larger batches do to learning rates, on top of the script's own schedule: "linear" and "sqrt" multiply them
    by size / `start`, or by its root; "adascale" by the gain of AdaScale. None, the default, leaves them."""
    times: float
    """Noise scales that the global batch is to have; 1.0 by default."""
    every: int
    """Steps from one change to the next, at least; 100 by default."""
    measured_every: int
    """Steps from one measurement to the next; 5 by default."""
    memory: int
    """Measurements that the noise scale is the average of, about; 20 by default. Nothing changes before them."""
    margin: float
    """By which share the wanted size has to differ from the present one to be chosen; 0.25 by default."""
    most: float
    """The largest factor of one change; 2.0 by default."""

    def __init__(
        self,
        minimum: int,
        maximum: int,
        *,
        start: int | None = None,
        multiple: int | None = None,
        learning_rate: str | None = None,
        times: float = 1.0,
        every: int = 100,
        measured_every: int = 5,
        memory: int = 20,
        margin: float = 0.25,
        most: float = 2.0,
    ) -> None:
        values = {
            "minimum": minimum,
            "maximum": maximum,
            "start": minimum if start is None else start,
            "multiple": minimum if multiple is None else multiple,
            "every": every,
            "measured_every": measured_every,
            "memory": memory,
        }
        for name, value in values.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"Adaptive: {name} is a whole number, 1 or more; it is {value!r}")
            object.__setattr__(self, name, value)
        factors = (("times", times, 0.0), ("margin", margin, 0.0), ("most", most, 1.0))
        for name, factor, least in factors:
            if not _number(factor) or not least < factor:
                raise UsageError(f"Adaptive: {name} is a number above {least:g}; it is {factor!r}")
            object.__setattr__(self, name, float(factor))
        if learning_rate is not None and learning_rate not in RULES:
            rules = ", ".join(f'"{rule}"' for rule in RULES)
            raise UsageError(f"Adaptive: learning_rate is one of {rules}, or None; it is {learning_rate!r}")
        object.__setattr__(self, "learning_rate", learning_rate)
        self._check()

    def _check(self) -> None:
        if self.minimum >= self.maximum:
            raise UsageError(
                f"Adaptive: minimum={self.minimum} is not below maximum={self.maximum}; global_batch={self.minimum} "
                "is a batch that stays"
            )
        if not self.minimum <= self.start <= self.maximum:
            raise UsageError(
                f"Adaptive: start={self.start} does not lie between minimum={self.minimum} and maximum={self.maximum}"
            )
        for name in ("minimum", "maximum", "start"):
            size = getattr(self, name)
            if size % self.multiple:
                above = self.multiple * -(-size // self.multiple)
                raise UsageError(
                    f"Adaptive: {name}={size} is no multiple of {self.multiple}; {name}={above} is, and multiple= may "
                    f"be another: multiple={math.gcd(self.minimum, self.maximum, self.start)} divides all three"
                )
        if self.minimum * self.most < self.minimum + self.multiple:
            least = math.ceil(100 * (1 + self.multiple / self.minimum)) / 100
            raise UsageError(
                f"Adaptive: most={self.most:g} allows no size after {self.minimum}, as the next is "
                f"{self.minimum + self.multiple}; take most={least:g}, or multiple= smaller than {self.multiple}"
            )
        if len(self.sizes) > MOST_SIZES:
            raise UsageError(
                f"Adaptive: there are {len(self.sizes)} sizes from {self.minimum} to {self.maximum} by "
                f"multiple={self.multiple}, and {MOST_SIZES} at most; choose a larger multiple="
            )

    @property
    def sizes(self) -> range:
        """Every global batch that there may be, smallest first."""
        return range(self.minimum, self.maximum + 1, self.multiple)

    def nearest(self, size: int) -> int:
        """Return the size that is nearest to another one."""
        return min(self.sizes, key=lambda one: abs(one - size))

    def check_leaf(self, micro_batch: int, leaf: int) -> None:
        """Raise ConfigurationError unless every size is whole leaves of so many micro-batches, two of them at least."""
        size = micro_batch * leaf
        one = f"micro_batch={micro_batch}" if leaf == 1 else f"leaf={leaf} micro-batches of {micro_batch}"
        if self.multiple % size or self.minimum % size:
            raise ConfigurationError(
                f"{one} is no divisor of Adaptive's multiple={self.multiple} and minimum={self.minimum}, so that some "
                f"sizes would be no whole number of them; choose both as multiples of {size}"
            )
        if self.minimum < 2 * size:
            raise ConfigurationError(
                f"{one} leaves one of them in Adaptive's minimum={self.minimum}, and noise shows only between two; "
                f"minimum={2 * size} would do"
            )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
