"""Proves on the CPU that a model's blocks may be cut as a plan says, before any rank computes a part of one.

`column` and `row` are right only if the code between them treats each rank's features separately. A layer that computes
queries, keys and values together has them one after the other in its output, so that a rank's part does not hold whole
heads of each; and code that splits features by the number of heads makes smaller heads out of a part. Neither fails:
the shapes fit, and another model is trained.

So one block of each kind is made with small random weights and run twice on a short random input: as a whole, and in
parts that do what torch's ColwiseParallel and RowwiseParallel would do, with one thread per rank.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from elastic3d.errors import ModelError
from elastic3d.parallel.constants import Constants
from elastic3d.parallel.foreign import Caller, uncompiled
from elastic3d.parallel.pipeline.stages import find_blocks
from elastic3d.parallel.tensor.styles import Scheme, Style

SHORT = 16
"""Length to which the input's second dim, the sequence, is cut if the model accepts that."""

LARGEST = 1 << 31
"""Bytes of a block's fp32 parameters beyond which it is not proved, since that would take seconds and twice the
memory."""

ROUNDING = 0.02
"""Difference, relative to the largest value, that rounding may cause in a block that computes in bf16 somewhere.

The order of fp32 sums causes 1e-6; cutting a layer of queries, keys and values 0.3 to 0.6, heads by their number 0.1.
"""

UNABLE = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError)
"""What a block's forward raises if it cannot use its arguments."""

_Chosen = tuple[str, nn.Module, dict[str, Style]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One block of an outline, how its layers are cut, by names within it, and what it was called with."""

    name: str
    block: nn.Module
    styles: Mapping[str, Style]
    args: Any
    kwargs: Any


def prove(model: nn.Module, blocks: str | None, example: Any, scheme: Scheme) -> tuple[str, ...]:
    """Raise ModelError for a block of an outline that gives another result, or none, when computed in parts.

    Return the names of the blocks that were proved, one of each kind. A model without blocks, one that does not run on
    meta, and a block that is large or does not run by itself are taken on trust.
    """
    tp = next((factor for factor in (2, 3, 5, 7) if scheme.divisor % factor == 0), 0)
    if blocks is None or not tp:
        return ()
    with uncompiled():
        return tuple(call.name for call in _calls(model, blocks, example, scheme) if _prove(call, tp))


def _calls(model: nn.Module, blocks: str, example: Any, scheme: Scheme) -> list[_Call]:
    """Return the calls of one block of each kind, on real values."""
    chosen: dict[Any, _Chosen] = {}
    for number, block in find_blocks(model, blocks).named_children():
        name = f"{blocks}.{number}"
        styles = {key.removeprefix(f"{name}."): s for key, s in scheme.styles.items() if key.startswith(f"{name}.")}
        cut = {key: style for key, style in styles.items() if style.cuts}
        if cut and not any(isinstance(block.get_submodule(key), nn.Embedding) for key in cut):
            chosen.setdefault((type(block), tuple(cut.items())), (name, block, cut))
    for length in (SHORT, None):
        try:
            return _run(model, chosen.values(), _shorter(example, length))
        except UNABLE:
            continue
    return []


def _run(model: nn.Module, chosen: Collection[_Chosen], given: Any) -> list[_Call]:
    met: dict[nn.Module, tuple[Any, Any]] = {}
    constants = Constants()
    training = model.training

    def meet(module: nn.Module, args: Any, kwargs: Any) -> None:
        met[module] = args, kwargs

    handles = [block.register_forward_pre_hook(meet, with_kwargs=True) for _, block, _ in chosen]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("meta"), constants:
            Caller(model)(model.eval(), given)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    values = torch.Generator().manual_seed(0)
    calls = []
    for name, block, cut in chosen:
        if block in met:
            args, kwargs = tree_map(lambda leaf: _real(leaf, constants, values), met[block])
            calls.append(_Call(name=name, block=block, styles=cut, args=args, kwargs=kwargs))
    return calls


def _shorter(example: Any, length: int | None) -> Any:
    """Return one sample of an input on meta, of at most this length where it has one."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        part = leaf[:1]
        return (part[:, :length] if part.dim() > 1 else part).to("meta")

    return tree_map(cut, example)


def _real(leaf: Any, constants: Constants, values: torch.Generator) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    known = constants.value(leaf)
    return known.clone() if known is not None else _drawn(leaf, values)


def _drawn(tensor: torch.Tensor, values: torch.Generator) -> torch.Tensor:
    """Return values on the CPU for a tensor on meta: random numbers in fp32, or harmless indexes and masks."""
    shape = tuple(tensor.shape)
    if tensor.is_floating_point():
        return torch.empty(shape, device="cpu").normal_(generator=values)
    return torch.full(shape, tensor.dtype is torch.bool, dtype=tensor.dtype, device="cpu")


def _prove(call: _Call, tp: int) -> bool:
    if 4 * sum(parameter.numel() for parameter in call.block.parameters()) > LARGEST:
        return False
    whole = _made(call.block)
    try:
        with torch.no_grad():
            expected = _tensors(whole(*call.args, **call.kwargs))
    except UNABLE:
        return False
    if not expected or not all(bool(tensor.isfinite().all()) for tensor in expected):
        return False
    cut = f"in {tp} parts, as tensor= has it for {', '.join(map(repr, call.styles))}"
    try:
        actual = _in_parts(whole, call, tp)
    except UNABLE as error:
        raise ModelError(
            f"block {call.name!r} cannot be computed {cut}: {error}. Code between 'column' and 'row' must take sizes "
            "from what it is given: heads by view(batch, length, -1, head_size), not by their number"
        ) from error
    off = max(_difference(one, other) for one, other in zip(expected, actual, strict=True))
    if not off <= ROUNDING:
        raise ModelError(
            f"block {call.name!r} gives another result when it is computed {cut}: off by {off:.2g} of its largest "
            "value. A rank's part of a 'column' must be features that belong together: let queries, keys and values be "
            "a layer each, and take heads by view(batch, length, -1, head_size), not by their number"
        )
    return True


def _made(block: nn.Module) -> nn.Module:
    """Return a block of an outline with random weights on the CPU, scaled to keep activations near 1."""
    values = torch.Generator().manual_seed(1)
    made = copy.deepcopy(block).to_empty(device="cpu").float().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=values)
            else:
                parameter.normal_(0.5, 0.5, generator=values)
        for buffer in made.buffers():
            buffer.copy_(_drawn(buffer, values))
    return made


def _in_parts(whole: nn.Module, call: _Call, tp: int) -> list[torch.Tensor]:
    """Return the results of the first of `tp` ranks."""
    meeting = _Meeting(tp)

    def run(rank: int) -> list[torch.Tensor]:
        try:
            part = copy.deepcopy(whole)
            for name, style in call.styles.items():
                _cut(part.get_submodule(name), style, rank, meeting)
            args, kwargs = copy.deepcopy((call.args, call.kwargs))
            with torch.no_grad():
                return _tensors(part(*args, **kwargs))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(tp) as pool:
        ranks = [pool.submit(run, rank) for rank in range(tp)]
    failed = [error for rank in ranks if (error := rank.exception()) is not None]
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return ranks[0].result()


class _Meeting:
    """A meeting point where threads exchange tensors, in place of a collective."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self._given: list[torch.Tensor] = [torch.empty(0)] * size

    @property
    def size(self) -> int:
        """Number of threads."""
        return self.barrier.parties

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Give `tensor`, and return those of all threads."""
        self._given[rank] = tensor
        self.barrier.wait()
        given = list(self._given)
        self.barrier.wait()
        return given


def _cut(layer: nn.Module, style: Style, rank: int, meeting: _Meeting) -> None:
    """Leave a Linear one rank's part of its weights; its attributes stay those of the whole, as in torch's styles."""
    assert isinstance(layer, nn.Linear)

    def part(tensor: torch.Tensor, dim: int) -> nn.Parameter:
        return nn.Parameter(tensor.detach().chunk(meeting.size, dim)[rank].clone(), requires_grad=False)

    bias = layer.bias
    if style.column:
        layer.weight = part(layer.weight, 0)
        layer.bias = part(bias, 0) if bias is not None else bias
        if style is Style.COLUMN_GATHERED:
            layer.register_forward_hook(lambda _m, _a, output: torch.cat(meeting.exchange(rank, output), dim=-1))
        return
    layer.weight = part(layer.weight, 1)
    layer.register_parameter("bias", None)
    if style is Style.ROW_SPLIT:
        layer.register_forward_pre_hook(lambda _m, args: (args[0].chunk(meeting.size, -1)[rank], *args[1:]))

    def summed(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        total = torch.stack(meeting.exchange(rank, output)).sum(dim=0)
        return total if bias is None else total + bias

    layer.register_forward_hook(summed)


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value of the first."""
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-12)) if one.numel() else 0.0
