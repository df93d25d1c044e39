"""Parameters that every rank of a layer holds whole: how they are used, and what their gradients mean.

They are DTensors like the cut ones, so that FSDP, optimizers and clipping see one kind. A module's forward does not
know DTensors, however, so that it sees plain tensors while it runs. The gradient that comes back is taken as a part of
a sum (`summed`) or as the whole (`replicated`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from elastic3d.errors import ModelError
from elastic3d.parallel.tensor.styles import Style


class Copies:
    """One module's own parameters, plain while its forward runs. guessed: no pattern named the module."""

    def __init__(self, name: str, module: nn.Module, mesh: DeviceMesh, style: Style, *, guessed: bool) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            # Every rank has built the same values: nothing is sent.
            whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
            setattr(module, key, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        self._name, self._mesh, self._style = name, mesh, style
        self._unsure = {key for key, _ in module.named_parameters(recurse=False)} if guessed else set[str]()
        self._placement = Partial() if style is Style.SUMMED else Replicate()
        # Within forward, not by hooks: recomputation runs a block's forward again without them.
        module.forward = partial(self._run, module, module.forward)

    def _run(self, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        self._show(module)
        try:
            return forward(*args, **kwargs)
        finally:
            for key, _ in module.named_parameters(recurse=False):
                module.__dict__.pop(key, None)

    def _show(self, module: nn.Module) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            assert isinstance(parameter, DTensor)
            plain = parameter.to_local(grad_placements=[self._placement])
            if key in self._unsure and plain.requires_grad:
                plain.register_hook(partial(self._look, key))  # type: ignore[no-untyped-call]
            module.__dict__[key] = plain  # found before the parameter of this name, which stays registered

    def _look(self, key: str, gradient: torch.Tensor) -> None:
        """Compare a gradient between the ranks once: unequal ones are parts of a sum, equal ones are not."""
        if key not in self._unsure:
            return
        data: Any = gradient.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        mark = int.from_bytes(blake3(data).digest(7), "little") if data.any() else 0
        own = torch.tensor([mark], dtype=torch.int64, device=gradient.device)
        marks = own.new_empty(self._mesh.size())
        dist.all_gather_into_tensor(marks, own, group=self._mesh.get_group())
        if not bool(marks.any()):
            return  # zeros say nothing
        self._unsure.discard(key)
        alike = bool((marks == marks[0]).all())
        if alike == (self._style is Style.REPLICATED):
            return
        name, other = f"{self._name}.{key}".lstrip("."), Style.REPLICATED if alike else Style.SUMMED
        raise ModelError(
            f"parameter {name!r} is in no pattern of tensor=, and was taken for {str(self._style)!r}; but its gradient "
            f"is {'the same' if alike else 'another'} on each tensor-parallel rank: name its module in tensor= as "
            f"{str(other)!r}, or leave its layer whole"
        )


def settle(parameter: torch.Tensor) -> None:
    """Let the gradient of each micro-batch be summed over the ranks before it is added to the others.

    FSDP does the same if there is more than one replica: so the order of sums, and the bits, are the same.
    """

    def hook(gradient: Any) -> Any:
        assert isinstance(parameter, DTensor)
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            return gradient.redistribute(placements=parameter.placements)
        return gradient

    if parameter.is_floating_point():
        # A frozen one may be trained later on, and keeps its hook until then.
        trained = parameter.requires_grad
        parameter.requires_grad_(True).register_hook(hook)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trained)
