"""What transformers would rename, or put together, when it loads files into its model: the same, without the bytes.

Its own list is asked, so that nothing of it is repeated here. Renaming is always followed. Tensors are put together
where they are stacked (the experts of a layer) or concatenated; anything else stays as it is in the files, and is then
refused by name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from checkpointing.format.tiles import Box, TensorSpec

_STACK, _CONCATENATE = "MergeModulelist", "Concatenate"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartThere:
    """A tensor of the files, and which box of a tensor of the model it is."""

    name: str
    """Its name in the files."""
    spec: TensorSpec
    """The tensor that it is a part of."""
    box: Box
    """Which part."""


Arrangement = Mapping[str, Sequence[PartThere]]
"""The parts of each tensor, by the name that the model has for it."""


def conversions(model: nn.Module) -> tuple[Any, ...]:
    """Return what transformers would do when it loads files into the model of it that this is or wraps; () for none."""
    listing = sys.modules.get("transformers.conversion_mapping")
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    inner = None if kind is None else next((module for module in model.modules() if isinstance(module, kind)), None)
    if listing is None or inner is None or not hasattr(listing, "get_model_conversion_mapping"):
        return ()  # an older transformers, which renames nothing in this way
    return tuple(listing.get_model_conversion_mapping(inner))


def arrange(steps: Sequence[Any], there: Mapping[str, TensorSpec]) -> Arrangement:
    """Return all tensors of files as transformers would name them, and put them together."""
    made: dict[str, list[PartThere]] = {}
    joined: dict[str, dict[str, tuple[Any, str]]] = {}
    for name, spec in there.items():
        renamed = name
        for step in steps:
            if not _operations(step):
                renamed = step.rename_source_key(renamed)[0]
        for step in steps:
            if _operations(step):
                target, pattern = step.rename_source_key(renamed)
                if pattern is not None:
                    joined.setdefault(target, {})[name] = (step, pattern)
                    break
        else:
            _add(made, renamed, name, spec)
    for target, sources in joined.items():
        parts = _joined(target, sources, there)
        if parts:
            made.setdefault(target, []).extend(parts)
        else:
            for name in sources:
                _add(made, name, name, there[name])
    return made


def _add(made: dict[str, list[PartThere]], target: str, name: str, spec: TensorSpec) -> None:
    whole = TensorSpec(key=target, dtype=spec.dtype, shape=spec.shape)
    made.setdefault(target, []).append(PartThere(name=name, spec=whole, box=whole.box))


def _operations(step: Any) -> list[Any]:
    return list(getattr(step, "operations", ()))


def _joined(
    target: str, sources: Mapping[str, tuple[Any, str]], there: Mapping[str, TensorSpec]
) -> list[PartThere] | None:
    """Return the parts of a tensor that is made of several; None where that is not stacking or concatenating."""
    step = next(iter(sources.values()))[0]
    kinds = [type(one).__name__ for one in _operations(step)]
    if kinds not in ([_STACK], [_STACK, _CONCATENATE], [_CONCATENATE]) or len(step.target_patterns) != 1:
        return None
    stacked = kinds[0] == _STACK
    if stacked and _operations(step)[0].dim != 0:
        return None
    dim = _operations(step)[-1].dim if kinds[-1] == _CONCATENATE else 0
    places: dict[tuple[int, int], str] = {}
    for name, (_, pattern) in sources.items():
        places[_number(name) if stacked else 0, step.source_patterns.index(pattern)] = name
    count, kinds_of_parts = len({one for one, _ in places}), range(len(step.source_patterns))
    if set(places) != {(one, kind) for one in range(count) for kind in kinds_of_parts} or len(places) != len(sources):
        return None
    shapes = [there[places[0, kind]].shape for kind in kinds_of_parts]
    dtype = there[places[0, 0]].dtype
    alike = all((there[name].shape, there[name].dtype) == (shapes[kind], dtype) for (_, kind), name in places.items())
    lead = (count,) if stacked else ()
    lengths = [(*lead, *shape)[dim] for shape in shapes] if len(shapes) > 1 else [0]
    if not alike or any(len(shape) != len(shapes[0]) for shape in shapes):
        return None
    whole = [*lead, *shapes[0]]
    if len(shapes) > 1:
        whole[dim] = sum(lengths)
    spec = TensorSpec(key=target, dtype=dtype, shape=tuple(whole))
    parts = []
    for (one, kind), name in sorted(places.items()):
        start, stop = [0] * len(whole), [*lead, *shapes[kind]]
        if stacked:
            start[0], stop[0] = one, one + 1
        if len(shapes) > 1:
            start[dim] = sum(lengths[:kind])
            stop[dim] = start[dim] + lengths[kind]
        parts.append(PartThere(name=name, spec=spec, box=Box(start=tuple(start), stop=tuple(stop))))
    return parts


def _number(name: str) -> int:
    """Return the number of an expert, which is the last of a name."""
    numbers: Iterable[str] = re.findall(r"\.(\d+)(?=\.)", name)
    return int(list(numbers)[-1]) if numbers else -1
