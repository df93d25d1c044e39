"""A nested checkpoint of another tool as tensors by name, and the rest as a skeleton in which they are missing.

DCP's own flattening turns the integer keys of optimizer states into texts, and leaves out what is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic3d.errors import StateUnfit

HOLE = "$tensor"
SKELETON = "skeleton/"


def taken_apart(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors by dotted names, and for each key at the top the skeleton of its value as "skeleton/<key>".

    Tensors are those given. One at several places is kept once.
    """
    flat: dict[str, Any] = {}
    places: dict[int, str] = {}
    for key, value in nested.items():
        flat[f"{SKELETON}{key}"] = _skeleton(value, key, flat, places)
    return flat


def put_together(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `taken_apart` was given."""
    skeletons = {key.removeprefix(SKELETON): value for key, value in flat.items() if key.startswith(SKELETON)}
    return {key: _filled(value, flat) for key, value in skeletons.items()}


def _skeleton(value: Any, path: str, flat: dict[str, Any], places: dict[int, str]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in places:
            # Keys may have dots, too, and two places may be called alike: the skeleton says which name is whose.
            name = f"~{path}" if path.startswith(SKELETON) else path
            while name in flat:
                name += "~"
            places[id(value)] = name
            flat[name] = value
        return {HOLE: places[id(value)]}
    if isinstance(value, Mapping):
        if HOLE in value:
            raise StateUnfit(f"{path} of the checkpoint has a key {HOLE!r}, which stands for a tensor here; rename it")
        return {key: _skeleton(item, f"{path}.{key}", flat, places) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_skeleton(item, f"{path}.{number}", flat, places) for number, item in enumerate(value))
    return value


def _filled(value: Any, flat: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if HOLE in value:
            return flat[value[HOLE]]
        return {key: _filled(item, flat) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_filled(item, flat) for item in value)
    return value
