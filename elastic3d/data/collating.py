"""Samples made into the pair (input, target) of one micro-batch: the unit that every layout computes alike.

A sample is a pair (input, target), or a dictionary whose entry `labels` is the target and whose other entries are the
input, as data sets for transformers have them. Samples of one shape are stacked; what a script's own `collate` makes of
the samples of a micro-batch, such as padding them to the longest, is taken as it is. It sees whole micro-batches and
nothing else, so that its result does not depend on the layout.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate, get_worker_info

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

    def pair(self, samples: Sequence[Any], name: Callable[[int], str]) -> Pair:
        """Return the samples of a micro-batch as one pair (input, target).

        name: of a sample, for people, by its place among them. UsageError for what makes none, naming the sample that
        does not fit.
        """
        if self.own is None:
            return _stacked(samples, name)
        last = len(samples) - 1
        with naming(lambda: f"collate= of {name(0)}{f' to {name(last)}' if last else ''}"):
            return _parted(self.own(list(samples)), lambda: "what collate= returns")


def _stacked(samples: Sequence[Any], name: Callable[[int], str]) -> Pair:
    made: list[Any] = []
    with naming(lambda: name(len(made))):
        for sample in samples:
            made.append(_as_tensors(sample))
    pairs = [_parted(sample, partial(name, place)) for place, sample in enumerate(made)]
    if _are_alike(pairs):
        inputs, targets = zip(*pairs, strict=True)
        return torch.stack(inputs), torch.stack(targets)
    first, *others = [_outline(pair) for pair in pairs]
    for place, other in enumerate(others, start=1):
        if other != first:
            raise UsageError(
                f"the samples of a micro-batch must be of one shape, but {name(place)} is {_spelled(other)} and "
                f"{name(0)} is {_spelled(first)}; pad or cut them, say how as run.batches(..., collate=), or pack "
                "texts of several lengths with elastic3d.Packed"
            )
    inputs, targets = default_collate(pairs)
    return inputs, targets


def _are_alike(pairs: Sequence[Pair]) -> bool:
    """Return whether all are of plain tensors of one shape, and made where no worker's memory is shared.

    That is most data sets. torch's default_collate does the same with them, and takes longer to find out that it can.
    """
    (first_input, first_target), *_ = pairs
    if get_worker_info() is not None or not (_is_plain(first_input) and _is_plain(first_target)):
        return False
    shape, target_shape = first_input.shape, first_target.shape
    for given, target in pairs[1:]:
        if not (_is_plain(given) and _is_plain(target) and given.shape == shape and target.shape == target_shape):
            return False
    return True


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested


def _as_tensors(sample: Any) -> Any:
    """Return a dictionary with its lists of numbers as tensors: to stack them is not to transpose them."""
    if not isinstance(sample, Mapping):
        return sample
    return {key: torch.as_tensor(value) if _numbers(value) else value for key, value in sample.items()}


def _numbers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_numbers, value))
    return isinstance(value, bool | int | float | np.number)


def _parted(made: Any, what: Callable[[], str]) -> Pair:
    """Return a pair (input, target) as such; UsageError for what is none. what: of it, for people."""
    if isinstance(made, list | tuple) and len(made) == 2:
        return _plain(made[0]), _plain(made[1])
    if isinstance(made, Mapping):
        for name in TARGETS:
            if name in made:
                return {key: _plain(value) for key, value in made.items() if key != name}, _plain(made[name])
        raise UsageError(
            f"{what()} is a dictionary without an entry {TARGETS[0]!r}, which would be the target; it has "
            f"{', '.join(map(repr, made)) or 'nothing'}. Name the target so, or return a pair (input, target)"
        )
    size = f" of {len(made)}" if isinstance(made, list | tuple) else ""
    raise UsageError(
        f"each sample of the data set, and each result of collate=, must be a pair (input, target), or a dictionary "
        f"with an entry {TARGETS[0]!r}; {what()} is {type(made).__name__}{size}"
    )


def _plain(half: Any) -> Any:
    """Return an input or a target with dictionaries in place of UserDicts, in which nobody looks for tensors."""
    return dict(half) if isinstance(half, UserDict) else half


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


def _outline(pair: Pair) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return by the way to it which shape each part of an input, and of a target, has."""
    return _shapes(pair[0]), _shapes(pair[1])


def _shapes(value: Any, way: str = "") -> dict[str, Any]:
    if isinstance(value, torch.Tensor | np.ndarray):
        return {way: tuple(value.shape)}
    if isinstance(value, dict) and value:
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple) and value:
        items = enumerate(value)
    else:
        return {way: type(value).__name__}
    return {inner: shape for key, item in items for inner, shape in _shapes(item, f"{way}[{key!r}]").items()}


def _spelled(outline: tuple[dict[str, Any], dict[str, Any]]) -> str:
    shown = [
        (way, str(list(leaf)) if isinstance(leaf, tuple) else leaf) for half in outline for way, leaf in half.items()
    ]
    return ", ".join(f"{way} {leaf}".lstrip() for way, leaf in shown)
