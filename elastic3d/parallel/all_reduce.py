"""One value from those of all ranks, for a script's metrics: gathered, and added up by each rank in the same order."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from elastic3d.errors import UsageError
from elastic3d.parallel.mesh import Mesh

OPS = ("sum", "mean", "max", "min")

LARGEST = 1 << 20
"""Bytes of a tensor, at most: every rank has those of all."""


def all_reduce(mesh: Mesh, value: float | torch.Tensor, op: str) -> float | torch.Tensor:
    """Return one value for those of all ranks, the same on each; a collective.

    Whole numbers are added exactly. Floats are added as if their exact sum were rounded once; tensors of floats in
    fp64, in the order of ranks, and rounded to their own dtype at the end. UsageError for anything else, on every rank
    where they do not agree.
    """
    if op not in OPS:
        raise UsageError(f"run.all_reduce: op is one of {', '.join(map(repr, OPS))}; {op!r} is none")
    if isinstance(value, torch.Tensor):
        return _tensor(mesh, value, op)
    if not isinstance(value, Real):
        raise UsageError(f"run.all_reduce: give a number or a tensor, and not {type(value).__name__}")
    mine = int(value) if isinstance(value, Integral) else float(value)
    return reduced(op, [json.loads(one) for one in _gathered(mesh, op, "a number", json.dumps(mine).encode())])


def reduced(how: str, values: Sequence[float]) -> float:
    """Return one number for several: their "sum", "mean", "max" or "min", which do not depend on their order.

    Whole numbers are added exactly, others as if their exact sum were rounded once. The mean of equal numbers is that
    number, to the last bit; a NaN among them makes the result NaN.
    """
    if any(isinstance(value, float) and math.isnan(value) for value in values):
        return math.nan
    if how in ("max", "min"):
        return max(values) if how == "max" else min(values)
    if how == "mean" and min(values) == max(values):
        return float(values[0])
    try:
        total = sum(values) if all(isinstance(value, int) for value in values) else math.fsum(values)
    except (OverflowError, ValueError):  # infinite, or on the way to it
        total = sum(values)
    return total / len(values) if how == "mean" else total


def _tensor(mesh: Mesh, value: torch.Tensor, op: str) -> torch.Tensor:
    if isinstance(value, DTensor) or value.is_complex() or value.dtype == torch.bool or value.is_meta:
        raise UsageError(
            f"run.all_reduce: a {'DTensor' if isinstance(value, DTensor) else f'tensor of {value.dtype}'} is not added "
            "up: give a plain tensor of real numbers, such as full_tensor() or mask.long()"
        )
    if op == "mean" and not value.is_floating_point():
        raise UsageError(f"run.all_reduce: the mean of {value.dtype} is none of its numbers: give value.double()")
    if value.nbytes > LARGEST:
        raise UsageError(
            f"run.all_reduce: a tensor of {value.nbytes} bytes is more than {LARGEST}: it is for metrics, and every "
            "rank is sent those of all others"
        )
    wide = torch.float64 if value.is_floating_point() else torch.int64
    mine = value.detach().to("cpu", wide).contiguous()
    kind = f"a tensor of {value.dtype} and shape {list(value.shape)}"
    said = _gathered(mesh, op, kind, mine.numpy().tobytes())
    parts = [torch.from_numpy(np.frombuffer(one, dtype=mine.numpy().dtype).copy()).view(mine.shape) for one in said]
    total = parts[0]
    for part in parts[1:]:
        match op:
            case "max":
                total = torch.maximum(total, part)
            case "min":
                total = torch.minimum(total, part)
            case _:
                total = total + part
    if op == "mean":
        total = total / len(parts)
    return total.to(value.device, value.dtype)


def _gathered(mesh: Mesh, op: str, kind: str, data: bytes) -> list[bytes]:
    """Return every rank's bytes; UsageError on every rank where they are not of one kind and for one operation."""
    head = f"{kind} to be reduced by {op!r}"
    said = [one.split(b"\n", 1) for one in mesh.gather(head.encode() + b"\n" + data)]
    for rank, (theirs, _) in enumerate(said):
        if theirs != said[0][0]:
            raise UsageError(
                f"run.all_reduce: rank 0 gave {said[0][0].decode()}, and rank {rank} {theirs.decode()}; make the same "
                "call on every rank"
            )
    return [data for _, data in said]
