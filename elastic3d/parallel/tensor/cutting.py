"""Cuts a model's layers over the ranks that compute them together, with torch's own parallel styles.

This is done block by block, before recomputation and before FSDP. Every rank has built the same weights
and keeps its part of them: nothing is sent.

Random numbers: ranks with different parts of an activation must draw different numbers, and ranks with the same
activation the same ones. Between `column` and `row` ranks compute on parts of the features, and in a sequence parallel
plan on parts of the sequence everywhere else, until `column-gathered` or `gather`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from elastic3d.errors import ModelError
from elastic3d.parallel.pipeline.absent import Absent
from elastic3d.parallel.randomness import Randomness
from elastic3d.parallel.scope import Scope
from elastic3d.parallel.tensor.copies import Copies, settle
from elastic3d.parallel.tensor.styles import Scheme, Style

SEQUENCE = 1
"""The dim that is cut where activations are parts of a sequence: (batch, sequence, features)."""


def cut_layers(scope: Scope, scheme: Scheme, mesh: DeviceMesh, randomness: Randomness, *, alone: bool) -> None:
    """Cut a part of this rank's model over the ranks of a one-dimensional mesh.

    alone: there is one replica, and therefore no FSDP that sums each micro-batch's gradients of whole parameters.
    """
    randomness.part, randomness.parts_between = mesh.get_local_rank(), scheme.sequence
    _Cutter(scheme, mesh, randomness).cut(scope)
    if alone:
        for parameter in {id(parameter): parameter for _, parameter in scope.parameters()}.values():
            settle(parameter)


def boundary(activation: torch.Tensor, scheme: Scheme | None, tp: int) -> torch.Tensor:
    """Return, on meta, the part of the activation (batch, sequence, features) that a stage passes on."""
    if scheme is None or tp == 1 or not scheme.sequence:
        return activation
    shape = list(activation.shape)
    _check_sequence(shape, tp, "the blocks' activation")
    shape[SEQUENCE] //= tp
    return torch.empty(shape, dtype=activation.dtype, device="meta", requires_grad=True)


class _Cutter:
    """Carries out a scheme on this rank's part of a model."""

    def __init__(self, scheme: Scheme, mesh: DeviceMesh, randomness: Randomness) -> None:
        self._scheme, self._mesh, self._randomness = scheme, mesh, randomness
        self._between = Shard(SEQUENCE) if scheme.sequence else Replicate()

    def cut(self, scope: Scope) -> None:
        model, ties = scope.model, _ties(scope)
        for name, style in self._scheme.styles.items():
            module = _present(model, name) if scope.holds(name) else None
            if module is not None:
                frozen = [key for key, p in module.named_parameters() if not p.requires_grad]
                self._apply(name, module, style)
                for key in frozen:
                    module.get_parameter(key).requires_grad_(False)
        for name, module in scope.modules():
            if any(not isinstance(p, DTensor) for p in module.parameters(recurse=False)):
                named = self._scheme.styles.get(name)
                taken = named if named in (Style.SUMMED, Style.REPLICATED) else None
                guess = self._scheme.guess(name)
                Copies(name, module, self._mesh, taken or guess, guessed=taken is None)
        _tie(model, ties)

    def _apply(self, name: str, module: nn.Module, style: Style) -> None:
        if style.cuts:
            self._cut(name, module, style)
        elif style is Style.SEQUENCE:
            parallelize_module(module, self._mesh, SequenceParallel(sequence_dim=SEQUENCE), src_data_rank=None)
        elif style is Style.GATHER:
            get = PrepareModuleInput(input_layouts=(Shard(SEQUENCE),), desired_input_layouts=(Replicate(),))
            parallelize_module(module, self._mesh, get, src_data_rank=None)
            self._randomness.before(module, f"{name} in tp")
        elif style is Style.SPLIT:
            module.register_forward_hook(self._split(name))
            self._draw(module, name, parts=True)

    def _cut(self, name: str, module: nn.Module, style: Style) -> None:
        made: ColwiseParallel | RowwiseParallel
        embedding = isinstance(module, nn.Embedding)
        if style is Style.COLUMN and not embedding:
            made = ColwiseParallel()
        elif style is Style.COLUMN_GATHERED:
            made = ColwiseParallel(output_layouts=Replicate())
        elif style.column:
            made = ColwiseParallel(output_layouts=self._between)
        else:
            whole = embedding or style is Style.ROW_SPLIT
            made = RowwiseParallel(input_layouts=Replicate() if whole else None, output_layouts=self._between)
        parallelize_module(module, self._mesh, made, src_data_rank=None)
        if not embedding and style is not Style.ROW:
            module.register_forward_pre_hook(self._whole_input(name), prepend=True)
        if self._scheme.sequence and made.output_layouts == (self._between,):
            module.register_forward_hook(_check_output(name, self._mesh.size()), prepend=True)
        parts = (style is Style.COLUMN and not embedding) or (
            self._scheme.sequence and style is not Style.COLUMN_GATHERED
        )
        self._draw(module, name, parts=parts)

    def _whole_input(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> Any:
            first = args[0]
            if isinstance(first, DTensor):
                return (first.redistribute(placements=[Replicate()]), *args[1:])
            if self._scheme.sequence:
                raise ModelError(
                    f"module {name!r} is computed on the whole sequence but gets a part of it as a plain tensor; let a "
                    "module before it be 'sequence', or the module around it be 'gather' in tensor="
                )
            return None

        return hook

    def _split(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
            if not isinstance(output, torch.Tensor):
                raise ModelError(f"module {name!r} is 'split' in tensor= but returns {type(output).__name__}")
            _check_sequence(list(output.shape), self._mesh.size(), f"the output of module {name!r}")
            whole = DTensor.from_local(output, self._mesh, [Replicate()], run_check=False)
            part: torch.Tensor = whole.redistribute(placements=[Shard(SEQUENCE)]).to_local()
            return part

        return hook

    def _draw(self, module: nn.Module, name: str, *, parts: bool) -> None:
        self._randomness.after(module, f"{name} out of tp", parts=parts)


def _check_output(name: str, tp: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        _check_sequence(list(output.shape), tp, f"the output of module {name!r}")

    return hook


def _check_sequence(shape: list[int], tp: int, what: str) -> None:
    if len(shape) <= SEQUENCE or shape[SEQUENCE] % tp:
        raise ModelError(
            f"{what} has shape {tuple(shape)}, of which tp={tp} cannot cut dim {SEQUENCE}, the sequence, evenly; pad "
            "the samples, or leave 'sequence' and 'split' out of tensor="
        )


def _present(model: nn.Module, name: str) -> nn.Module | None:
    """Return a module by its global name; None if it, or a module around it, is on another stage."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return None if isinstance(module, Absent) else module


def _ties(scope: Scope) -> list[list[str]]:
    """Return groups of names of parameters that are one tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in scope.parameters():
        names.setdefault(id(parameter), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _tie(model: nn.Module, ties: list[list[str]]) -> None:
    for first, *others in ties:
        one = model.get_parameter(first)
        for name in others:
            other = model.get_parameter(name)
            assert isinstance(one, DTensor)
            assert isinstance(other, DTensor)
            if one.placements != other.placements:
                raise ModelError(
                    f"parameters {first!r} and {name!r} are one tensor, but tensor= cuts them over different dims; let "
                    "an embedding that shares its weight with a head be 'row', and the head 'column-gathered'"
                )
            module, _, key = name.rpartition(".")
            setattr(model.get_submodule(module), key, one)
