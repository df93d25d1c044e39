"""Takes `run.shard(..., chunks=)` with a model and a layout, or says why it cannot: by name, before the first step."""

from __future__ import annotations

from typing import Any

from torch import nn

from elastic3d.errors import LayoutError, ModelError
from elastic3d.parallel.context import chunks as cutting
from elastic3d.parallel.context.attention import Attention
from elastic3d.parallel.context.chunks import SequenceChunks
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.numerics.recompute import Recompute
from elastic3d.planner.legality import uncut

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.RNNBase)
"""Layers that mix positions in another way than by attention."""


def attention(model: nn.Module, chunks: int, mesh: Mesh, recompute: Recompute) -> Attention | None:
    """Return what carries attention over chunks on this rank; None where sequences are not cut.

    LayoutError or ModelError, naming what does not fit.
    """
    if why := uncut(mesh.layout, chunks, str(recompute)):
        raise LayoutError(why)
    if chunks == 1:
        return None
    check_model(model)
    mine = SequenceChunks(count=chunks, ranks=mesh.layout.cp, rank=mesh.place.cp)
    return Attention(mine, mesh.cp.get_group() if mesh.cp is not None else None, mesh.progress)


def check_model(model: nn.Module) -> None:
    """Refuse by name the modules whose work on a chunk depends on other chunks, as far as they say so; ModelError."""
    for name, module in model.named_modules():
        what, kind = f"module {name!r}" if name else "the model", type(module).__name__
        if isinstance(module, CONVOLUTIONS) and set(getattr(module, "kernel_size", (2,))) != {1}:
            raise ModelError(
                f"{what} ({kind}) mixes neighbouring positions, across the ends of the chunks of "
                "run.shard(..., chunks=); leave chunks= out"
            )
        if isinstance(module, nn.MultiheadAttention):
            raise ModelError(
                f"{what} ({kind}) cannot be cut by run.shard(..., chunks=): let it call "
                "torch.nn.functional.scaled_dot_product_attention itself, on (batch, heads, sequence, size)"
            )
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise ModelError(f"{what} ({kind}) is compiled, and run.shard(..., chunks=) cannot reach its attention")
        config = getattr(module, "config", None)
        kernel = getattr(config, "_attn_implementation", None)
        if kernel not in (None, "sdpa"):
            raise ModelError(
                f"{what} ({kind}) computes attention by {kernel!r}, which run.shard(..., chunks=) cannot reach; build "
                'it with attn_implementation="sdpa"'
            )
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            raise ModelError(
                f"{what} ({kind}) looks back over a sliding window of {config.sliding_window}, which "  # type: ignore[union-attr]
                "run.shard(..., chunks=) does not know; set sliding_window=None in its configuration"
            )


def check_batches(example: Any, chunks: int) -> None:
    """Refuse samples whose sequences cannot be cut; ModelError."""
    given, target = example
    length = cutting.length_of(given)
    cutting.check_length(length, chunks)
    cutting.check_target(target, length)
