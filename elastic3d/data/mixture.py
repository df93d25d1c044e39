"""Several data sets as one, of which each step has given shares."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from elastic3d.data.dataset_facts import ahead_of, fingerprint_of, is_numbered, name_of, prefetch
from elastic3d.data.proportions import MixedSource, Proportions, stages_of
from elastic3d.data.stratified import Stratified
from elastic3d.errors import UsageError


class Mixture:
    """Data sets mixed by weights: `Mixture({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3})`.

    sources: map-style data sets by name. weights: of each source, summing to one; or a schedule, a list of pairs
    (from step, weights), whose steps begin with 0 and rise. A source that a stage does not name has none of it. linear:
    whether the weights go in a straight line from each stage to the next, instead of staying until it begins.

    In any layout, a step of B samples has B * weight of each source, rounded down or up, and who is rounded up changes
    from step to step. While weights and global batch stay, the totals are exact after every D steps, D being the common
    denominator of the shares; on a slope they stay within some samples of the sum of the shares. Each source is
    shuffled by itself, and has epochs of its own: each of its samples comes once before any comes again.

    A run that goes on may have other weights, and further sources after the old ones, from its present step on; those
    of steps that were made must stay as they were.
    """

    def __init__(self, sources: Mapping[str, Any], *, weights: Any, linear: bool = False) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise UsageError(
                f'Mixture: sources are data sets by name, as {{"web": web, "code": code}}, not {type(sources).__name__}'
            )
        for name, dataset in sources.items():
            _check(name, dataset)
        self._names, self._datasets = list(sources), list(sources.values())
        self._ends = list(accumulate(len(dataset) for dataset in self._datasets))
        self.proportions = Proportions(
            sources=tuple(
                MixedSource(name=name, length=len(dataset), fingerprint=fingerprint_of(dataset))
                for name, dataset in sources.items()
            ),
            stages=stages_of(weights, self._names),
            linear=bool(linear),
        )

    @property
    def lengths(self) -> Any:
        """The `lengths` of the samples of all sources, one source after the other; None if one of them has none."""
        every: list[Any] = [getattr(dataset, "lengths", None) for dataset in self._datasets]
        return None if any(one is None for one in every) else np.concatenate(every)

    def __len__(self) -> int:
        """Return the number of samples of all sources."""
        return self._ends[-1]

    def __getitem__(self, number: int) -> Any:
        """Return a sample by its number, counted one source after the other."""
        source, own = self._place(number)
        return self._datasets[source][own]

    @property
    def ahead(self) -> int:
        """Of how many samples its sources want to know before they are due."""
        return max(map(ahead_of, self._datasets))

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Tell each source which of its samples are due next."""
        places = [self._place(number) for number in numbers]
        for source, dataset in enumerate(self._datasets):
            prefetch(dataset, [own for at, own in places if at == source])

    def name_of(self, number: int) -> str:
        """Return what a sample is called in its source."""
        source, own = self._place(number)
        return f"{name_of(self._datasets[source], own)} (source {self._names[source]!r})"

    def _place(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        source = bisect_right(self._ends, number)
        return source, number - (self._ends[source - 1] if source else 0)


def _check(name: Any, dataset: Any) -> None:
    if not isinstance(name, str) or not name:
        raise UsageError(f"Mixture: a source is called by a name, not {name!r}")
    if isinstance(dataset, Mixture | Stratified):
        raise UsageError(
            f"Mixture: source {name!r} is a {type(dataset).__name__}, whose order would be lost; give its data sets "
            "themselves"
        )
    if not is_numbered(dataset):
        raise UsageError(
            f"Mixture: source {name!r} must be a map-style data set, with len() and [index]; {type(dataset).__name__} "
            "is not one"
        )
    if not len(dataset):
        raise UsageError(f"Mixture: source {name!r} is empty; leave it out, or give it samples")
