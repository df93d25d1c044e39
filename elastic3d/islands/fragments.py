"""Which parameters are merged together: fragments, runs of neighbouring parameters of about equal size.

Fragment f of F is merged at the outer steps k with (k - 1) mod F = f, so that each has its turn every `every` steps.
They follow from the whole model alone, and are the same on every rank of every island.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from checkpointing.format.tiles import TensorSpec
from elastic3d.errors import UsageError


def fragments_of(specs: Iterable[TensorSpec], count: int) -> dict[str, int]:
    """Return the fragment of each parameter, by name; UsageError where one would be empty.

    specs: of all that is trained, in the model's order.
    """
    sizes = {spec.key: math.prod(spec.shape) * spec.itemsize for spec in specs}
    whole, before, homes = sum(sizes.values()), 0, {}
    for name, size in sizes.items():
        homes[name] = min(count - 1, (2 * before + size) * count // (2 * whole)) if whole else 0
        before += size
    missing = sorted(set(range(count)) - set(homes.values()))
    if missing:
        raise UsageError(
            f"elastic3d.Islands(fragments={count}): of this model's {len(sizes)} parameters, which are merged as "
            f"wholes, fragment {missing[0]} would have none; take fewer"
        )
    return homes


def turn_of(outer: int, count: int) -> int:
    """Return which fragment is merged at an outer step, from 1 on."""
    return (outer - 1) % count
