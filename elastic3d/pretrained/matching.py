"""Which tensor of a file is which of a model; what is missing, unexpected or unfit is said in one error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from checkpointing.format.tiles import TensorSpec
from elastic3d.errors import StateUnfit
from elastic3d.parallel.state import held_by_model
from elastic3d.pretrained import names
from elastic3d.pretrained.names import OF_A_RUN, Naming
from elastic3d.pretrained.renaming import Arrangement, arrange, conversions

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensors:
    """The parameters and persistent buffers of a whole model, whatever part of it a rank holds."""

    specs: Mapping[str, TensorSpec]
    """By the first name of each."""
    names: Mapping[str, tuple[str, ...]]
    """All names of each, by the first one."""
    computed: frozenset[str]
    """Names of buffers that are no part of the state."""
    conversions: tuple[Any, ...]
    """What transformers would do to files when it loads them."""
    ways: tuple[Naming, ...]
    """How files may name them."""
    may_lack: tuple[str, ...]
    """Regular expressions of the model's own for names that may be missing."""
    may_leave: tuple[str, ...]
    """Likewise for names that may be unexpected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Where each tensor of a model comes from. All names are first names, but those there."""

    there: Mapping[str, str]
    """The names there."""
    again: Mapping[str, tuple[str, ...]]
    """Further names there, of tied tensors that are there several times."""
    fresh: tuple[str, ...]
    """What is not there, and has its initial values."""
    left: tuple[str, ...]
    """Names there that are accepted as unexpected."""


def tensors_of(model: nn.Module) -> ModelTensors:
    """Return the tensors of a whole model, such as an outline of it."""
    state = {one.spec.key.removeprefix(OF_A_RUN): one.spec for one in held_by_model(model)}
    return ModelTensors(
        specs=state,
        names={first: all_names for first, all_names in names.names_of(model).items() if first in state},
        computed=frozenset(name for name, _ in model.named_buffers() if name not in state),
        conversions=conversions(model),
        ways=tuple(names.namings(model)),
        may_lack=names.ignored(model, "_keys_to_ignore_on_load_missing"),
        may_leave=names.ignored(model, "_keys_to_ignore_on_load_unexpected"),
    )


def as_loaded(model: ModelTensors, there: Mapping[str, TensorSpec]) -> Arrangement | None:
    """Return how transformers would arrange what is there, if the model then has more of it; None if it would not."""
    if not model.conversions:
        return None
    arrangement = arrange(model.conversions, there)
    every = list(model.names.values())
    before, after = (max(names.count(way, every, some) for way in model.ways) for some in (there, arrangement))
    return arrangement if after > before else None


def match(model: ModelTensors, there: Mapping[str, TensorSpec], accept: Sequence[str], source: str) -> Matched:
    """Return where each tensor comes from; StateUnfit, listing all that does not fit and is not accepted.

    there: the tensors of the source. accept: patterns of names that may be missing, and are initialised, or unexpected,
    and are left out. source: as the user named it.
    """
    way = names.best(model.ways, list(model.names.values()), there)
    where: dict[str, str] = {}
    again: dict[str, tuple[str, ...]] = {}
    fresh, missing, unfit, taken = [], [], [], set()
    for first, all_names in model.names.items():
        spec, found_there = model.specs[first], names.find(way, all_names, there)
        taken.update(found_there)
        shown = (*all_names, *map(names.plain_name, all_names))
        accepted = any(fnmatchcase(name, pattern) for name in shown for pattern in accept)
        fits = [name for name in found_there if _fits(there[name], spec)]
        if fits:
            where[first] = fits[0]
            if fits[1:]:
                again[first] = tuple(fits[1:])
        elif accepted or (not found_there and (names.is_added(first) or _any(model.may_lack, all_names))):
            fresh.append(first)
        elif found_there:
            unfit.append(f"{first} ({_look(there[found_there[0]])} there, {_look(spec)} here)")
        else:
            missing.append(way.name(first).removeprefix(way.place))
    computed = {way.name(name) for name in model.computed}
    others = [name for name in sorted(there) if name.startswith(way.place) and name not in taken | computed]
    others = [name for name in others if not name.endswith(names.COMPUTED) and not _any(model.may_leave, [name])]
    left = [n for n in others if any(fnmatchcase(n.removeprefix(way.place), p) or fnmatchcase(n, p) for p in accept)]
    unexpected = [name for name in others if name not in left]
    if not where:
        raise StateUnfit(
            f"weights={source!r}: none of the {len(there)} tensors there has a name of the model's, or a shape that "
            f"fits it. There are {_few(sorted(there))}; the model has {_few(list(model.specs))}. Trying again does not "
            "help: name the weights of a model of this kind"
        )
    problems = [
        f"{len(some)} {what}: {_few(some)}"
        for what, some in (
            ("are missing there", missing),
            ("there are not in the model", unexpected),
            ("differ in shape, or would be rounded", unfit),
        )
        if some
    ]
    if problems:
        raise StateUnfit(
            f"weights={source!r} do not fit the model. Of its {len(model.specs)} tensors {len(where)} are there; "
            f"{'; '.join(problems)}. Trying again does not help: name other weights, or allow what is meant by "
            'patterns of names, as run.shard(..., weights_accept=("lm_head.*",)) does: what the model lacks is left '
            "out, and what is missing, or of another shape, has the initial values that the seed gives it"
        )
    return Matched(there=where, again=again, fresh=tuple(fresh), left=tuple(left))


def is_exact(saved: str, wanted: torch.dtype) -> bool:
    """Return whether a dtype holds all values of a saved one: it is the same, or a wider one."""
    dtype = getattr(torch, saved, None)
    if dtype == wanted:
        return True
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point and wanted.is_floating_point):
        return False
    narrow, wide = torch.finfo(dtype), torch.finfo(wanted)
    return narrow.eps >= wide.eps and narrow.max <= wide.max and narrow.smallest_normal >= wide.smallest_normal


def _fits(there: TensorSpec, here: TensorSpec) -> bool:
    return there.shape == here.shape and is_exact(there.dtype, getattr(torch, here.dtype))


def _any(patterns: Iterable[str], some: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for name in some for pattern in patterns)


def _look(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _few(some: Sequence[str]) -> str:
    return ", ".join(some[:_SHOWN]) + (f" and {len(some) - _SHOWN} more" if len(some) > _SHOWN else "")
