"""The units that FSDP2 shards and reduces: each block, and what is in no block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_units(
    model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, *, zero: int, policy: MixedPrecisionPolicy
) -> list[FSDPModule]:
    """Wrap each block and then the model in FSDP2 over a one-dimensional mesh; return the units, the model last."""
    units: list[FSDPModule] = []
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        units.append(module)
    return units


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """Return FSDP's parameter groups of a unit, which torch does not call public."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []
