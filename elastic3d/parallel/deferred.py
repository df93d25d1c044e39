"""Initial weights of a generation that expects to load a state: made only if somebody needs them after all.

To draw them, only to overwrite them, takes longer than all else of building a large model. So the model is left without
values. Whatever looks at a parameter before the state is loaded, such as a script that keeps a copy of the weights it
began with, has them made at that moment; so has a generation that finds no state. What is seen is the same either way,
except past torch: through `parameter.data.numpy()`, or on another thread. A copy of the model that is spread over ranks
(`parallel.averaging`) waits with it: its values come with the weights', or with the state if that has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from elastic3d.devices import ComputeDevice
from elastic3d.parallel import initial
from elastic3d.parallel.state import box_of, local, persistent_buffers

Values = Iterable[tuple[str, torch.Tensor]]
"""Whole parameters and buffers by global name, each to be used before the next is asked for."""

MakesValues = Callable[[frozenset[str]], Values]
"""Takes names of what a rank holds, and returns the whole initial values of those at least."""


class InitialWeights(Protocol):
    """Weights that a run begins with in place of those that its seed gives (`elastic3d.pretrained`)."""

    def look_at(self, outline: nn.Module) -> None:
        """Take note of the whole model, on meta or not."""
        ...

    def match(self) -> Fresh:
        """Return which parameters they lack."""
        ...

    def fill(self, model: nn.Module, device: ComputeDevice, arrived: Callable[[], object]) -> frozenset[str]:
        """Give values to this rank's part of the model; return the names of what got some."""
        ...


class Fresh(Protocol):
    """What weights lack."""

    @property
    def fresh(self) -> Collection[str]:
        """The first names of those parameters, the same on all ranks."""
        ...


class Deferred:
    """The initial weights of one rank's part of a model, none of which has values yet.

    values: of the parameters.
    read: gives values to what the weights have that the run begins with, and returns its names; None where it begins
    with none.
    """

    def __init__(
        self,
        model: nn.Module,
        values: MakesValues,
        read: Callable[[], frozenset[str]] | None = None,
    ) -> None:
        self._model, self._values, self._read = model, values, read
        self._watch: _Watch | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def room(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return memory for a copy of what this rank has of a parameter; None if its values are there to be copied."""
        if self._watch is None or self._watch.first is None:
            return None
        # Without an operation on it, which would have the values made.
        part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        return torch.empty(part.shape, dtype=part.dtype, device=part.device)

    def copied(self, parameter: torch.Tensor, copy: torch.Tensor) -> None:
        """Have a copy in such memory get its values with the parameter; who looks at it has them made, too."""
        assert self._watch is not None
        self._copies.append((parameter, copy))
        self._watch.storages.add(_storage(copy))

    def without_values(self, brought: Iterable[torch.Tensor]) -> bool:
        """Return whether there are copies that have none of these tensors' memory, which a state brings values to."""
        return not {_storage(copy) for _, copy in self._copies} <= {_storage(tensor) for tensor in brought}

    def watch(self) -> None:
        """From now on, have the weights made by the first operation of this thread that uses one of them."""
        self._watch = _Watch({_storage(parameter) for parameter in self._model.parameters()} - {None}, self.make)
        self._watch.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> bool:
        """Watch no more; return whether the weights are still without values."""
        assert self._watch is not None
        left = self._watch.first is not None
        self._watch.first = None
        if _get_current_dispatch_mode() is self._watch:  # else below a mode of the script's, and idle
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return left

    def make(self) -> None:
        """Give all weights their initial values."""
        self._give(dict(self._model.named_parameters()), self._values)

    def make_again(self, values: MakesValues) -> None:
        """Give the weights and the buffers of the state their initial values, whatever was read over these.

        values: as of this rank's part, of all parameters and buffers.
        """
        self._give({**dict(self._model.named_parameters()), **dict(persistent_buffers(self._model))}, values)

    def _give(self, here: dict[str, torch.Tensor], values: MakesValues) -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            rest = frozenset(here) - (frozenset() if self._read is None else self._read())
            for name, whole in values(rest) if rest else ():
                if name in rest:
                    box = box_of(here[name])
                    part = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))
                    local(here[name]).copy_(whole[part])
            for parameter, copy in self._copies:
                local(copy).copy_(local(parameter))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `first` once, before the first operation on one of these storages."""

    def __init__(self, storages: set[int | None], first: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = storages
        self.first: Callable[[], None] | None = first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = self.first
        if first is not None and any(
            isinstance(leaf, torch.Tensor) and _storage(leaf) in self.storages for leaf in tree_leaves((args, kwargs))
        ):
            self.first = None
            first()
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int | None:
    """Return which memory a tensor lies in; None where it has none of its own."""
    try:
        return int(local(tensor).untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def of_nothing(names: frozenset[str]) -> Values:
    """Leave what has its values already as it is."""
    return ()


def of_whole(build: initial.Build, seed: int) -> MakesValues:
    """Return the values of a model that is built whole."""

    def values(names: frozenset[str]) -> Values:
        model = initial.whole(build, seed)
        yield from model.named_parameters()
        yield from model.named_buffers()

    return values


def of_modules(build: initial.Build, seed: int, device: ComputeDevice) -> MakesValues:
    """Return the values of a model that is filled module by module, on the device and one module at a time."""

    def values(names: frozenset[str]) -> Values:
        model = initial.skeleton(build, seed)
        for place, module in model.named_modules():
            yield from module.named_buffers(prefix=place, recurse=False)
            blank = dict(module.named_parameters(prefix=place, recurse=False))
            if names.isdisjoint(blank):
                continue
            initial.fill_own(module, place, seed, device, root=model)
            yield from module.named_parameters(prefix=place, recurse=False)
            for name, parameter in blank.items():
                setattr(module, name.rpartition(".")[2], parameter)

    return values
