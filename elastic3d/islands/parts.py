"""What of a generation an island works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from checkpointing.format.tiles import TensorSpec
from elastic3d.data import Batches
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.shard_request import ShardRequest
from elastic3d.port import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandParts:
    """The parts of one rank. specs: of the whole model, in its order, under `model/`. schedule: None for none."""

    assignment: Assignment
    mesh: Mesh
    plan: ShardRequest
    model: nn.Module
    specs: Sequence[TensorSpec]
    optimizer: torch.optim.Optimizer
    schedule: Any
    batches: Batches
