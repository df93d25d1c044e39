"""Stand-ins for the modules of other pipeline stages, among which a stage runs the model's own forward.

The first block's takes the activation that arrived from the stage before: whatever forward computed to get there was
computed on the first stage, and here on blanks. The one after the last block of the stage ends forward: what comes
after it is computed on later stages. Those of modules before the blocks return blanks: zeros of the shapes and dtypes
of what these modules return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

ARRIVED = "elastic3d_arrived"
"""Under this name the activation is given to a stage, so that hooks on the stage see it among its inputs."""

Role = Callable[[Any], Any]
"""Returns what a stand-in returns for a first argument."""


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor whose values nobody uses."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def filled(self, device: torch.device) -> torch.Tensor:
        """Return zeros, which forward may write to."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    def spread(self, device: torch.device) -> torch.Tensor:
        """Return zeros in the memory of one."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)

    def alike(self, other: Blank) -> bool:
        """Return whether another blank is of this shape, dims of 1 aside, and of this dtype."""
        if self.dtype != other.dtype or len(self.shape) != len(other.shape):
            return False
        return all(one in (1, two) for one, two in zip(self.shape, other.shape, strict=True))

    def beside(self, proven: Sequence[int], now: Sequence[int]) -> Blank:
        """Return the blank beside an activation of another shape than the proven one: dims that are alike follow it."""
        shape = list(self.shape)
        for dim, (own, was, size) in enumerate(zip(self.shape, proven, now, strict=False)):
            shape[dim] = size if own == was else own
        return Blank(tuple(shape), self.dtype)


def blank_of(value: Any) -> Any:
    """Return a value with blanks for its tensors."""
    return tree_map(_blank, value)


def filled(blanks: Any, device: torch.device) -> Any:
    """Return a value with zeros for its blanks."""
    return tree_map(lambda leaf: leaf.filled(device) if isinstance(leaf, Blank) else leaf, blanks)


def _blank(leaf: Any) -> Any:
    return Blank(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The structure of a module's output. leaves: plain values and blanks. hole: where the chain's tensor is."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    hole: int

    def around(self, tensor: torch.Tensor, device: torch.device) -> Any:
        """Return `tensor` as the module would have returned it, among zeros for other tensors."""
        leaves = [leaf.spread(device) if isinstance(leaf, Blank) else leaf for leaf in self.leaves]
        leaves[self.hole] = tensor
        return tree_unflatten(leaves, self.spec)

    def blank(self, device: torch.device) -> Any:
        """Return zeros as the module would have returned its tensors."""
        return tree_unflatten(filled(list(self.leaves), device), self.spec)

    def has(self, other: Template) -> bool:
        """Return whether another template has this structure, with blanks that can be read as this one's.

        A dim of 1 may have become another one: such blanks are spread over it.
        """
        if (self.spec, self.hole, len(self.leaves)) != (other.spec, other.hole, len(other.leaves)):
            return False
        return all(
            one.alike(two) if isinstance(one, Blank) and isinstance(two, Blank) else one == two
            for one, two in zip(self.leaves, other.leaves, strict=True)
        )

    def beside(self, proven: Sequence[int], now: Sequence[int]) -> Template:
        """Return the template beside an activation of shape `now`, where one of shape `proven` was seen."""
        leaves = (leaf.beside(proven, now) if isinstance(leaf, Blank) else leaf for leaf in self.leaves)
        return replace(self, leaves=tuple(leaves))


def template_of(output: Any, hole: int = 0) -> Template | None:
    """Return the template of an output; None for one that is not of tensors and plain values alone."""
    leaves, spec = tree_flatten(output)
    if not all(leaf is None or isinstance(leaf, torch.Tensor | bool | int | float | str) for leaf in leaves):
        return None
    return Template(leaves=tuple(map(blank_of, leaves)), spec=spec, hole=hole)


class Absent(nn.Module):
    """Stands in for a module of another stage: returns the first argument, until it is given another role."""

    def __init__(self, role: Role | None = None) -> None:
        super().__init__()
        self.role: Role = role or (lambda first: first)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return what the role makes of the first argument, positional or by name."""
        return self.role(first_of(args, named))


def first_of(args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the first argument of a call; None if it has none."""
    return args[0] if args else next(iter(named.values()), None)


class Reached(BaseException):
    """Forward came to the first block of the next stage, with this activation. recorded: whether by autograd."""

    def __init__(self, activation: torch.Tensor) -> None:
        super().__init__()
        self.activation, self.recorded = activation, torch.is_grad_enabled()


def leave(first: Any) -> Any:
    """End forward: the role of the first block of the next stage."""
    raise Reached(first)


@dataclass(slots=True, kw_only=True)
class Enters:
    """What the stand-ins before a later stage's blocks return.

    shape: that of a whole activation when the chain was proven. The one that arrives may be a part of a sequence, as
    the first stage then computes on one too. template: how the first block returns it. device: where to compute.
    """

    shape: tuple[int, ...]
    template: Template | None
    device: torch.device
    arrived: torch.Tensor | None = None

    def activation(self, _first: Any) -> Any:
        """Return the activation that arrived, as the first block would."""
        assert self.arrived is not None, "a later stage of a pipeline was run without an activation"
        return self.arrived if self.template is None else self.around(self.template, self.arrived)

    def around(self, template: Template, tensor: torch.Tensor) -> Any:
        """Return what a block before the stage's own would return with this activation."""
        return template.beside(self.shape, tensor.shape).around(tensor, self.device)

    def blank(self, template: Template, _first: Any) -> Any:
        """Return what a module before the blocks would, without its values."""
        assert self.arrived is not None, "a later stage of a pipeline was run without an activation"
        return template.beside(self.shape, self.arrived.shape).blank(self.device)


def run_between(module: nn.Module, enters: Enters | None, *, ends: bool) -> None:
    """Have a stage's forward take the activation given as ARRIVED, if `enters`, and return the one that leaves it.

    ends: whether a block of the next stage is to end it.
    """
    forward = module.forward

    @wraps(forward)
    def run(*args: Any, **named: Any) -> Any:
        arrived = named.pop(ARRIVED, None)
        if enters is not None:
            enters.arrived = arrived
        try:
            output = forward(*args, **named)
        except Reached as reached:
            return reached.activation
        finally:
            if enters is not None:
                enters.arrived = None
        assert not ends, "forward ended on a stage before it came to the blocks of the next one"
        return output

    vars(module)["forward"] = run
