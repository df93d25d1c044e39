"""States that tests save, and how to compare them."""

from __future__ import annotations

from typing import Any

import torch

from checkpointing.interchange.tensors import DTYPES


def every_dtype() -> dict[str, torch.Tensor]:
    """Return a tensor of each dtype of the format, of random bytes."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, dtype in DTYPES.items():
        size = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, size, (3, 4 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        tensors[name] = raw.view(dtype)
    return tensors


def nested() -> dict[str, Any]:
    """Return a state as scripts save it: nested, with views, ties, scalars, empty tensors, and objects."""
    table = torch.arange(24.0).reshape(4, 6)
    tied = torch.randn(5, generator=torch.Generator().manual_seed(1))
    return {
        "model": {
            "table": table,
            "turned": table.t(),
            "part": table[1:3, 2:5],
            "tied": tied,
            "again": tied,
            "weight": torch.nn.Parameter(torch.ones(2, 2)),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "none": torch.empty(0, 3),
            "größe": torch.tensor(3.5),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(4.0)}, 1: {"step": torch.tensor(5.0)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "rng": [torch.arange(3), None],
        "epoch": 3,
        "nothing": {},
    }


def as_dcp_has_it(state: Any) -> Any:
    """Return nested state as DCP keeps it: integer keys as text, without empty dicts."""
    if isinstance(state, dict):
        return {str(key): as_dcp_has_it(value) for key, value in state.items() if value != {}}
    return [as_dcp_has_it(value) for value in state] if isinstance(state, list) else state


def same(left: Any, right: Any, where: str = "state") -> None:
    """Compare nested states bit for bit."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), where
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert raw(left) == raw(right), where
        return
    assert type(left) is type(right), where
    if isinstance(left, dict):
        assert set(left) == set(right), where
        for key in left:
            same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            same(one, other, f"{where}.{number}")
    else:
        assert left == right, where


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
