"""How a model names its tensors, and how files name them: with peft's wrapping or without, below a base model or not.

A state of ours has a model's own names below `model/`, whatever was wrapped around the model. Hugging Face's files have
the names of the model without peft, with the base model's prefix (`model.layers.0...`) or, if the base model alone was
saved, without it (`layers.0...`). `torch.save` and DCP often have all of that below `model.`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

OF_A_RUN = "model/"
"""Where a state of ours has the model."""
PLACES = ("", OF_A_RUN, "model.", "module.", "state_dict.", "model_state_dict.")
"""Where other tools put the model, preferred ones first."""

PEFT = "base_model.model."
"""What peft puts before the names of the model that it wraps."""
_ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.")
_ADDED = re.compile(r"(^|\.)(lora_[A-Za-z_]+|ia3_\w+|vera_\w+|hada_\w+|lokr_\w+|oft_\w+|boft_\w+|prompt_encoder)(\.|$)")

COMPUTED = "rotary_emb.inv_freq"
"""End of names that older versions of transformers saved, and that any version computes from the configuration."""


def is_added(name: str) -> bool:
    """Return whether peft has added a parameter of this name: the model that it wraps does not have it."""
    return _ADDED.search(name) is not None


def plain_name(name: str) -> str:
    """Return the name that a parameter of a model wrapped by peft has in the model itself; others as they are.

    The copies that peft makes of modules to be trained whole (`modules_to_save`) have the name of the original.
    """
    return _ADAPTED.sub(".", name.removeprefix(PEFT))


def base_prefix(model: nn.Module) -> str:
    """Return the place of the base model in a model of transformers, such as `model.`; "" where there is none.

    It is within the model that peft wraps, if it does. For a base model itself it is the place that it would have.
    """
    for _, module in model.named_modules():
        prefix = vars(type(module)).get("base_model_prefix") or getattr(type(module), "base_model_prefix", "")
        if isinstance(prefix, str) and prefix:
            return f"{prefix}."
    return ""


def ignored(model: nn.Module, attribute: str) -> tuple[str, ...]:
    """Return the regular expressions of a model of transformers for names that may be missing, or unexpected.

    attribute: `_keys_to_ignore_on_load_missing` or `_keys_to_ignore_on_load_unexpected`.
    """
    for _, module in model.named_modules():
        patterns: Any = getattr(type(module), attribute, None)
        if patterns:
            return tuple(map(str, patterns))
    return ()


def names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter and persistent buffer, by the first one; tied ones have several."""
    first: dict[int, str] = {}
    names: dict[str, tuple[str, ...]] = {}
    for prefix, module in model.named_modules():
        own = [*module._parameters.items(), *module._buffers.items()]
        for key, tensor in own:
            if tensor is None or key in module._non_persistent_buffers_set:
                continue
            name = f"{prefix}.{key}".lstrip(".")
            known = first.setdefault(id(tensor), name)
            names[known] = (*names.get(known, ()), name)
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """One way in which files may name a model's tensors."""

    place: str = ""
    """Before all names there."""
    plain: bool = False
    """Whether names there are without peft's wrapping."""
    drop: str = ""
    """The base model's prefix, where it is not there."""
    add: str = ""
    """The base model's prefix, where it is there and the model is the base model alone."""

    def name(self, name: str) -> str:
        """Return how the tensor of this name in the model is called there."""
        if self.plain:
            name = plain_name(name)
        if self.drop:
            name = name.removeprefix(self.drop)
        return f"{self.place}{self.add}{name}"


def namings(model: nn.Module) -> Iterator[Naming]:
    """Yield the ways in which files may name a model's tensors, preferred ones first."""
    wrapped = any(name.startswith(PEFT) for name, _ in model.named_parameters())
    prefix = base_prefix(model)
    # A base model alone has it before none of its names.
    inside = any(plain_name(name).startswith(prefix) for name, _ in model.named_parameters())
    for place in PLACES:
        for plain in (False, True) if wrapped else (False,):
            yield Naming(place=place, plain=plain)
            if prefix:
                yield Naming(place=place, plain=plain, **{"drop" if inside else "add": prefix})


def best(ways: Sequence[Naming], names: Collection[Sequence[str]], there: Collection[str]) -> Naming:
    """Return the first of the ways under which most tensors are there. names: all names of each tensor."""
    return max(ways, key=lambda way: count(way, names, there))


def count(way: Naming, names: Collection[Sequence[str]], there: Collection[str]) -> int:
    """Return how many tensors are there."""
    return sum(any(way.name(name) in there for name in one) for one in names)


def find(way: Naming, names: Sequence[str], there: Mapping[str, Any] | Collection[str]) -> list[str]:
    """Return the names there that a tensor with these names in the model has."""
    return [name for name in dict.fromkeys(map(way.name, names)) if name in there]
