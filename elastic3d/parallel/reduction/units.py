"""The units that FSDP2 shards and reduces: each block, and everything that is in no block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from elastic3d.parallel.reduction.flat import Flat


def shard_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    zero: int,
    policy: MixedPrecisionPolicy,
    ignored: Iterable[nn.Parameter] = (),
) -> FSDPModule:
    """Wrap a block, or the model around blocks that are wrapped already, in FSDP2.

    mesh: an axis to shard over, or two for HSDP, replicas and shards. ZeRO-1 and 2 keep parameters whole within a step.
    ignored: parameters that are neither sharded nor reduced.
    """
    fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy, ignored_params=set(ignored))
    assert isinstance(module, FSDPModule)
    if zero != 3:
        # Parameters are whole in all backward passes of a step. FSDP would prefetch by the order of all its forward
        # passes, and gather in the last one what it has just let go of: in vain, and alone where others go on.
        module.set_modules_to_backward_prefetch([module])
    return module


def flats_of(
    model: nn.Module, units: Sequence[FSDPModule], make: Callable[[Any, dict[int, str], str], Flat] = Flat
) -> list[Flat]:
    """Return the vectors of gradients of all units that have parameters, under the model's names for them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules = {id(module): name for name, module in model.named_modules()}
    return [make(group, names, modules[id(unit)]) for unit in units for group in parameter_groups(unit)]


def settle_each(units: Sequence[FSDPModule], flats: Sequence[Flat]) -> None:
    """Have the vectors of units settle the gradients of their parameters, from the first forward pass on."""
    for unit in units:
        groups = set(map(id, parameter_groups(unit)))
        waiting = [flat for flat in flats if flat.is_cut and id(flat.group) in groups]
        if not waiting:
            continue

        def gathered(*_: Any, waiting: list[Flat] = waiting) -> None:
            while waiting:
                waiting.pop().settle()

        assert isinstance(unit, nn.Module)
        # It runs after FSDP's own hook, which gathers.
        unit.register_forward_pre_hook(gathered)


@contextmanager
def kept_whole(units: Iterable[FSDPModule]) -> Iterator[None]:
    """Have parameters that ZeRO-3 gathers for each pass stay until `reshard`, in forward passes alone."""
    held = list(units)
    for unit in held:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in held:
            unit.set_reshard_after_forward(True, recurse=False)


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters, which a forward pass without a backward has left."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reduce_now(units: Sequence[FSDPModule]) -> None:
    """Do what FSDP does at the end of a backward pass, where autograd's hooks did not run; the root is the last unit.

    torch's own pipeline stages do the same, by methods that torch does not call public.
    """
    for unit in reversed(units):
        for group in parameter_groups(unit):
            group.post_backward()
    root: Any = units[-1]._get_fsdp_state()
    root._root_post_backward_final_callback()


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """Return torch's own objects for a unit's parameters, which are gathered together."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []
