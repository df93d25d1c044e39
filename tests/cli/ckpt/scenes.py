"""A small transformer's history of checkpoints, written under several meshes, for the tests of the views."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from checkpointing import Box, Piece, Store, TensorSpec, commit, fence, open_checkpoint, open_store, save_rank
from checkpointing.format.tiles import copy_box
from checkpointing.stores.protocol import Data, Entry, Versioned
from elastic3d.planner.shares import MeshSizes, boxes_of, find_homes, parameter_of

LAST = ("norm.*", "head.*")
BLOCKS = 4
BYTES = 69_304
State = dict[TensorSpec, bytes]


def shapes() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of the model and of its optimizer."""
    model = {
        "embed.weight": ("bfloat16", (64, 16)),
        "norm.weight": ("float32", (16,)),
        "head.weight": ("float32", (64, 16)),
    }
    for block in range(BLOCKS):
        model |= {
            f"blocks.{block}.attention.weight": ("float32", (48, 16)),
            f"blocks.{block}.attention.bias": ("float32", (48,)),
            f"blocks.{block}.mlp.weight": ("float32", (64, 16)),
        }
    specs = {f"model/{name}": spec for name, spec in model.items()}
    for name, (_, shape) in model.items():
        if name != "embed.weight":  # it is frozen
            specs |= {f"optimizer/{name}/exp_avg": ("float32", shape), f"optimizer/{name}/step": ("float32", ())}
    return specs


def state(step: int) -> State:
    """The state after a step: all but the frozen embedding moves a little."""
    made = {}
    for number, (key, (dtype, shape)) in enumerate(shapes().items()):
        spec = TensorSpec(key=key, dtype=dtype, shape=shape)
        base = np.random.default_rng(number).standard_normal(spec.box.numel).astype("<f4")
        if dtype == "bfloat16":
            made[spec] = (base.view("<u4") >> 16).astype("<u2").tobytes()
        elif key.endswith("/step"):
            made[spec] = np.float32(step).tobytes()
        else:
            made[spec] = (base * np.float32(1 + step / 10_000)).astype("<f4").tobytes()
    return made


def facts(step: int) -> dict[str, Any]:
    """The facts beside the tensors."""
    return {"step": step, "order": {"seed": 17, "micro_batch": 2}, "schedule": {"lr": 3e-4 * (1 - step / 1000)}}


def piece(spec: TensorSpec, data: bytes, box: Box) -> Piece:
    """Return a box of a whole tensor's bytes."""
    out = bytearray(box.numel * spec.itemsize)
    copy_box(data, spec.box, out, box, spec.itemsize)
    return Piece(spec=spec, box=box, data=memoryview(out))


def pieces(made: State, rank: int, target: MeshSizes) -> Iterator[Piece]:
    """Yield the part of a state that one rank of a mesh holds."""
    specs = list(made)
    shapes_ = {parameter_of(spec.key): spec.shape for spec in specs if spec.key.startswith("model/")}
    for spec, box in boxes_of(specs, rank, target, find_homes(specs, last=LAST), shapes_):
        yield piece(spec, made[spec], box)


def save(
    store: Store,
    step: int,
    target: MeshSizes,
    *,
    made_in: int = 1,
    committed_in: int | None = None,
    parent: str | None = None,
    made: State | None = None,
) -> str:
    """Save and commit one step under a mesh, and return the checkpoint's name."""
    for rank in range(target.world):
        save_rank(
            store,
            step=step,
            made_in=made_in,
            attempt=0,
            rank=rank,
            world=target.world,
            pieces=list(pieces(made or state(step), rank, target)),
            facts=facts(step),
            parent=open_checkpoint(store, parent) if parent else None,
        )
    generation = made_in if committed_in is None else committed_in
    return commit(store, step=step, made_in=made_in, attempt=0, committed_in=generation, world=target.world).checkpoint


def run(path: Path) -> tuple[Store, list[str]]:
    """Write a run's history, and return its checkpoints, oldest first.

    Two steps by a mesh of 2 x 2, the second with the first as its parent; after a shrink one by a mesh of 1 x 3; and a
    last one, damaged by a NaN, made by trainers that died before their successors committed it.
    """
    store = open_store(str(path))
    fence(store, 1)
    four, three = MeshSizes(pp=2, dp=2), MeshSizes(dp=3)
    first = save(store, 100, four)
    second = save(store, 200, four, parent=first)
    fence(store, 2)
    third = save(store, 300, three, made_in=2, parent=second)
    made = state(400)
    head = next(spec for spec in made if spec.key == "model/head.weight")
    values = np.frombuffer(made[head], "<f4").copy()
    values[3], values[5] = np.nan, np.inf
    made[head] = values.tobytes()
    fence(store, 3)
    fourth = save(store, 400, three, made_in=2, committed_in=3, parent=third, made=made)
    return store, [first, second, third, fourth]


class Counting:
    """A store that counts the reads of packs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.url = store.url
        self.reads: list[str] = []

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        self.reads.append(name)
        return self._store.get(name, start, stop)

    def read(self, name: str) -> Versioned | None:
        self.reads.append(name)
        return self._store.read(name)

    def size(self, name: str) -> int:
        return self._store.size(name)

    def put(self, name: str, data: Data) -> None:
        raise AssertionError(f"{name} was written")

    def put_if_absent(self, name: str, data: bytes) -> bool:
        raise AssertionError(f"{name} was written")

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        raise AssertionError(f"{name} was written")

    def delete(self, name: str) -> None:
        raise AssertionError(f"{name} was deleted")

    def list(self, prefix: str) -> Iterator[str]:
        return self._store.list(prefix)

    def entries(self, prefix: str) -> Iterator[Entry]:
        return self._store.entries(prefix)

    @property
    def packs(self) -> list[str]:
        """The reads of packs."""
        return [name for name in self.reads if name.startswith("packs/")]
