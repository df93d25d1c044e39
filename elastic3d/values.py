"""The values that cross every boundary of elastic3d: frozen, and readable as JSON.

`to_json` and `from_json` turn any of them into plain JSON data and back. Unknown fields are ignored on reading, so
that a newer writer can talk to an older reader of the same schema version.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from elastic3d.errors import LayoutError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes. As a request, an axis of 0 is free for the planner to choose.

    pp: pipeline stages. dp: data-parallel replicas. tp: tensor-parallel ranks. zero: ZeRO stage, 2 or 3.
    """

    pp: int = 0
    dp: int = 0
    tp: int = 1
    zero: int = 3

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "tp"):
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 0:
                raise LayoutError(f"layout: {axis} must be a whole number, 0 for free or 1 and more; it is {size!r}")
        if self.tp != 1:
            raise LayoutError(f"layout: tp={self.tp} is not supported yet; use tp=1")
        if self.zero not in (2, 3):
            raise LayoutError(f"layout: zero must be 2 or 3; it is {self.zero!r}")

    @property
    def world(self) -> int:
        """Number of ranks; 0 while an axis is free."""
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        return f"pp {self.pp} x dp {self.dp} x tp {self.tp}, ZeRO-{self.zero}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """What the planner needs of a model and its batches, measured before the first generation.

    digest names names, shapes, dtypes, the batch sizes and the seed: nodes whose digests differ run different jobs.
    """

    blocks: int
    parameters: int
    micro_batches: int
    micro_batch: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One device place of a node: where its keeper serves tiles, as a TCP port of the node's address."""

    tile_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine as a member: identity is (name, incarnation); ports belong to `address`."""

    name: str
    incarnation: str
    address: str
    slots: tuple[Slot, ...]
    heartbeat_port: int = 0
    store_port: int = 0
    labels: dict[str, str] = field(default_factory=dict)


class Cause(StrEnum):
    """Why a generation came to be."""

    START = "start"
    DEATH = "death"
    JOIN = "join"
    LEAVE = "leave"
    FAULT = "fault"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sealed (or, with attempt > 0 and under `proposal`, still proposed) membership.

    Rank r of the world is slot r % slots of active node r // slots. `attempt` tells proposals of one number apart.
    `job` is the digest of the model and batches all nodes must share. `tries` counts generations in a row that ended by
    the user's error or a dying trainer without a step of progress beyond `tried_at`.
    """

    number: int
    attempt: int = 0
    cause: Cause
    nodes: tuple[Node, ...]
    spares: tuple[Node, ...] = ()
    layout: Layout | None = None
    leader: str = ""
    detail: str = ""
    job: str = ""
    tries: int = 0
    tried_at: int = -1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return sum(len(node.slots) for node in self.nodes)

    @property
    def key(self) -> str:
        """A prefix for stores: two attempts never meet under one key."""
        return f"{self.number}.{self.attempt}"

    def first_rank(self, name: str, incarnation: str) -> int | None:
        """Return the rank of the node's first slot; None if the node is not active in this generation."""
        rank = 0
        for node in self.nodes:
            if node.name == name and node.incarnation == incarnation:
                return rank
            rank += len(node.slots)
        return None


def to_json(value: Any) -> Any:
    """Return `value` as plain JSON data (dict, list, str, int, float, bool, None)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, StrEnum):
        return value.value
    return value


def from_json(kind: type[T], data: Any) -> T:
    """Return the `kind` that `to_json` wrote as `data`; ValueError or TypeError where it does not fit."""
    return typing.cast(T, _read(kind, data))


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    # Evaluating annotations costs more than all the rest of reading a value.
    return typing.get_type_hints(kind)


def _read(kind: Any, data: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None:
            return None
        return _read(next(a for a in arguments if a is not type(None)), data)
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"expected a list, got {data!r}")
        return tuple(_read(arguments[0], item) for item in data)
    if origin is dict:
        if not isinstance(data, dict):
            raise ValueError(f"expected an object, got {data!r}")
        return {k: _read(arguments[1], v) for k, v in data.items()}
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise ValueError(f"expected an object for {kind}, got {data!r}")
        hints = _hints(typing.cast(type, kind))
        known = {f.name for f in dataclasses.fields(kind) if f.init}
        return kind(**{k: _read(hints[k], v) for k, v in data.items() if k in known})  # type: ignore[operator]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(data)
    if kind is Any:
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise ValueError(f"expected {kind.__name__}, got {data!r}")
    return data
