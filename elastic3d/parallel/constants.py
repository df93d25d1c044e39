"""The values of tensors on meta that are computed from shapes alone, for forwards that look at such values.

Models look at positions and masks that they have made themselves, for instance to choose an attention kernel. Tensors
on meta that depend on no parameter and no input get a twin on the CPU, on which every operation is repeated; when
forward asks for a number, it comes from the twin. Tensors that depend on parameters or inputs have no twin, and asking
fails as always on meta.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

LARGEST = 1 << 24  # elements of a twin


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the twins of the tensors that are made while the mode is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The tensors are kept alive with their twins, so that their ids are not reused.
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor on meta, None if they are not known."""
        return self._twins[id(tensor)][1] if id(tensor) in self._twins else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = all(id(tensor) in self._twins for tensor in given) and _repeatable(func)
        if not known or not (given or _on_meta(kwargs)):
            if func._schema.is_mutable:
                self._forget(given)
            return func(*args, **kwargs)
        real = func(*tree_map(self._twin, args), **tree_map(self._twin, kwargs))
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(real)):
            return real
        out = func(*args, **kwargs)
        for tensor, twin in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and twin.numel() <= LARGEST:
                self._twins[id(tensor)] = (tensor, twin)
        return out

    def _twin(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._twins[id(leaf)][1]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        """Forget whatever shares memory with these tensors: something unknown may have been written into them."""
        places = {self._twins[id(t)][1].untyped_storage()._cdata for t in tensors if id(t) in self._twins}
        self._twins = {key: pair for key, pair in self._twins.items() if pair[1].untyped_storage()._cdata not in places}


def _repeatable(func: Any) -> bool:
    """Whether two calls give the same values: no random numbers, and no uninitialised memory."""
    return torch.Tag.nondeterministic_seeded not in func.tags and "empty" not in func.name()


def _on_meta(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"
