"""Reading many small tensors of a device: one copy, for each one by itself would wait for all the device's work."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the numbers of each tensor as a float64 vector on the CPU; they are of dtypes that float64 holds."""
    flat = [tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors]
    away = [vector for vector in flat if vector.device.type != "cpu"]
    if not away:
        return flat
    copied = iter(torch.split(torch.cat(away).cpu(), [vector.numel() for vector in away]))
    return [vector if vector.device.type == "cpu" else next(copied) for vector in flat]
