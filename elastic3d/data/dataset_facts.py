"""What a data set says of itself, where it says anything: a fingerprint, its samples' names, and what it fetches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blake3 import blake3
from torch.utils.data import IterableDataset

WORDS = 200
"""Most characters of a fingerprint that is kept unhashed: it goes into every snapshot."""


def is_numbered(dataset: Any) -> bool:
    """Return whether a data set is map-style, with len() and [index]."""
    has = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return has and not isinstance(dataset, IterableDataset)


def fingerprint_of(dataset: Any) -> str:
    """Return the `fingerprint` of a data set, as a digest if it is long; "" for one that has none."""
    said = str(getattr(dataset, "fingerprint", ""))
    return said if len(said) <= WORDS else blake3(said.encode()).hexdigest()


def name_of(dataset: Any, number: int) -> str:
    """Return what people call a sample: by the data set's own `name_of`, if it numbers the samples of others."""
    own = getattr(dataset, "name_of", None)
    return str(own(number)) if own is not None else f"sample {number} of the data set"


def ahead_of(dataset: Any) -> int:
    """Return of how many samples a data set wants to know before they are due, to fetch them; 0 for none."""
    said = getattr(dataset, "ahead", 0) if hasattr(dataset, "prefetch") else 0
    return said if isinstance(said, int) else 0


def prefetch(dataset: Any, numbers: Sequence[int]) -> None:
    """Tell a data set which samples it will be asked for next in this process, nearest first, if it wants to know."""
    if ahead_of(dataset):
        dataset.prefetch(numbers)
