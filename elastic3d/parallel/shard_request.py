"""What a script asks for when it has its model sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from elastic3d.parallel.context.chunks import check_chunks
from elastic3d.parallel.deferred import InitialWeights
from elastic3d.parallel.numerics.choices import Numerics
from elastic3d.parallel.reduction import choice
from elastic3d.parallel.tensor.taking import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRequest:
    """The arguments of `run.shard`. blocks: dotted path of the repeated layers, None for no pipeline stages."""

    build: Callable[[], nn.Module]
    blocks: str | None
    seed: int
    reduction: str
    whole_below: int
    numerics: Numerics = field(default_factory=Numerics)
    compress: str | None = None
    leaf: int = 1
    tensor: Tensor = None
    experts: str | None = None
    chunks: int = 1
    weights: InitialWeights | None = None

    def __post_init__(self) -> None:
        choice.check(self.reduction, self.compress, self.leaf)
        check_chunks(self.chunks, self.reduction, self.experts, self.tensor, self.numerics.recompute)
