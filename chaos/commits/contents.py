"""The contents of each step of each generation: a function of its numbers, so that a state shows its step."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from random import Random

from checkpointing.format.tiles import Box, Piece, TensorSpec, copy_box

# Every step changes `w` and `t`, none `frozen`; `t` is on every rank.
SPECS = (
    TensorSpec(key="w", dtype="float32", shape=(6,)),
    TensorSpec(key="frozen", dtype="int64", shape=(3, 2)),
    TensorSpec(key="t", dtype="int64", shape=()),
)


@cache
def contents(made_in: int, step: int) -> dict[TensorSpec, bytes]:
    """Return every tensor's bytes as they are after this step."""
    w, frozen, t = SPECS
    return {
        w: _drawn(w, f"{made_in} {step}"),
        frozen: _drawn(frozen, ""),
        t: (made_in << 32 | step).to_bytes(8, "little"),
    }


def facts(made_in: int, step: int) -> dict[str, object]:
    """Return the step's facts."""
    return {"step": step, "made_in": made_in}


@cache
def pieces(made_in: int, step: int, rank: int, world: int) -> tuple[Piece, ...]:
    """Return a rank's part: rows dealt out in order, scalars on every rank."""
    return tuple(_cut(contents(made_in, step).items(), rank, world))


def _cut(state: Iterable[tuple[TensorSpec, bytes]], rank: int, world: int) -> Iterable[Piece]:
    for spec, data in state:
        box = spec.box
        if spec.shape:
            low, high = spec.shape[0] * rank // world, spec.shape[0] * (rank + 1) // world
            box = Box(start=(low, *box.start[1:]), stop=(high, *box.stop[1:]))
        if box.numel:
            part = bytearray(box.numel * spec.itemsize)
            copy_box(data, spec.box, part, box, spec.itemsize)
            yield Piece(spec=spec, box=box, data=memoryview(part).toreadonly())


def _drawn(spec: TensorSpec, seed: str) -> bytes:
    return Random(f"{spec.key} {seed}").randbytes(spec.box.numel * spec.itemsize)
