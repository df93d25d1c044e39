"""The state of an object of the script's own, taken apart into tensors and plain values, and put together again.

A state is what `state_dict()` returned: dictionaries, lists and tuples around tensors and values. A tensor's key is
the way to it, `extra/<name>/<key>/<key>...`; everything else goes into the facts, which are equal on all ranks.
Dictionaries that have tensors alone leave nothing there, so that ranks whose stages differ may have different ones.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from checkpointing.interchange.tensors import DTYPES, dtype_name
from elastic3d.errors import StateUnfit
from elastic3d.parallel import facts

PREFIX = "extra/"

_VALUE, _EMPTY, _DICT, _LIST, _TUPLE = "value", "empty", "dict", "list", "tuple"
_LONGEST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """A state taken apart. tensors: by key. plain: what else there is, as JSON data, None for nothing."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    plain: Any = None


def key_of(name: str, steps: Iterable[str] = ()) -> str:
    """Return the key of what is found by these steps in the state of that name."""
    return "/".join((PREFIX + name, *steps))


def name_of(key: str) -> str:
    """Return the name of the object whose state has this key, "" where it is of none."""
    return key.removeprefix(PREFIX).partition("/")[0] if key.startswith(PREFIX) else ""


def taken_apart(name: str, state: Any) -> Apart:
    """Return the tensors and the plain values of a state; StateUnfit, saying where, for what cannot be kept."""
    tensors: dict[str, torch.Tensor] = {}
    return Apart(plain=_node(state, name, (), f"extra[{name!r}]", tensors), tensors=tensors)


def put_together(name: str, plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state that `taken_apart` took apart; StateUnfit where a list lacks one of its tensors."""
    tree: Any = {}
    for key, tensor in tensors.items():
        steps = key.removeprefix(key_of(name)).split("/")[1:]
        if not steps:
            return tensor
        at = tree
        for step in steps[:-1]:
            at = at.setdefault(step, {})
        at[steps[-1]] = tensor
    return _joined(plain, tree, f"extra[{name!r}]")


def alike(state: Any, now: Any) -> Any:
    """Return a state with what is of a class of its own in `now` of the same class, and tensors in their order.

    Neither is kept: a defaultdict is written as a dict, a named tuple as a tuple and an enum as its value, and a
    checkpoint has tensors in the order of their names. now: the state that the object has before it takes this one;
    what is not there stays as it is, as does what is no value of the enum there, or has other fields.
    """
    if isinstance(now, Enum):
        with suppress(ValueError):
            return type(now)(state)
    if type(state) in (list, tuple) and isinstance(now, list | tuple):
        return _alike_in_turn(state, now)
    if not isinstance(state, dict) or not isinstance(now, dict):
        return state
    first = [key for key in now if key in state] if _has_tensor(state) else []
    ordered = {key: alike(state[key], now.get(key)) for key in dict.fromkeys([*first, *state])}
    if type(now) is dict:
        return ordered
    same = copy.copy(now)
    same.clear()
    same.update(ordered)
    return same


def _alike_in_turn(state: list[Any] | tuple[Any, ...], now: list[Any] | tuple[Any, ...]) -> Any:
    if isinstance(state, tuple) and isinstance(now, torch.Size):
        return torch.Size(state)
    named = isinstance(state, tuple) and hasattr(now, "_make") and len(state) == len(now)
    if not named and facts.as_they_are(now):
        return state
    items = [alike(item, there) for item, there in zip(state, now, strict=False)]
    return type(now)._make(items) if named else type(state)([*items, *state[len(now) :]])  # type: ignore[union-attr]


def classes(value: Any, where: str) -> Iterator[tuple[str, type]]:
    """Give the places of a state that are of a class of their own, which only `alike` gives back, and that class."""
    if isinstance(value, Enum | torch.Size) or hasattr(value, "_make") or _is_dict_of_its_own(value):
        yield where, type(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from classes(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple) and not facts.as_they_are(value):
        for i, item in enumerate(value):
            yield from classes(item, f"{where}[{i}]")


def _is_dict_of_its_own(value: Any) -> bool:
    return isinstance(value, dict) and type(value) not in (dict, Counter)


def entries(name: str, plain: Any) -> dict[str, Any]:
    """Return the plain values of a state by what a person calls them, one level deep."""
    where = f"extra[{name!r}]"
    if plain is None:
        return {}
    ((kind, inner),) = plain.items()
    if kind == _DICT:
        return {f"{where}[{_said(step)!r}]": child for step, child in inner}
    if kind == _VALUE and isinstance(inner, dict) and not any(key.startswith("$") for key in inner):
        return {f"{where}[{key!r}]": value for key, value in inner.items()}
    return {where: inner}


def spelled(key: str) -> str:
    """Return a key as a person would write it: `extra['ema']['module.head.weight']`."""
    name, *steps = key.removeprefix(PREFIX).split("/")
    return f"extra[{name!r}]" + "".join(f"[{_said(step)!r}]" for step in steps)


def _node(value: Any, name: str, steps: tuple[str, ...], where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        _check_tensor(value, where)
        if not value.numel():
            return {_EMPTY: [dtype_name(value.dtype), list(value.shape)]}
        tensors[key_of(name, steps)] = value
        return None
    if not _has_tensor(value):
        return {_VALUE: facts.encode(value, where)}
    if isinstance(value, dict):
        children = []
        for key, item in value.items():
            if not _is_name(key):
                raise StateUnfit(
                    f"{where} has the key {key!r} beside tensors, which is neither a number nor a printable text of at "
                    f"most {_LONGEST} characters. Trying again does not help: name what is kept"
                )
            step = _step(key)
            child = _node(item, name, (*steps, step), f"{where}[{key!r}]", tensors)
            if child is not None:
                children.append([step, child])
        return {_DICT: children} if children else None
    if type(value) not in (list, tuple):
        raise StateUnfit(
            f"{where} is {type(value).__name__} and has tensors in it, which cannot be written down. Trying again does "
            "not help: use lists and dictionaries there"
        )
    children = [_node(item, name, (*steps, _step(i)), f"{where}[{i}]", tensors) for i, item in enumerate(value)]
    return {_TUPLE if isinstance(value, tuple) else _LIST: children}


def _check_tensor(tensor: torch.Tensor, where: str) -> None:
    why = ""
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            why = "has ranks' parts of a sum, which are not added up"
    elif tensor.layout != torch.strided or tensor.is_quantized:
        why = f"is a tensor of the layout {tensor.layout}" if not tensor.is_quantized else "is a quantized tensor"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        why = f"is {type(tensor).__name__}, a tensor of its own kind"
    if not why and dtype_name(tensor.dtype) is None:
        why = f"is a tensor of {tensor.dtype}, which checkpoints do not know"
    if why:
        raise StateUnfit(f"{where} {why}: that cannot be kept. Trying again does not help: keep plain, dense tensors")


def _is_name(key: Any) -> bool:
    if isinstance(key, str):
        return key.isprintable() and len(key) <= _LONGEST
    return isinstance(key, int) and not isinstance(key, bool)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_tensor(item) for item in value.values())
    if isinstance(value, list | tuple):
        return not facts.as_they_are(value) and any(_has_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def _joined(plain: Any, tree: Any, where: str) -> Any:
    if plain is None:
        if isinstance(tree, dict):
            return {_said(step): _joined(None, below, where) for step, below in tree.items()}
        return tree
    ((kind, inner),) = plain.items()
    if kind == _VALUE:
        return facts.decode(inner)
    if kind == _EMPTY:
        return torch.empty(inner[1], dtype=DTYPES[inner[0]])
    if kind == _DICT:
        there = {_said(step): _joined(child, tree.get(step, {}), where) for step, child in inner}
        rest = {step: below for step, below in tree.items() if _said(step) not in there}
        return {**there, **{_said(step): _joined(None, below, where) for step, below in rest.items()}}
    items = []
    for i, child in enumerate(inner):
        if child is None and _step(i) not in tree:
            raise StateUnfit(
                f"{where} keeps tensors in a list, of which this rank lacks number {i} in the state. Trying again does "
                "not help: name them by the keys of a dictionary"
            )
        items.append(_joined(child, tree.get(_step(i), {}), where))
    return tuple(items) if kind == _TUPLE else items


def _step(key: str | int) -> str:
    """Return a key of a dictionary, or a number of a list, as a part of a tensor's key."""
    if isinstance(key, int):
        return f"#{key}"
    text = key.replace("%", "%25").replace("/", "%2F")
    return f"%23{text[1:]}" if text.startswith("#") else text or "%"


def _said(step: str) -> str | int:
    """Return what `_step` has written."""
    if step.startswith("#"):
        return int(step[1:])
    return "" if step == "%" else step.replace("%23", "#").replace("%2F", "/").replace("%25", "%")
