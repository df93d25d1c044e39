"""Samples made into the pair (input, target) of one micro-batch: the unit that every layout computes alike.

A sample is a pair (input, target), or a dictionary whose entry `labels` is the target and whose other entries are the
input, as data sets for transformers have them. Samples of one shape are stacked; what a script's own `collate` makes of
the samples of a micro-batch, such as padding them to the longest, is taken as it is. It sees whole micro-batches and
nothing else, so that its result does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves
from torch.utils.data import default_collate

from elastic3d.data.making import naming
from elastic3d.errors import UsageError

Collate = Callable[[list[Any]], Any]
"""Makes the samples of one micro-batch into a pair (input, target), or a dictionary with `labels`."""

Pair = tuple[Any, Any]

TARGETS = ("labels", "label")
"""Entries of a dictionary that are the target: the second as some data sets have it, and transformers renames it."""


@dataclass(frozen=True, slots=True)
class Collating:
    """How samples are made into micro-batches. own: the script's function for it, None for the usual one."""

    own: Collate | None = None

    def __post_init__(self) -> None:
        if self.own is not None and not callable(self.own):
            raise UsageError(
                f"run.batches: collate= takes a function of a list of samples, not {type(self.own).__name__}"
            )

    def pair(self, samples: Sequence[Any], names: Sequence[str]) -> Pair:
        """Return the samples of a micro-batch as one pair (input, target).

        names: of the samples, for people. UsageError for what makes none, naming the sample that does not fit.
        """
        if self.own is None:
            return _stacked(samples, names)
        with naming(lambda: f"collate= of {names[0]}{f' to {names[-1]}' if len(names) > 1 else ''}"):
            return _parted(self.own(list(samples)), "what collate= returns")


def _stacked(samples: Sequence[Any], names: Sequence[str]) -> Pair:
    pairs = []
    for name, sample in zip(names, samples, strict=True):
        with naming(lambda: name):  # noqa: B023
            made = _as_tensors(sample)
        pairs.append(_parted(made, name))
    first, *others = [_outline(pair) for pair in pairs]
    for name, other in zip(names[1:], others, strict=True):
        if other != first:
            raise UsageError(
                f"the samples of a micro-batch must be of one shape, but {name} is {_spelled(other)} and {names[0]} is "
                f"{_spelled(first)}; pad or cut them, say how as run.batches(..., collate=), or pack texts of several "
                "lengths with elastic3d.Packed"
            )
    inputs, targets = default_collate(pairs)
    return inputs, targets


def _as_tensors(sample: Any) -> Any:
    """Return a dictionary with its lists of numbers as tensors: to stack them is not to transpose them."""
    if not isinstance(sample, Mapping):
        return sample
    return {key: torch.as_tensor(value) if _numbers(value) else value for key, value in sample.items()}


def _numbers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_numbers, value))
    return isinstance(value, bool | int | float | np.number)


def _parted(made: Any, what: str) -> Pair:
    """Return a pair (input, target) as such; UsageError for what is none."""
    if isinstance(made, Mapping):
        for name in TARGETS:
            if name in made:
                return {key: value for key, value in made.items() if key != name}, made[name]
        raise UsageError(
            f"{what} is a dictionary without an entry {TARGETS[0]!r}, which would be the target; it has "
            f"{', '.join(map(repr, made)) or 'nothing'}. Name the target so, or return a pair (input, target)"
        )
    if isinstance(made, list | tuple) and len(made) == 2:
        return made[0], made[1]
    size = f" of {len(made)}" if isinstance(made, list | tuple) else ""
    raise UsageError(
        f"each sample of the data set, and each result of collate=, must be a pair (input, target), or a dictionary "
        f"with an entry {TARGETS[0]!r}; {what} is {type(made).__name__}{size}"
    )


def digest_of(pair: Pair | None) -> str:
    """Return a digest of the tensors and numbers of a micro-batch; names of files may be others on each machine."""
    digest = blake3()
    for leaf in tree_leaves(pair):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            plain = leaf.detach().cpu().contiguous()
            digest.update(repr((plain.dtype, tuple(plain.shape))).encode())
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update((repr(leaf) if isinstance(leaf, bool | int | float) else type(leaf).__name__).encode())
    return digest.hexdigest()[:32]


def _outline(sample: Any) -> tuple[TreeSpec, tuple[Any, ...]]:
    leaves, structure = tree_flatten(sample)
    return structure, tuple(
        tuple(leaf.shape) if isinstance(leaf, torch.Tensor | np.ndarray) else type(leaf).__name__ for leaf in leaves
    )


def _spelled(outline: tuple[TreeSpec, tuple[Any, ...]]) -> str:
    return ", ".join(str(list(leaf)) if isinstance(leaf, tuple) else leaf for leaf in outline[1])
