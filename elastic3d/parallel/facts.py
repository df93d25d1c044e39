"""State other than tensors, to JSON and back without losing a bit: hyperparameters, schedules, the ledger.

Finite floats keep their bits in JSON: Python reads their decimal form back exactly. Values that JSON does not know are
written as an object with one key that begins with `$`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import torch

from elastic3d.errors import StateUnfit

_AS_THEY_ARE = frozenset((bool, int, str, type(None)))


def as_they_are(values: Iterable[Any]) -> bool:
    """Return whether JSON has all these values as they are; at the speed of C, since a list may be a long one."""
    return _AS_THEY_ARE.issuperset(map(type, values))


def encode(value: Any, where: str) -> Any:
    """Return `value` as plain JSON data; StateUnfit, saying where it is, if it cannot be written down."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list):
        if as_they_are(value):
            return list(value)
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if type(value) is dict and all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: encode(item, f"{where}[{k!r}]") for k, item in value.items()}
        pairs = [[encode(k, where), encode(item, f"{where}[{k!r}]")] for k, item in value.items()]
        return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
    if isinstance(value, torch.Tensor) and not value.dim() and value.device.type == "cpu":
        return {"$scalar": [str(value.dtype).removeprefix("torch."), encode(value.item(), where)]}
    raise StateUnfit(
        f"{where} is {type(value).__name__}, which is no state that can be written down as JSON. Trying again does not "
        "help: use numbers, strings, lists and dictionaries there, or build it anew in main"
    )


def decode(data: Any) -> Any:
    """Return the value that `encode` turned into `data`."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((kind, inner),) = data.items()
        if kind == "$float":
            return float(inner)
        if kind == "$tuple":
            return tuple(decode(item) for item in inner)
        if kind in ("$dict", "$counter"):
            pairs = {decode(k): decode(item) for k, item in inner}
            return Counter(pairs) if kind == "$counter" else pairs
        if kind == "$scalar":
            return torch.tensor(decode(inner[1]), dtype=getattr(torch, inner[0]))
    return {k: decode(item) for k, item in data.items()}


def optimizer_groups(optimizer: torch.optim.Optimizer) -> Any:
    """Return the hyperparameters of every parameter group, which are the same on every rank."""
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups
    ]
    return [encode(group, f"optimizer.param_groups[{i}]") for i, group in enumerate(groups)]


def set_optimizer_groups(optimizer: torch.optim.Optimizer, data: Any, *, besides: Collection[str] = ()) -> None:
    """Give an optimizer the saved hyperparameters, besides some that it keeps."""
    if len(data) != len(optimizer.param_groups):
        raise StateUnfit(
            f"the saved state has {len(data)} parameter groups and this optimizer {len(optimizer.param_groups)}; make "
            "the same groups in the same order, also those that are empty on this stage"
        )
    for group, saved in zip(optimizer.param_groups, data, strict=True):
        group.update({name: value for name, value in decode(saved).items() if name not in besides})


def schedule_state(schedule: Any) -> Any:
    """Return a learning-rate schedule's state; None without one."""
    return None if schedule is None else encode(schedule.state_dict(), f"{type(schedule).__name__}.state_dict()")


def set_schedule_state(schedule: Any, data: Any) -> None:
    """Give a schedule the saved state; StateUnfit if one of the two is missing."""
    if (schedule is None) != (data is None):
        there, here = ("no schedule", "one") if data is None else ("a schedule", "none")
        raise StateUnfit(f"the saved state has {there} and run.restore was given {here}; give it what was saved")
    if schedule is not None:
        schedule.load_state_dict(decode(data))
