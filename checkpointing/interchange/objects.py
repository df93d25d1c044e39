"""The values of a state dict that are not tensors, and where its entries belong.

The format holds only tensors, so objects become tensors of uint8 under keys of their own:

| key | bytes |
|---|---|
| `object/json/KEY` | JSON, where that gives back an equal value of the same types |
| `object/data/KEY` | JSON of values that JSON does not know, such as numpy's arrays, as `plain` writes it |
| `object/torch/KEY` | anything else, as `torch.save` writes it: a pickle |
| `object/paths` | JSON: for each flat key the path to its place in the nested state dict |
| `object/ties` | JSON: lists of keys that are one tensor in memory |
| `object/names` | JSON: names of entries that cannot be keys of the format, by the keys that replace them |

A pickle is only ever read by torch's `weights_only` unpickler; what it refuses cannot be loaded, whoever wrote it. A
path is a list of steps: text is a key of a dict, a number an index of a list, `["key", n]` a number as a dict's key.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3

from checkpointing.errors import ForeignFormat, Unloadable
from checkpointing.interchange import plain

JSON = "object/json/"
DATA = "object/data/"
TORCH = "object/torch/"
PATHS = "object/paths"
TIES = "object/ties"
NAMES = "object/names"

LONGEST_NAME = 4000
"""The most characters of a name that can be a key as it is; keys of objects have some more."""

Step = str | int | list[Any]
Path = Sequence[Step]


def to_json(value: Any) -> bytes:
    """Return JSON in which dicts keep their order."""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which is text in Python but not in UTF-8
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def is_object(key: str) -> bool:
    """Return whether the key is reserved for an object."""
    return key.startswith((JSON, DATA, TORCH)) or key in (PATHS, TIES, NAMES)


def key_of(name: str) -> str:
    """Return the key of an entry of a state dict: its name, or one derived from it if that cannot be a key."""
    if name.isprintable() and len(name) <= LONGEST_NAME and not _MADE.fullmatch(name):
        return name
    return f"named/{blake3(name.encode(errors='surrogatepass')).hexdigest()}"


_MADE = re.compile("named/[0-9a-f]{64}")


def read_names(data: bytes) -> dict[str, str]:
    """Return the names stored under `object/names`, by key, if the key is derived from the name."""
    stored = json.loads(data)
    return {key: name for key, name in stored.items() if isinstance(name, str) and key_of(name) == key}


def name_of(key: str) -> str:
    """Return the object's own name."""
    return next((key.removeprefix(kind) for kind in (JSON, DATA, TORCH) if key.startswith(kind)), key)


def wrap(name: str, value: Any) -> tuple[str, bytes]:
    """Return the key and the bytes of an object."""
    if _plain(value):
        return JSON + name, to_json(value)
    return TORCH + name, saved(value)


def wrap_saved(name: str, data: bytes) -> tuple[str, bytes]:
    """Return the key and the bytes of an object that `torch.save` has written; unsafe ones are not loaded."""
    try:
        value = _load(data)
    except _REFUSED:
        return TORCH + name, data
    return (JSON + name, to_json(value)) if _plain(value) else (TORCH + name, data)


def wrap_plain(name: str, value: Any) -> tuple[str, bytes]:
    """Return the key and the bytes, without a pickle, of an object that `weights_only` does not accept.

    plain.NoPlainForm, a ValueError, names the class that has no such form.
    """
    return DATA + name, to_json(plain.encode(value))


def unwrap(key: str, data: bytes) -> Any:
    """Return the object under a key; Unloadable for a pickle that torch does not consider harmless."""
    if key.startswith(DATA):
        try:
            return plain.decode(json.loads(data))
        except plain.NotHere as error:
            raise Unloadable(f"{name_of(key)}: {error}") from error
        except (*_REFUSED, RecursionError) as error:
            raise Unloadable(f"{name_of(key)}: is not what elastic3d writes: {error}") from error
    if not key.startswith(TORCH):
        return json.loads(data)
    try:
        return _load(data)
    except _REFUSED as error:
        raise Unloadable(
            f"{name_of(key)}: is a pickle that torch refuses to load as data alone, so it is not loaded: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__} "
            "If you trust whoever saved it, allow its classes with torch.serialization.add_safe_globals and load again."
        ) from error


def loadable(key: str, data: bytes) -> bool:
    """Return whether `unwrap` would give the object back."""
    try:
        unwrap(key, data)
    except Unloadable:
        return False
    return True


def saved(value: Any) -> bytes:
    """Return the bytes that `torch.save` writes for a value."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


ON_DAMAGE = (
    RuntimeError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, struct.error
)  # fmt: skip
"""What `weights_only` passes on where a file is damaged; for what it does not allow it raises UnpicklingError."""

_REFUSED = (pickle.UnpicklingError, *ON_DAMAGE)


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _plain(value: Any) -> bool:
    """Return whether JSON gives the value back unchanged."""
    if value is None or type(value) in (bool, int):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is str:
        return encodable(value)
    if type(value) is list:
        return all(map(_plain, value))
    if type(value) is dict:
        return all(type(key) is str and encodable(key) and _plain(item) for key, item in value.items())
    return False


def encodable(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def flatten(state: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the leaves of a nested state dict under dotted keys, and the path of each.

    Keys are those of `torch.distributed.checkpoint`: dicts are always entered, lists only if tensors or dicts are
    inside. ForeignFormat for keys that are neither text nor whole numbers, or clash once they are joined.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, Path] = {}

    def walk(path: tuple[Step, ...], name: str, value: Any) -> None:
        items: Iterable[tuple[Step, str, Any]] | None = None
        if isinstance(value, Mapping) and value:
            items = [(_step(key, name), str(key), item) for key, item in value.items()]
        elif isinstance(value, list) and any(map(_holds, value)):
            items = [(number, str(number), item) for number, item in enumerate(value)]
        if items is None:
            if name in leaves:
                raise ForeignFormat(f"two entries of the state dict are called {name!r} once their keys are joined")
            leaves[name], paths[name] = value, path
            return
        for step, text, item in items:
            walk((*path, step), f"{name}.{text}" if path else text, item)

    if state:
        walk((), "", state)
    return leaves, paths


def _step(key: Any, name: str) -> Step:
    if type(key) is str:
        return key
    if type(key) is int:
        return ["key", key]
    raise ForeignFormat(f"{name or 'the state dict'}: has the key {key!r}; only text and whole numbers can be kept")


def _holds(value: Any) -> bool:
    if isinstance(value, torch.Tensor | Mapping):
        return True
    return isinstance(value, list) and any(map(_holds, value))


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """Return the nested state dict of `flatten`; keys without a path stay on top."""
    root: dict[Any, Any] = {}
    for name, value in leaves.items():
        path = paths.get(name, (name,))
        here: Any = root
        for step, following in zip(path, [*path[1:], None], strict=True):
            if following is None:
                _set(here, step, value)
            else:
                child = _get(here, step)
                if child is None:
                    child = [] if isinstance(following, int) else {}
                    _set(here, step, child)
                here = child
    return root


def _get(container: Any, step: Step) -> Any:
    if isinstance(step, int):
        return container[step] if step < len(container) else None
    return container.get(step[1] if isinstance(step, list) else step)


def _set(container: Any, step: Step, value: Any) -> None:
    if isinstance(step, int):
        container.extend([None] * (step + 1 - len(container)))
        container[step] = value
    else:
        container[step[1] if isinstance(step, list) else step] = value


def read_paths(data: bytes) -> dict[str, Path]:
    """Return the paths stored under `object/paths`; those that do not have the form above are left out."""
    stored = json.loads(data)
    return {name: path for name, path in stored.items() if path and all(map(_is_step, path))}


def read_ties(data: bytes) -> list[list[str]]:
    """Return the groups stored under `object/ties`; others are left out."""
    stored = json.loads(data)
    return [group for group in stored if isinstance(group, list) and all(isinstance(name, str) for name in group)]


def _is_step(step: Any) -> bool:
    if type(step) is int:
        return 0 <= step < 1 << 24
    return type(step) is str or (type(step) is list and len(step) == 2 and step[0] == "key" and type(step[1]) is int)


def plain_path(name: str, paths: Mapping[str, Path]) -> tuple[str | int, ...]:
    """Return the path of an entry in DCP's terms, which knows only text as keys."""
    return tuple(str(step[1]) if isinstance(step, list) else step for step in paths.get(name, (name,)))
