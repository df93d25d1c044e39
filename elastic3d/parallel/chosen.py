"""Initial values of a few of a model's parameters, while all others have none.

The model is built twice with its parameters on meta. The first time shows in which order parameters are made, and which
of them have the wanted names in the end; the second time those stay real, and are initialised as the model's own code
does it. Which they are depends on the model alone and not on the layout, and so do their values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from elastic3d import global_random
from elastic3d.errors import ModelError
from elastic3d.parallel import initial


def of_chosen(
    build: initial.Build, seed: int, chosen: Callable[[], Collection[str]]
) -> Callable[[frozenset[str]], Iterable[tuple[str, torch.Tensor]]]:
    """Return what makes the values of parameters. chosen: all that are to be made on any rank, the same on all.

    ModelError, by name, for one whose values the model computes from others'.
    """

    def values(names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            order = _Order(frozenset())
            torch.manual_seed(seed)
            with order.noted(), global_random.keyed(seed):
                model = build()
            # What is in no module any more is still kept, so that no two parameters have one identity.
            number = {id(parameter): place for place, parameter in order.made.items()}
            ids = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
            wanted = [name for name in sorted(chosen()) if name in ids]  # buffers have values anyway
            lost = [name for name in wanted if ids.get(name) not in number]
            real = _Order(frozenset(number[ids[name]] for name in wanted if name not in lost))
            torch.manual_seed(seed)
            with real.noted(), global_random.keyed(seed):
                build()
        for name in wanted:
            if name in lost or real.made[number[ids[name]]].is_meta:
                raise ModelError(
                    f"parameter {name!r} is not among the weights that the run begins with, and the model computes its "
                    "initial values from others. Trying again does not help: take weights that have it, or build the "
                    "model so that it has values of its own"
                )
            if name in names:
                yield name, real.made[number[ids[name]]]

    return values


class _Order:
    """The parameters in the order in which a model makes them; those of these numbers stay real."""

    def __init__(self, real: frozenset[int]) -> None:
        self._real = real
        self._known: set[int] = set()
        self.made: dict[int, nn.Parameter] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Have all parameters that modules get on meta, but for those that stay real."""
        register, to = nn.Module.register_parameter, nn.Module.to

        def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and not param.is_meta and id(param) not in self._known:
                place = len(self.made)
                if place not in self._real:
                    param = initial.like(param, param.to("meta"))
                self.made[place] = param
                self._known.add(id(param))
            register(module, name, param)

        def stay(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
            # Adapters go where the layer is that they belong to, which has no values here.
            device, dtype, *_ = torch._C._nn._parse_to(*args, **options)
            if device is not None and device.type == "meta":
                return to(module, dtype=dtype) if dtype is not None else module
            return to(module, *args, **options)

        nn.Module.register_parameter, nn.Module.to = on_meta, stay  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter, nn.Module.to = register, to  # type: ignore[method-assign]
