"""Proves on the CPU that a model may be computed chunk by chunk, before any rank computes a part of a sequence.

Nothing fails where a model's code counts positions from the beginning of what it is given, shifts or averages over the
sequence, or computes attention by itself: the shapes fit, and another model is trained. So the model, with one block of
each kind and small random weights, is run twice on a short input: as a whole, and in chunks as one rank has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from elastic3d.errors import Elastic3dError, ModelError
from elastic3d.parallel import initial
from elastic3d.parallel.context import chunks as cutting
from elastic3d.parallel.context.attention import Attention
from elastic3d.parallel.context.chunks import SEQUENCE, SequenceChunks
from elastic3d.parallel.context.passes import POSITIONS, ChunkCaller
from elastic3d.parallel.pipeline.stages import find_blocks

SHORT = 4
"""Positions of each chunk that is tried, at most."""

LARGEST = 1 << 31
"""Bytes of fp32 parameters, with one block of each kind, beyond which a model is not tried."""

ROUNDING = 2e-3
"""Difference, relative to the largest value, that rounding may cause. In fp32 it is 1e-6."""

UNABLE = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AttributeError)
"""What a model's forward raises if it cannot use its arguments."""


def prove(build: initial.Build, blocks: str | None, given: Any, chunks: int, seed: int) -> bool:
    """Raise ModelError for a model that gives another result, or none, when computed in so many chunks.

    given: a micro-batch's input. Returns whether it was tried: a large model, one that does not run with fewer blocks,
    and one whose attention looks at later positions too are taken on trust.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        made = _small(build, blocks, seed)
        if made is None:
            return False
        model, named = made
        caller, (short, length) = ChunkCaller(model), _shorter(given, chunks)
        try:
            expected = cutting.tensors(caller.whole(model, short))
        except UNABLE:
            return False
        if not expected or not all(bool(tensor.isfinite().all()) for tensor in expected):
            return False
        attention = Attention(SequenceChunks(count=chunks), None)
        for name, block in named.items():
            attention.watch(name, block)
        try:
            actual = _in_chunks(model, caller, attention, short, length)
        except Elastic3dError:
            if attention.looked_ahead:
                return False
            raise
        except UNABLE as error:
            raise ModelError(
                f"{type(model).__name__} cannot be computed in {chunks} chunks of a sequence: {error}"
            ) from error
        off = max(map(_difference, expected, actual))
    if not off <= ROUNDING:
        wanted = " or ".join(map(repr, POSITIONS))
        knows = f"where it counts positions, let forward take them as {wanted}, of shape (1, length) or None"
        if caller.positioned:
            knows = "it is given the positions of a chunk, and has to use them"
        raise ModelError(
            f"{type(model).__name__} gives another result when computed in {chunks} chunks of a sequence, each by "
            f"itself: off by {off:.2g} of its largest value. What is computed at one position may depend on others by "
            f"scaled_dot_product_attention alone; and {knows}. Or leave run.shard(..., chunks=) out"
        )
    return True


def _small(build: initial.Build, blocks: str | None, seed: int) -> tuple[nn.Module, dict[str, nn.Module]] | None:
    """Return the model with one block of each kind and random weights in fp32, and these blocks by their names.

    None if it is too large.
    """
    named: dict[str, nn.Module] = {}
    try:
        model = initial.skeleton(build, seed)
    except ModelError:
        if initial.nbytes(initial.outline(build)) > LARGEST:
            return None
        model = initial.whole(build, seed)
    if blocks is not None:
        listed = find_blocks(model, blocks)
        kept: dict[Any, tuple[str, nn.Module]] = {}
        for name, block in listed.named_children():
            kind = (type(block), tuple((key, one.shape) for key, one in block.named_parameters()))
            kept.setdefault(kind, (name, block))
        few = [*kept.values()]
        named = {f"{blocks}.{name}": block for name, block in few}
        by_name = isinstance(listed, nn.ModuleDict)
        model.set_submodule(blocks, nn.ModuleDict(dict(few)) if by_name else nn.ModuleList(dict(few).values()))
    if 4 * sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
        return None
    values = torch.Generator().manual_seed(1)
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, key, nn.Parameter(_drawn(parameter, values), requires_grad=False))
    return model.float().eval(), named


def _drawn(parameter: torch.Tensor, values: torch.Generator) -> torch.Tensor:
    """Return random values that keep activations near 1."""
    drawn = torch.empty(parameter.shape, dtype=torch.float32)
    if parameter.dim() > 1:
        return drawn.normal_(0.0, parameter[0].numel() ** -0.5, generator=values)
    return drawn.normal_(0.5, 0.5, generator=values)


def _shorter(given: Any, chunks: int) -> tuple[Any, int]:
    """Return one sample of an input, with short sequences, and their length."""
    length = cutting.length_of(given)
    cutting.check_length(length, chunks)
    short = chunks * min(SHORT, length // chunks)

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        part = leaf[:1].cpu()
        return part[:, :short] if leaf.dim() > SEQUENCE and leaf.shape[SEQUENCE] == length else part

    return tree_map(cut, given), short


def _in_chunks(
    model: nn.Module, caller: ChunkCaller, attention: Attention, given: Any, length: int
) -> list[torch.Tensor]:
    chunks = attention.chunks.count
    attention.begin(length // chunks)
    parts = []
    for turn in range(chunks):
        with attention.turn(turn):
            parts.append(cutting.tensors(caller(model, given, length, turn, chunks)))
    return [
        torch.cat(several, dim=SEQUENCE) if several[0].dim() > SEQUENCE else several[0]
        for several in zip(*parts, strict=True)
    ]


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value of the first."""
    if one.shape != other.shape:
        return float("inf")
    if not one.is_floating_point() or not one.numel():
        return 0.0
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-12))
