"""Experts spread over data-parallel ranks: of n ranks, rank i owns the i-th n-th of each layer's experts, whole.

Names do not change: an expert of another rank is replaced by a module without parameters, and where a layer keeps all
experts in one parameter, as transformers does, that is cut over dim 0. FSDP leaves them alone. An expert's gradient is
already the sum over the tokens of all ranks: tokens arrive with the scale of their loss, and nothing is reduced.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from elastic3d.errors import LayoutError, ModelError, UsageError
from elastic3d.parallel.experts.dispatch import Dispatch
from elastic3d.parallel.experts.layer import Experts
from elastic3d.parallel.numerics.precision import Precision
from elastic3d.parallel.refusals import OutsidePromise
from elastic3d.parallel.scope import Scope
from elastic3d.port import UNRECORDED, Progress
from elastic3d.values import Layout, Schedule


class Elsewhere(nn.Module):
    """Stands for an expert of another rank; it never runs."""


def find(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return the layers of experts by name; `*` in the pattern stands for one part of a name.

    ModelError if there is none, or one cannot be spread.
    """
    wanted = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    layers = {name: module for name, module in model.named_modules() if wanted.fullmatch(name)}
    if not layers:
        raise ModelError(
            f"experts={pattern!r}: no such module in {type(model).__name__}; give a path such as 'blocks.*.mlp.experts'"
        )
    for name, module in layers.items():
        if not isinstance(module, Experts) and not _fused(module):
            raise ModelError(
                f"experts={pattern!r}: {name!r} ({type(module).__name__}) cannot be spread. What can is "
                "elastic3d.parallel.experts.Experts, a ModuleList that is called with tokens, chosen experts and their "
                "weights, and modules of transformers called so that keep all experts in parameters of num_experts rows"
            )
    return layers


def number_of(module: nn.Module) -> int:
    """Return how many experts a layer has."""
    return len(module) if isinstance(module, Experts) else int(module.num_experts)  # type: ignore[arg-type]


def check(model: nn.Module, pattern: str, layout: Layout, precision: Precision) -> list[str]:
    """Return the names of the layers of experts, with a warning; LayoutError where they cannot be spread so."""
    layers = find(model, pattern)
    warnings.warn(
        f"experts={pattern!r}: experts see the tokens of all data-parallel ranks at once, so the bits depend on dp; "
        "leave experts= out to keep the promise, with every expert sharded like any other parameter",
        OutsidePromise,
        stacklevel=2,
    )
    if precision.dtype is not None:
        raise LayoutError("experts= trains the experts in the dtype they are built in; leave precision at fp32")
    if layout.tp > 1 or layout.replicas > 1:
        raise LayoutError(f"{layout}: experts= needs tp 1 and one replica of the sharded state")
    if layout.schedule not in (None, Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        raise LayoutError(
            f"{layout}: experts= needs the schedule gpipe or 1f1b; {layout.schedule.value} has not been proved to "
            "exchange tokens in the same order on every rank"
        )
    for name, module in layers.items():
        if number_of(module) % layout.dp:
            raise LayoutError(
                f"{layout}: the {number_of(module)} experts of {name!r} cannot be spread evenly over dp={layout.dp}; "
                "let dp divide them"
            )
    return list(layers)


class Spread:
    """The experts in one rank's part of a model. To be made before parameters are filled."""

    def __init__(
        self,
        model: nn.Module,
        names: Collection[str],
        mesh: DeviceMesh | None,
        progress: Progress = UNRECORDED,
    ) -> None:
        self._progress = progress
        self._layers = {name: module for name, module in model.named_modules() if mesh is not None and name in names}
        self._mesh = mesh
        for module in self._layers.values():
            if isinstance(module, Experts):
                own = self._own(module)
                for number in range(len(module)):
                    if number not in own:
                        module[number] = Elsewhere()

    def install(self, scope: Scope) -> set[nn.Parameter]:
        """Do so for the layers of a part of the model that is filled; return the parameters FSDP is to ignore in it.

        Fused parameters are cut, and each layer exchanges its tokens from then on.
        """
        here = [module for name, module in self._layers.items() if scope.holds(name)]
        for module in here:
            assert self._mesh is not None
            own = self._own(module)
            run: Callable[..., torch.Tensor]
            if isinstance(module, Experts):
                run = partial(module.each, numbers=own)
            else:
                run = partial(_run_fused, module, type(module).forward)
                for name, whole in list(module.named_parameters(recurse=False)):
                    mine = whole.detach()[own.start : own.stop].clone()
                    part = DTensor.from_local(mine, self._mesh, [Shard(0)], run_check=False)
                    setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
            vars(module)["forward"] = Dispatch(
                run, experts=number_of(module), group=self._mesh.get_group(), progress=self._progress
            )
        return {parameter for module in here for parameter in module.parameters()}

    def check_step(self, layout: Layout, micro_batches: int, leaf: int) -> None:
        """Refuse a step in which a rank would run a micro-batch that does not count: its tokens would reach experts."""
        if self._layers and micro_batches // leaf % layout.dp:
            what = "micro-batches" if leaf == 1 else f"leaves of {leaf} micro-batches"
            raise LayoutError(
                f"{layout}: with experts=, dp must divide the {micro_batches // leaf} {what} of a step; choose another "
                "micro_batch, or leave experts= out"
            )

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer with both experts and shards update parameter by parameter, since torch cannot mix them."""
        for number, group in enumerate(optimizer.param_groups if self._layers else ()):
            if len({isinstance(parameter, DTensor) for parameter in group["params"]}) < 2 or "foreach" not in group:
                continue
            if group["foreach"]:
                raise UsageError(
                    f"{type(optimizer).__name__}(foreach=True) cannot update experts together with sharded parameters, "
                    f"as group {number} wants; leave foreach out, or give the experts a group of their own"
                )
            group["foreach"] = False

    def present(self) -> set[str]:
        """Return the names of experts' parameters that have a gradient here; fused ones always do."""
        names = set()
        for path, module in self._layers.items():
            for name, parameter in module.named_parameters():
                if parameter.grad is None and not isinstance(module, Experts) and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
                if parameter.grad is not None:
                    names.add(f"{path}.{name}")
        return names

    def _own(self, module: nn.Module) -> range:
        assert self._mesh is not None
        share = number_of(module) // self._mesh.size()
        first = self._mesh.get_local_rank() * share
        return range(first, first + share)


def _fused(module: nn.Module) -> bool:
    number, parameters = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    inner = any(True for child in module.children() for _ in child.parameters())
    return bool(parameters) and not inner and all(p.dim() > 1 and p.shape[0] == number for p in parameters)


def _run_fused(
    module: Any, forward: Callable[..., torch.Tensor], rows: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    """Run a fused layer on rows for this rank's experts only, as if there were no others."""
    if not rows.shape[0]:
        return rows
    index = torch.arange(len(counts), device=rows.device).repeat_interleave(torch.tensor(counts, device=rows.device))
    whole, number = dict(module._parameters), module.num_experts
    module._parameters.update({name: part.to_local() for name, part in whole.items()})
    module.num_experts = len(counts)
    try:
        return forward(module, rows, index.unsqueeze(1), rows.new_ones(len(index), 1))
    finally:
        module._parameters.update(whole)
        module.num_experts = number
