"""The costs of a model's parts, measured by one forward and backward pass over an outline of it on meta.

Nothing is computed and no memory is used. Floating-point operations are those that torch's `FlopCounterMode` counts:
matrix products, convolutions and attention, with a multiply-add as two. Attention on meta is the plain kind, so that
its saved bytes are those of a backend that keeps the matrix of scores: an upper bound for one that does not.

What selective recomputation keeps is what its products make (`numerics.recompute`). The result of fused attention,
which it keeps too, is not among them, since there is none on meta; it is as large as one product's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from elastic3d.errors import ModelError
from elastic3d.parallel.constants import Constants
from elastic3d.parallel.foreign import Caller, uncompiled
from elastic3d.parallel.numerics.recompute import PRODUCTS
from elastic3d.parallel.pipeline.stages import ends, find_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCosts:
    """One part of a model over one micro-batch.

    forward_flops, backward_flops: operations. parameters: number of elements. saved_bytes: of activations kept for the
    backward pass. product_flops: of the forward ones, those of products with weights; product_bytes: of what these
    make. output_bytes: of the tensors that the part passes on.
    """

    name: str
    forward_flops: int = 0
    backward_flops: int = 0
    parameters: int = 0
    saved_bytes: int = 0
    product_flops: int = 0
    product_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """The costs of a model: the part before its blocks, the blocks in order, and the part after them."""

    before: PartCosts
    blocks: tuple[PartCosts, ...]
    after: PartCosts


@dataclass(slots=True)
class _Part:
    name: str
    flops: list[int] = field(default_factory=lambda: [0, 0])
    saved: int = 0
    products: list[int] = field(default_factory=lambda: [0, 0])
    made: int = 0
    output: int = 0


def measure_costs(model: nn.Module, blocks: str | None, example: Any) -> ModelCosts:
    """Return the costs of an outline of a whole model for one micro-batch; ModelError if it needs real values.

    blocks: dotted path of the repeated layers, None to measure the model as one part, the first. The model is left as
    it was, except for gradients on meta, which are dropped.
    """
    listed = [] if blocks is None else [(f"{blocks}.{n}", m) for n, m in find_blocks(model, blocks).named_children()]
    watch = _Watch(model, listed)
    training = model.training
    given = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, example)
    try:
        with torch.random.fork_rng(devices=[]), uncompiled(), torch.device("meta"), Constants(), watch.watching():
            output = Caller(model)(model.train(), given)
            outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
            watch.turn(outputs)
            losses = [tensor.float().sum() for tensor in outputs]
            if losses:
                torch.autograd.backward([sum(losses[1:], losses[0])])
    except (RuntimeError, NotImplementedError) as error:
        raise ModelError(
            f"{type(model).__name__} does not run on meta, where its costs are measured: {error}. Its forward depends "
            "on values; give the planner measured costs instead"
        ) from error
    finally:
        model.train(training)
        model.zero_grad(set_to_none=True)
    return watch.costs(_elements(model, blocks))


class _Watch:
    """Attributes operations and saved tensors to the part that runs: before the blocks, one of them, or after."""

    def __init__(self, model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> None:
        self._model, self._blocks = model, blocks
        self._parts = [_Part("before"), *(_Part(name) for name, _ in blocks), _Part("after")]
        self._counter: Any = FlopCounterMode(display=False)
        self._at, self._pass, self._seen, self._products = 0, 0, 0, 0
        self._own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._kept: list[Any] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the passes made inside."""
        handles = []
        for number, (_, block) in enumerate(self._blocks, start=1):
            handles.append(block.register_forward_pre_hook(self._entering(number), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leaving(number)))
        try:
            with self._counter, _Products(self._made), saved_tensors_hooks(self._save, lambda saved: saved):
                yield
                self._count()
        finally:
            for handle in handles:
                handle.remove()

    def turn(self, outputs: list[torch.Tensor]) -> None:
        """Note that the backward pass begins, from these outputs."""
        self._count()
        self._at, self._pass = len(self._parts) - 1 if self._blocks else 0, 1
        self._parts[self._at].output = _nbytes(outputs)

    def costs(self, parameters: list[int]) -> ModelCosts:
        """Return what was measured. parameters: number of elements of each part."""
        parts = [
            PartCosts(
                name=part.name,
                forward_flops=part.flops[0],
                backward_flops=part.flops[1],
                parameters=elements,
                saved_bytes=part.saved,
                product_flops=part.products[0],
                product_bytes=part.made,
                output_bytes=part.output,
            )
            for part, elements in zip(self._parts, parameters, strict=True)
        ]
        return ModelCosts(before=parts[0], blocks=tuple(parts[1:-1]), after=parts[-1])

    def _count(self) -> None:
        total = int(self._counter.get_total_flops())
        self._parts[self._at].flops[self._pass] += total - self._seen
        by_operation = self._counter.get_flop_counts().get("Global", {})
        products = sum(int(by_operation.get(one.overloadpacket, 0)) for one in PRODUCTS)
        self._parts[self._at].products[self._pass] += products - self._products
        self._seen, self._products = total, products

    def _made(self, output: torch.Tensor) -> None:
        if self._pass == 0:
            self._parts[self._at].made += _nbytes([output])

    def _entering(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._count()
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self._parts[self._at].output = _nbytes(given[:1])
            self._at = number
            for tensor in given[:1]:
                self._when_back(tensor, number - 1)

        return hook

    def _leaving(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._count()
            given = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
            self._parts[number].output = _nbytes(given)
            self._at = number + 1 if number == len(self._blocks) else number
            for tensor in given:
                self._when_back(tensor, number)

        return hook

    def _when_back(self, tensor: torch.Tensor, part: int) -> None:
        """Once this tensor's gradient is known, the backward pass is in `part`."""

        def hook(gradient: torch.Tensor) -> None:
            self._count()
            self._at = part

        if tensor.requires_grad:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage()
        if place._cdata not in self._own:
            # The storage is kept, so that no later one gets the same address.
            self._own.add(place._cdata)
            self._kept.append(place)
            self._parts[self._at].saved += place.nbytes()
        return tensor


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes on what products with weights make."""

    def __init__(self, made: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self._made(output)
        return output


def _elements(model: nn.Module, path: str | None) -> list[int]:
    """Return the number of parameters before the blocks, of each block, and after them; tied ones count once."""
    if path is None:
        return [sum(p.numel() for p in model.parameters()), 0]
    first, last = ends(model, path)
    blocks = [f"{path}.{name}" for name, _ in find_blocks(model, path).named_children()]
    counted: set[int] = set()

    def number(names: list[str]) -> int:
        total = 0
        for name in names:
            for parameter in model.get_submodule(name).parameters():
                total += 0 if id(parameter) in counted else parameter.numel()
                counted.add(id(parameter))
        return total

    return [number(first), *(number([name]) for name in blocks), number(last)]


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
