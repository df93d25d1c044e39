"""A tensor-parallel plan: which modules of a model are cut, and how, by patterns over module names.

    tensor={
        "embedding": "split",
        "blocks.*.norm?": "sequence",
        "blocks.*.[qkv]": "column", "blocks.*.out": "row",
        "blocks.*.up": "column", "blocks.*.down": "row",
        "norm": "sequence",
        "head": "column-gathered",
    }

`column` cuts a module's output features and `row` its input features, so that the code between the two computes on a
part of the features, such as some of the heads of attention. The code between them must take sizes from what it is
given: heads by `view(batch, length, -1, head_size)`, never by their number. `proof` tests that.

A plan with `sequence` or `split` in it is *sequence parallel*: outside `column` and `row`, activations are cut along
dim 1, the sequence, whose length tp must divide. In other plans they are whole on each rank.

Parameters that no pattern names are whole on each rank as well. The meaning of their gradient depends on what they were
used with: with a part of an activation it is a part of a sum (`summed`), with a whole one it is the gradient
(`replicated`). They are taken as `summed` where activations are cut and as `replicated` elsewhere, which is checked in
a generation's first step; a pattern settles it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

from torch import nn

from elastic3d.errors import LayoutError, ModelError, UsageError

HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads", "n_heads", "n_kv_heads", "n_head")


class Style(StrEnum):
    """What tensor parallelism does with a module.

    column, row: as above; "-gathered" makes the output whole, "-split" takes a whole input. sequence: computes on parts
    of the sequence. gather: gets parts of the sequence and computes on the whole, for a module around several columns.
    split: computes on the whole and passes on parts of the sequence. summed, replicated: has whole parameters.
    """

    COLUMN = "column"
    COLUMN_GATHERED = "column-gathered"
    ROW = "row"
    ROW_SPLIT = "row-split"
    SEQUENCE = "sequence"
    GATHER = "gather"
    SPLIT = "split"
    SUMMED = "summed"
    REPLICATED = "replicated"

    @property
    def cuts(self) -> bool:
        """Whether each rank has a part of the parameters."""
        return self in (Style.COLUMN, Style.COLUMN_GATHERED, Style.ROW, Style.ROW_SPLIT)

    @property
    def column(self) -> bool:
        """Whether it cuts output features."""
        return self in (Style.COLUMN, Style.COLUMN_GATHERED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A plan that fits a model. styles: of modules by name. dims: cut dims of parameters by name; no entry for dim 0.

    divisor: what tp must divide; 0 if nothing is cut. limits: the (name, size) that it comes from.
    """

    styles: Mapping[str, Style]
    dims: Mapping[str, int]
    divisor: int
    limits: tuple[tuple[str, int], ...]

    @property
    def sequence(self) -> bool:
        """Whether activations between layers are cut along the sequence."""
        return any(style in (Style.SEQUENCE, Style.SPLIT) for style in self.styles.values())

    def guess(self, module: str) -> Style:
        """Return the style of a module's own parameters if no pattern names it."""
        whole = any(
            style in (Style.SPLIT, Style.REPLICATED) and f"{module}.".startswith(f"{name}.")
            for name, style in self.styles.items()
        )
        return Style.SUMMED if self.sequence and not whole else Style.REPLICATED

    def check(self, tp: int) -> None:
        """Refuse a tp that does not divide what is cut."""
        for name, size in self.limits:
            if size % tp:
                raise LayoutError(f"tp={tp} does not divide {name} ({size}); the model can be cut by {self.divisor}")


def scheme_of(
    model: nn.Module,
    plan: Mapping[str, str],
    layer_of: Callable[[str, Mapping[str, nn.Module]], str] = lambda name, modules: name,
) -> Scheme:
    """Return the scheme of a plan for the whole model, real or on meta; ModelError naming what does not fit.

    layer_of: returns the name of the layer that a module is a part of, such as one with adapters, or its own.
    """
    styles: dict[str, Style] = {}
    modules = dict(model.named_modules())
    for pattern, word in plan.items():
        style = _style(pattern, word)
        matching = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not matching:
            raise ModelError(f"tensor={{{pattern!r}: ...}} names no module of {type(model).__name__}{_near(modules)}")
        for name in matching:
            if styles.setdefault(name, style) is not style:
                raise ModelError(
                    f"module {name!r} is named by two patterns of tensor=, as {str(styles[name])!r} and "
                    f"{str(style)!r}; make one of them narrower"
                )
    dims: dict[str, int] = {}
    limits: list[tuple[str, int]] = []
    for name, style in styles.items():
        module = modules[name]
        if style.cuts:
            dims.update(_dims(name, module, style))
            limits += _heads(layer_of(name, modules), modules)
        elif style is Style.SEQUENCE and any("." in key for key, _ in module.named_parameters()):
            raise ModelError(
                f"module {name!r} ({type(module).__name__}) is 'sequence' in tensor=, which is for single layers such "
                "as norms, but has modules with parameters in it; name those"
            )
    sizes = dict(model.named_parameters(remove_duplicate=False))
    limits += [(f"dim {dim} of parameter {name!r}", sizes[name].shape[dim]) for name, dim in dims.items()]
    return Scheme(styles=styles, dims=dims, divisor=gcd(*(size for _, size in limits)), limits=tuple(limits))


def _style(pattern: str, word: str) -> Style:
    try:
        return Style(word)
    except ValueError:
        raise UsageError(
            f"tensor={{{pattern!r}: {word!r}}}: the styles are {', '.join(map(repr, map(str, Style)))}"
        ) from None


def _dims(name: str, module: nn.Module, style: Style) -> dict[str, int]:
    """Return the dims that torch's ColwiseParallel and RowwiseParallel cut."""
    if isinstance(module, nn.Embedding):
        return {f"{name}.weight": 1 if style.column else 0}
    if not isinstance(module, nn.Linear):
        raise ModelError(
            f"module {name!r} is a {type(module).__name__}, and {str(style)!r} is for Linear and Embedding alone; "
            "leave it out of tensor=, or build it from Linear layers"
        )
    if not style.column:
        return {f"{name}.weight": 1}
    return {f"{name}.{key}": 0 for key, _ in module.named_parameters(recurse=False)}


def _heads(name: str, modules: Mapping[str, nn.Module]) -> list[tuple[str, int]]:
    """Return the numbers of heads that the modules around a layer have as attributes."""
    parent = name.rpartition(".")[0]
    places: list[Any] = [modules[parent], getattr(modules[parent], "config", None)]
    sizes = [(key, getattr(place, key, None)) for place in places for key in HEADS]
    where = f"of module {parent!r}" if parent else "of the model"
    return [(f"{key} {where}", size) for key, size in sizes if isinstance(size, int) and size > 0]


def _near(modules: Mapping[str, nn.Module]) -> str:
    cut = [name for name, module in modules.items() if isinstance(module, nn.Linear | nn.Embedding)]
    return f"; those that can be cut are {', '.join(map(repr, cut[:12]))}{', ...' if len(cut) > 12 else ''}"
