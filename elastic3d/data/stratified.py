"""A data set with labels, of which each global batch has all labels in their proportions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from blake3 import blake3

from elastic3d.data.dataset_facts import ahead_of, fingerprint_of, is_numbered, name_of, prefetch
from elastic3d.data.strata import LONGEST, Strata, check_strata
from elastic3d.errors import UsageError


class Stratified:
    """A map-style data set whose samples are dealt to batches by label: `Stratified(dataset, labels=dataset.targets)`.

    labels: one for each sample, whole numbers or strings, at most 4,096 different ones.

    Every sample comes once per epoch, in any layout. Of n samples with a label among N, a global batch of B has
    B * n / N, rounded down or up; so a label too rare for each batch comes in evenly spaced ones. In the one batch in
    which an epoch ends and the next begins, each part has its own share, and a label's count there is less than four
    from B * n / N. Micro-batches, too, are near their shares. Where the global batch changes (`Growing`), what is said
    holds for every stretch of as many positions as the first step has.

    Its own numbers go label by label; `row[number]` is the number of the sample in `dataset`. Takes 4 bytes for each
    sample, and sorts the labels once in each process.
    """

    def __init__(self, dataset: Any, *, labels: Any) -> None:
        if not is_numbered(dataset):
            raise UsageError(
                f"Stratified needs a map-style data set, with len() and [index]; {type(dataset).__name__} is not one"
            )
        if isinstance(dataset, Stratified):
            raise UsageError("Stratified was given a data set that is stratified already; join the two labels into one")
        given = _labels(labels, len(dataset))
        values, numbers, sizes = np.unique(given, return_inverse=True, return_counts=True)
        self._dataset, self._values = dataset, values
        self.strata: Strata = tuple(sizes.tolist())
        check_strata(self.strata, len(dataset))
        self.row = np.argsort(numbers, kind="stable").astype(np.uint32)
        self._ends = list(accumulate(self.strata))
        # The sizes are part of the order; the row tells which samples they are.
        said = f"{fingerprint_of(dataset)} {values.tolist()} ".encode()
        self.fingerprint = blake3(said).update(np.ascontiguousarray(self.row).tobytes()).hexdigest()

    @property
    def labels(self) -> list[Any]:
        """The different labels, in the order of `strata`, which has the number of samples of each."""
        values: list[Any] = self._values.tolist()
        return values

    @property
    def lengths(self) -> Any:
        """The `lengths` of the data set's samples, by their numbers here; None if it has none."""
        given = getattr(self._dataset, "lengths", None)
        return None if given is None else self.renumbered(given)

    def renumbered(self, given: Any) -> Any:
        """Return what is known of each sample of `dataset`, a column or a function of its number, by the numbers here.

        A column of another length is returned as it is.
        """
        if callable(given):
            return lambda number: given(int(self.row[number]))
        column = np.asarray(given)
        return column[self.row] if column.shape == self.row.shape else column

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._ends[-1]

    def __getitem__(self, number: int) -> Any:
        """Return a sample by its number in the order of labels."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self._dataset[int(self.row[number])]

    @property
    def ahead(self) -> int:
        """Of how many samples `dataset` wants to know before they are due."""
        return ahead_of(self._dataset)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Tell `dataset` which samples are due next."""
        prefetch(self._dataset, [int(self.row[number]) for number in numbers])

    def name_of(self, number: int) -> str:
        """Return what a sample is called in `dataset`."""
        label = self.labels[bisect_right(self._ends, number)]
        return f"{name_of(self._dataset, int(self.row[number]))} (label {label!r})"


def _labels(labels: Any, length: int) -> Any:
    if not length:
        raise UsageError("Stratified: the data set is empty; it must hold one sample at least")
    if length > LONGEST:
        raise UsageError(f"Stratified: the data set has {length:,} samples; at most {LONGEST:,} can be stratified")
    try:
        array = np.asarray(labels)
    except ValueError as error:
        raise UsageError(f"Stratified: labels must be one for each of {length} samples: {error}") from error
    if array.shape != (length,):
        raise UsageError(
            f"Stratified: labels must be one for each of {length} samples; they are an array of shape "
            f"{list(array.shape)}"
        )
    if array.dtype.kind not in "biuUS":
        raise UsageError(
            f"Stratified: labels must be whole numbers or strings, not {array.dtype}; number the values, None and NaN "
            "included, if they are to be labels"
        )
    return array
