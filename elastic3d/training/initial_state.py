"""What a rank begins with besides its weights, to be put back where a state that was read turns out to be damaged.

Tiles are read straight into the model's tensors and those of the optimizer: what comes before the damaged one is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from elastic3d.parallel.state import local, persistent_buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialState:
    """buffers: the model's values, by name. optimizer: tensors by parameter, in whose place a state has others."""

    buffers: dict[str, torch.Tensor]
    optimizer: dict[torch.Tensor, dict[str, Any]]

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Self:
        """Return that of a model and an optimizer to which nothing was loaded yet."""
        return cls(
            buffers={name: local(buffer).clone() for name, buffer in persistent_buffers(model)},
            optimizer={parameter: dict(state) for parameter, state in optimizer.state.items()},
        )

    def put_back(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give it to them again."""
        for name, buffer in persistent_buffers(model):
            local(buffer).copy_(self.buffers[name])
        optimizer.state.clear()
        optimizer.state.update({parameter: dict(state) for parameter, state in self.optimizer.items()})
