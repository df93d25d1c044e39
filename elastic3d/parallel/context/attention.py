"""Attention of a chunk over the chunks before it, wherever those were computed.

While a chunk is passed forward, calls of torch's scaled_dot_product_attention are taken over: the keys and values of
the turn's chunks are exchanged, kept for the turns that follow, and the queries of the chunk meet those of all chunks
up to their own as one tensor, in order. So what a kernel is given does not depend on how many ranks there are, and
neither do its bits. Going back, the gradients of keys and values go to the rank whose they are, which adds them up from
the last chunk to the first.

A rank keeps, for one micro-batch, the keys and values of the whole sequence in every layer: with grouped queries that
is a small part of what its own chunks keep. They are also what a layer that is computed again needs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from elastic3d.errors import ModelError
from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.parallel.context.chunks import SequenceChunks
from elastic3d.parallel.dtypes import dtype_mark
from elastic3d.port import UNRECORDED, Progress

_KEYS, _GRADIENTS = 1, 2

Place = tuple[str, int]
"""A call of attention: the block it is made in, and which of its calls it is."""


@dataclass(slots=True, kw_only=True)
class _Layer:
    """What one call keeps of a micro-batch. keys, values: (..., sequence, size). sums: of gradients, by chunk."""

    keys: torch.Tensor
    values: torch.Tensor
    known: set[int] = field(default_factory=set)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, chunk: int, piece: torch.Tensor) -> None:
        """Add to the sum of a chunk, which begins with its first piece."""
        if chunk in self.sums:
            self.sums[chunk] += piece
        else:
            self.sums[chunk] = piece.to(torch.promote_types(piece.dtype, torch.float32), copy=True)


class Attention:
    """Attention on one rank. group: of the ranks that share sequences, None for one."""

    def __init__(
        self, chunks: SequenceChunks, group: dist.ProcessGroup | None, progress: Progress = UNRECORDED
    ) -> None:
        self.chunks, self._group, self._progress = chunks, group, progress
        self._layers: dict[Place, _Layer] = {}
        self._block, self._calls, self._turn, self._length = "", 0, 0, 0
        self._backward = False
        self._made: set[Place] = set()
        self.looked_ahead = False
        """Whether attention was refused because it looks at later chunks, which are not computed yet."""

    def watch(self, name: str, block: nn.Module) -> None:
        """Know which calls are made within a block, also where it is computed again."""
        # Within forward, not by hooks: recomputation runs a block's forward again without them.
        block.forward = functools.partial(self._run, name, block.forward)

    def _run(self, name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        before, self._block, self._calls = (self._block, self._calls), name, 0
        try:
            # Autograd runs without the modes of whoever called it.
            with _Mode(self) if self._backward else nullcontext():
                return forward(*args, **kwargs)
        finally:
            self._block, self._calls = before

    def begin(self, length: int) -> None:
        """Forget a micro-batch, and begin one whose chunks have so many positions."""
        self._layers.clear()
        self._length = length

    def end(self) -> None:
        """Forget the last micro-batch of a step."""
        self._layers.clear()

    @contextmanager
    def turn(self, number: int, *, backward: bool = False) -> Iterator[None]:
        """Take over attention for this rank's chunk of a turn, on its way forward or back."""
        self._turn, self._backward = number, backward
        self._block, self._calls = "", 0
        self._made.clear()
        try:
            with nullcontext() if backward else _Mode(self):
                yield
        finally:
            self._backward = False

    def called(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Return what attention over the whole sequence gives for the chunk that is computed."""
        self._check(query, key, value, attn_mask, is_causal)
        place = self._place()
        keys, values = _Reached.apply(key, value, self, place, is_causal)  # type: ignore[no-untyped-call]
        mask = self._mask(query, keys) if is_causal else None
        made: torch.Tensor = scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, dropout_p=dropout_p, **options
        )
        return made

    def _check(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> None:
        where = f"attention in {self._block!r}" if self._block else "attention outside of blocks"
        lengths = {tensor.shape[-2] for tensor in (query, key, value)}
        if lengths != {self._length}:
            raise ModelError(
                f"{where} has queries, keys and values of lengths {sorted(lengths)}, not {self._length}, the length of "
                "a chunk: attention over something else than the sequence cannot be cut by run.shard(..., chunks=)"
            )
        if mask is not None:
            raise ModelError(
                f"{where} is given a mask, which run.shard(..., chunks=) cannot cut: let it be causal (is_causal=True) "
                "over samples without padding, such as elastic3d.Packed makes, or leave chunks= out"
            )
        if not causal and self.chunks.turns > 1:
            self.looked_ahead = True
            raise ModelError(
                f"{where} looks at later positions too: then all {self.chunks.count} chunks are computed at once, and "
                f"this layout has cp={self.chunks.ranks}; give cp={self.chunks.count}, or chunks={self.chunks.ranks}"
            )

    def _place(self) -> Place:
        place = self._block, self._calls
        self._calls += 1
        if not self._backward and place in self._made:
            raise ModelError(
                f"module {self._block!r} runs several times in one forward pass, where run.shard(..., chunks=) cannot "
                "follow its attention"
            )
        self._made.add(place)
        return place

    def _mask(self, query: torch.Tensor, keys: torch.Tensor) -> Any:
        """Return what hides later positions from queries that are the last of the keys' positions."""
        size, reach = query.shape[-2], keys.shape[-2]
        if query.device.type == "cpu":
            return _lower_right(size, reach)
        return causal_lower_right(size, reach)

    def reach(self, key: torch.Tensor, value: torch.Tensor, place: Place, causal: bool) -> tuple[torch.Tensor, ...]:
        """Return keys and values of all chunks that this rank's one looks at; a collective where they are new."""
        chunks, size = self.chunks, self._length
        own = chunks.mine(self._turn)
        layer = self._layers.get(place)
        if layer is None:
            whole = [one.new_empty(*one.shape[:-2], size * chunks.count, one.shape[-1]) for one in (key, value)]
            layer = self._layers[place] = _Layer(keys=whole[0], values=whole[1])
        if own not in layer.known:
            for rank, (its_key, its_value) in enumerate(self._exchanged(key, value)):
                chunk = chunks.of(rank, self._turn)
                layer.keys.narrow(-2, chunk * size, size).copy_(its_key)
                layer.values.narrow(-2, chunk * size, size).copy_(its_value)
                layer.known.add(chunk)
        stop = (own + 1 if causal else chunks.count) * size
        # Not views for autograd: what is written behind them later does not change them.
        return layer.keys.narrow(-2, 0, stop).data, layer.values.narrow(-2, 0, stop).data

    def _exchanged(self, key: torch.Tensor, value: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values of each rank's chunk of the turn."""
        if self._group is None:
            return [(key, value)]
        sent = torch.cat([key.reshape(-1), value.reshape(-1)])
        got = sent.new_empty(self._group.size(), sent.numel())
        number = self._progress.enter(Axis.CP, fingerprint(_KEYS, dtype_mark(sent.dtype), sent.numel()))
        dist.all_gather([row.view(torch.uint8) for row in got], sent.view(torch.uint8), group=self._group)
        self._progress.leave(Axis.CP, number)
        split = key.numel()
        return [(row[:split].view(key.shape), row[split:].view(value.shape)) for row in got]

    def gradients(
        self, place: Place, turn: int, causal: bool, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a chunk's gradients of all keys and values; return those of its own ones, complete; a collective.

        Later turns have been here before.
        """
        chunks, size, layer = self.chunks, self._length, self._layers[place]
        own = chunks.mine(turn)
        parts = [
            torch.cat([one.reshape(-1) for one in pair])
            for pair in zip(torch.split(key, size, dim=-2), torch.split(value, size, dim=-2), strict=True)
        ]

        def looked_at(rank: int, owner: int) -> list[int]:
            """Return the chunks of a rank that another's chunk of this turn looks at."""
            seen = chunks.of(rank, turn) + 1 if causal else chunks.count
            return [chunk for t in range(turn + 1) if (chunk := chunks.of(owner, t)) < seen]

        if self._group is None:
            rows = [parts]
        else:
            sends = [looked_at(chunks.rank, other) for other in range(chunks.ranks)]
            gets = [looked_at(other, chunks.rank) for other in range(chunks.ranks)]
            rows = self._returned(parts, sends, gets)
        for rank, row in enumerate(rows):
            for chunk, piece in zip(looked_at(rank, chunks.rank), row, strict=True):
                layer.add(chunk, piece)
        total = layer.sums.pop(own)
        split = key.numel() // len(parts)
        shapes = [(*one.shape[:-2], size, one.shape[-1]) for one in (key, value)]
        return (
            total[:split].view(shapes[0]).to(key.dtype),
            total[split:].view(shapes[1]).to(value.dtype),
        )

    def _returned(
        self, parts: list[torch.Tensor], sends: list[list[int]], gets: list[list[int]]
    ) -> list[list[torch.Tensor]]:
        """Send each rank the parts of its chunks; return those that each has sent here. sends, gets: chunks by rank."""
        assert self._group is not None
        numbers = parts[0].numel()
        item = parts[0].element_size() * numbers
        sent = torch.cat([parts[chunk] for chunks in sends for chunk in chunks])
        got = sent.new_empty(sum(map(len, gets)), numbers)
        mark = fingerprint(_GRADIENTS, dtype_mark(sent.dtype), numbers)
        number = self._progress.enter(Axis.CP, mark)
        dist.all_to_all_single(
            got.view(-1).view(torch.uint8),
            sent.view(torch.uint8),
            [len(chunks) * item for chunks in gets],
            [len(chunks) * item for chunks in sends],
            group=self._group,
        )
        self._progress.leave(Axis.CP, number)
        return [list(rows) for rows in torch.split(got, [len(chunks) for chunks in gets])]


class _Reached(torch.autograd.Function):
    """Keys and values of a chunk to those of all chunks that it looks at."""

    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, attention: Attention, place: Place, causal: bool
    ) -> tuple[torch.Tensor, ...]:
        ctx.attention, ctx.place, ctx.causal, ctx.turn = attention, place, causal, attention._turn
        return attention.reach(key, value, place, causal)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        key, value = ctx.attention.gradients(ctx.place, ctx.turn, ctx.causal, *gradients)
        return key, value, None, None, None


class _Mode(TorchFunctionMode):
    """Sends calls of attention to an `Attention`, however the model's code has imported the function."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return self._attention.called(*args, **(kwargs or {}))
        if func is multi_head_attention_forward:
            raise ModelError(
                "nn.MultiheadAttention cannot be cut by run.shard(..., chunks=): let the model call "
                "torch.nn.functional.scaled_dot_product_attention itself, on (batch, heads, sequence, size)"
            )
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=64)
def _lower_right(size: int, reach: int) -> torch.Tensor | None:
    """Return the mask, on the CPU."""
    return torch.ones(size, reach, dtype=torch.bool).tril(reach - size)
