"""Tensor parallelism of layers that peft's LoRA has adapted: the layer is cut as the plan says, and so are its factors.

Such a layer computes base(x) + B(A(x)) times a number. Where `base` is cut over its outputs B is too, and A is whole;
where it is cut over its inputs A is too, and B is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from elastic3d.errors import ModelError
from elastic3d.parallel.tensor.styles import Style

_FIRST, _SECOND = "lora_A", "lora_B"


def within_adapters(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return a plan that names what is inside adapted layers, and inside copies that are trained whole.

    ModelError, by name, for adapters that cannot be cut.
    """
    modules = dict(model.named_modules())
    if not any(_is_adapted(module) or _copies(module) for module in modules.values()):
        return dict(plan)
    made: dict[str, str] = {}
    for pattern, style in plan.items():
        matching = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not any(_is_adapted(modules[name]) or _copies(modules[name]) for name in matching):
            made[pattern] = style
            continue
        for name in matching:
            # A pattern also matches what is inside of the layers that it means.
            if not any(_is_adapted(modules[outer]) or _copies(modules[outer]) for outer in _around(name)):
                made |= dict(_inside(name, modules[name], style))
    adapted = [name for name, module in modules.items() if _is_adapted(module)]
    if adapted and any(style in (Style.SEQUENCE, Style.SPLIT, Style.GATHER) for style in made.values()):
        raise ModelError(
            f"module {adapted[0]!r} is adapted by peft, and tensor= cuts activations along the sequence, which "
            "adapters are not built for. Trying again does not help: give a plan of 'column' and 'row' alone, or tp=1"
        )
    return made


def place_of_layer(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the name of the adapted layer that a module is in, or its own name."""
    return next((outer for outer in _around(name) if _is_adapted(modules[outer])), name)


def _inside(name: str, module: nn.Module, style: str) -> Iterator[tuple[str, str]]:
    copies = _copies(module)
    if copies:
        for inner in copies:
            yield f"{name}.{inner}", style
        return
    if not _is_adapted(module):
        yield name, style
        return
    _check(name, module)
    yield f"{name}.base_layer", style
    for factor, cut in ((_FIRST, style in (Style.ROW, Style.ROW_SPLIT)), (_SECOND, _cuts_outputs(style))):
        for adapter in getattr(module, factor):
            yield f"{name}.{factor}.{adapter}", style if cut else Style.REPLICATED


def _cuts_outputs(style: str) -> bool:
    return style in (Style.COLUMN, Style.COLUMN_GATHERED)


def _check(name: str, module: nn.Module) -> None:
    base: Any = module.get_submodule("base_layer")
    first, dropouts = getattr(module, _FIRST, None), getattr(module, "lora_dropout", None)
    others = [key for key, _ in module.named_parameters() if key.split(".")[0] not in ("base_layer", _FIRST, _SECOND)]
    why = ""
    if not isinstance(first, nn.ModuleDict) or others or not isinstance(base, nn.Linear):
        what = f"has {others[0]}" if others else f"is a {type(module).__name__} over a {type(base).__name__}"
        why = f"it {what}, and only LoRA's two factors over a Linear layer can be"
    elif isinstance(dropouts, nn.ModuleDict) and any(isinstance(one, nn.Dropout) for one in dropouts.values()):
        why = "it has lora_dropout, which would drop other features on each rank; use lora_dropout=0"
    if why:
        raise ModelError(
            f"module {name!r} is adapted by peft and cannot be cut by tensor=: {why}. Trying again does not help: "
            "change the adapter's configuration, leave the module out of tensor=, or use tp=1"
        )


def _is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer with adapters."""
    return "base_layer" in module._modules and bool(getattr(type(module), "adapter_layer_names", ()))


def _copies(module: nn.Module) -> list[str]:
    """Return the modules inside one of which peft trains a copy; [] for any other module."""
    if "original_module" not in module._modules or "modules_to_save" not in module._modules:
        return []
    return ["original_module", *(f"modules_to_save.{name}" for name, _ in module.modules_to_save.named_children())]  # type: ignore[union-attr]


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around one, the innermost first."""
    while name := name.rpartition(".")[0]:
        yield name
