"""Copies of a model that is spread over ranks, and averages of its weights, as torch's `AveragedModel` makes them.

`copy.deepcopy(model)` gives the same parameters and buffers under the same names, cut as the model's are, and nothing
that computes: FSDP's own modules cannot be copied, and process groups neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from elastic3d.errors import UsageError
from elastic3d.parallel.deferred import Deferred
from elastic3d.parallel.pipeline.absent import Absent
from elastic3d.parallel.state import local, sharded_like


class CopiedModule(nn.Module):
    """The weights of a module, whole or what this rank has of them."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(
            "a copy of the model was called, such as an averaged model, and its weights are spread over the ranks: "
            "nothing gathers them. Evaluate from a checkpoint in another program: elastic3d ckpt export STORE FILE "
            "--prefix extra/NAME/module."
        )


def let_copy(model: nn.Module, deferred: Deferred | None = None) -> None:
    """Have `copy.deepcopy` of a model that is spread over ranks return its weights alone.

    deferred: the weights themselves, if they have no values yet.
    """
    vars(model)["__deepcopy__"] = _Copier(model, deferred)


def cut_copies(model: nn.Module) -> None:
    """Take from the copies that were made of a model the modules that it has lost to other stages since."""
    copier = vars(model).get("__deepcopy__")
    if not isinstance(copier, _Copier):
        return
    lost = [name for name, module in model.named_modules() if isinstance(module, Absent)]
    for copy in copier.made:
        for name in lost:
            copy.set_submodule(name, CopiedModule())


class _Copier:
    """Makes the copies of a model. made: those that somebody still has."""

    def __init__(self, model: nn.Module, deferred: Deferred | None) -> None:
        self._model, self._deferred = model, deferred
        self.made: WeakSet[nn.Module] = WeakSet()

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        copy = _copied(self._model, self._deferred, memo)
        self.made.add(copy)
        return copy


def _copied(model: nn.Module, deferred: Deferred | None, memo: dict[int, Any]) -> nn.Module:
    known = memo.get(id(model))
    if known is not None:
        assert isinstance(known, nn.Module)
        return known
    copy = memo[id(model)] = CopiedModule()
    copy.training = model.training
    for name, parameter in model._parameters.items():
        copy._parameters[name] = _parameter(parameter, deferred, memo)
    for name, buffer in model._buffers.items():
        copy._buffers[name] = _buffer(buffer, memo)
    copy._non_persistent_buffers_set = set(model._non_persistent_buffers_set)
    for name, module in model._modules.items():
        copy._modules[name] = None if module is None else _copied(module, deferred, memo)
    return copy


def _parameter(parameter: nn.Parameter | None, deferred: Deferred | None, memo: dict[int, Any]) -> Any:
    """Return a copy of a parameter, the same one each time."""
    if parameter is None or id(parameter) in memo:
        return None if parameter is None else memo[id(parameter)]
    room = None if deferred is None else deferred.room(parameter)
    part = local(parameter).clone() if room is None else room
    copy = memo[id(parameter)] = nn.Parameter(sharded_like(parameter, part), requires_grad=parameter.requires_grad)
    if deferred is not None and room is not None:
        deferred.copied(parameter, copy)
    return copy


def _buffer(buffer: torch.Tensor | None, memo: dict[int, Any]) -> Any:
    """Return a copy of a buffer, the same one each time."""
    if buffer is not None and id(buffer) not in memo:
        memo[id(buffer)] = sharded_like(buffer, local(buffer).clone())
    return None if buffer is None else memo[id(buffer)]


def average_on_shards(averaged: AveragedModel, name: str) -> None:
    """Have an averaged model update what this rank holds, where torch's own function makes the average.

    These treat each number by itself, so that shards come out the same, bit for bit; and torch's distributed tensors do
    not take lists in which some are no such tensors. UsageError for a list function of the script's own on such a list.
    """
    made_by: Callable[..., Any] | None = averaged.multi_avg_fn or averaged.avg_fn
    if type(averaged).update_parameters is not AveragedModel.update_parameters:
        return
    if made_by is None or getattr(made_by, "__module__", "") == swa_utils.__name__:
        vars(averaged)["update_parameters"] = partial(_update, averaged)
        return
    tensors = [*averaged.module.parameters(), *(averaged.module.buffers() if averaged.use_buffers else ())]
    if averaged.multi_avg_fn is not None and len({isinstance(one, DTensor) for one in tensors}) > 1:
        raise UsageError(
            f"run.restore: extra={name!r} averages by a multi_avg_fn of the script's own, and in this layout some "
            "weights are spread over ranks and others are not: torch takes no lists of both. Use "
            "torch.optim.swa_utils.get_ema_multi_avg_fn, or an avg_fn, which gets them one by one"
        )


class _Held:
    """What this rank holds of a module's tensors."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def parameters(self) -> Iterator[torch.Tensor]:
        return map(local, self._module.parameters())

    def buffers(self) -> Iterator[torch.Tensor]:
        return map(local, self._module.buffers())


def _update(averaged: AveragedModel, model: nn.Module) -> None:
    held = _Held(averaged.module)
    of_shards: Any = SimpleNamespace(
        module=held,
        parameters=held.parameters,
        n_averaged=averaged.n_averaged,
        avg_fn=averaged.avg_fn,
        multi_avg_fn=averaged.multi_avg_fn,
        use_buffers=averaged.use_buffers,
    )
    AveragedModel.update_parameters(of_shards, _Held(model))  # type: ignore[arg-type]
    averaged.n_averaged.copy_(of_shards.n_averaged)
