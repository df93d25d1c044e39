"""States, layouts and round trips that the tests of checkpointing share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np

from checkpointing import (
    Box,
    Checkpoint,
    Committed,
    Piece,
    Resolved,
    SaveOptions,
    Store,
    TensorSpec,
    commit,
    resolve,
    save_rank,
)
from checkpointing.format.grid import TILE_BYTES
from checkpointing.format.tiles import copy_box

State = dict[TensorSpec, bytes]
FACTS = {"step": 1, "schedule": {"last_epoch": 1, "lr": [0.1, 3e-4]}, "name": "größe"}


def make_state(shapes: dict[str, tuple[str, tuple[int, ...]]], seed: int = 0) -> State:
    """Return random bytes for tensors given as key -> (dtype, shape)."""
    generator = random.Random(seed)
    state = {}
    for key, (dtype, shape) in shapes.items():
        spec = TensorSpec(key=key, dtype=dtype, shape=shape)
        state[spec] = generator.randbytes(spec.box.numel * spec.itemsize)
    return state


SMALL = {
    "model/w": ("float32", (6, 5)),
    "model/b": ("bfloat16", (7,)),
    "model/empty": ("float32", (0, 3)),
    "optimizer/w/step": ("float32", ()),
    "model/cube": ("int64", (3, 2, 2)),
}


def split(spec: TensorSpec, cuts: Sequence[int], dim: int = 0) -> list[Box]:
    """Cut a tensor along one dim at the given places."""
    if not spec.shape:
        return [spec.box]
    edges = [0, *sorted(min(cut, spec.shape[dim]) for cut in cuts), spec.shape[dim]]
    boxes = []
    for low, high in itertools.pairwise(edges):
        start, stop = list(spec.box.start), list(spec.box.stop)
        start[dim], stop[dim] = low, high
        boxes.append(Box(start=tuple(start), stop=tuple(stop)))
    return boxes


def piece(spec: TensorSpec, data: bytes, box: Box) -> Piece:
    """Return a box of a whole tensor's bytes."""
    out = bytearray(box.numel * spec.itemsize)
    copy_box(data, spec.box, out, box, spec.itemsize)
    return Piece(spec=spec, box=box, data=memoryview(out))


def spread(state: State, world: int, cuts: Sequence[int] = (), dim: int = 0) -> list[list[Piece]]:
    """Deal the boxes of every tensor out to ranks; scalars go to all of them."""
    ranks: list[list[Piece]] = [[] for _ in range(world)]
    for number, (spec, data) in enumerate(state.items()):
        along = dim if dim < len(spec.shape) else 0
        for place, box in enumerate(split(spec, cuts, along)):
            owners = range(world) if not spec.shape else [(number + place) % world]
            for rank in owners:
                ranks[rank].append(piece(spec, data, box))
    return ranks


def save(
    store: Store,
    state: State,
    *,
    step: int = 1,
    made_in: int = 1,
    attempt: int = 0,
    world: int = 2,
    cuts: Sequence[int] = (2, 4),
    dim: int = 0,
    parent: Checkpoint | None = None,
    facts: dict[str, object] | None = None,
    tile_bytes: int = TILE_BYTES,
) -> None:
    """Have every rank save its part."""
    for rank, pieces in enumerate(spread(state, world, cuts, dim)):
        save_rank(
            store,
            step=step,
            made_in=made_in,
            attempt=attempt,
            rank=rank,
            world=world,
            pieces=pieces,
            facts=FACTS if facts is None else facts,
            parent=parent,
            options=SaveOptions(tile_bytes=tile_bytes),
        )


def save_and_commit(store: Store, state: State, *, step: int = 1, made_in: int = 1, world: int = 2) -> Committed:
    """Save under a plain layout and commit in the same generation."""
    save(store, state, step=step, made_in=made_in, world=world)
    return commit(store, step=step, made_in=made_in, attempt=0, committed_in=made_in, world=world)


def load(checkpoint: Checkpoint, boxes: dict[TensorSpec, list[Box]] | None = None) -> tuple[State, Resolved]:
    """Resolve every tensor (under the given boxes), and put the whole ones together again."""
    wanted = [(s, box) for s in checkpoint.specs.values() for box in (boxes[s] if boxes else [s.box])]
    buffers = {(s, box): bytearray(box.numel * s.itemsize) for s, box in wanted}
    resolved = resolve(
        wanted, checkpoint.offers(), {"store": checkpoint.source()}, lambda s, box: memoryview(buffers[s, box])
    )
    state = {}
    for spec in checkpoint.specs.values():
        whole = bytearray(spec.box.numel * spec.itemsize)
        for (other, box), buffer in buffers.items():
            if other == spec:
                copy_box(buffer, box, whole, spec.box, spec.itemsize)
        state[spec] = bytes(whole)
    return state, resolved


def as_array(box: Box, data: bytes) -> np.ndarray:
    """Return int32 bytes as an array of the box's shape."""
    return np.frombuffer(data, "<i4").reshape(box.shape)
