"""Stores with a checkpoint of a model, as a run leaves it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpointing import Piece, commit, fence, open_store, save_rank
from checkpointing.format.tiles import TensorSpec, copy_box
from checkpointing.interchange.tensors import DTYPES
from elastic3d.provenance.record import ScriptOrigin, spelled_out
from elastic3d.training import Run
from elastic3d.values import Layout
from tests.parallel.models import Sentences, loss_fn
from tests.parallel.worlds import Orders, run_world
from tests.training.lives import live

Tensors = dict[str, torch.Tensor]
STEPS = 2


def train(run: Run, *, build: Callable[[], nn.Module], blocks: str | None, loss: Any = loss_fn, **options: Any) -> None:
    """Train until the run is left. options: of `run.shard`."""
    model = run.shard(build, blocks=blocks, seed=3, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=9):
        run.step(optimizer, loss=run.backward(model, batch, loss))


def trained(
    folder: Path,
    build: Callable[[], nn.Module],
    blocks: str | None = None,
    *,
    layout: Layout | None = None,
    **options: Any,
) -> Tensors:
    """Train two steps into the store `folder/store`; return the model's tensors by name.

    layout: of a world of ranks; None for a run in this process. options: as `train` takes them.
    """
    main, kept = partial(train, build=build, blocks=blocks, **options), folder / "kept"
    kept.mkdir(parents=True)
    if layout is None:
        live(main, keep=kept, leave_at=STEPS, origin=ScriptOrigin())
    else:
        leave_at = dict.fromkeys(range(layout.world), STEPS - 1)
        orders = Orders(layout=layout, keep=kept, leave_at=leave_at, origins={0: ScriptOrigin()})
        reports = run_world(main, orders)
        assert {report.ended for report in reports} == {"left"}, reports[0].error
    return stored(kept, folder / "store")


def stored(kept: Path, url: Path) -> Tensors:
    """Commit the snapshot of the last step; return the model's tensors."""
    store = open_store(str(url))
    tensors: dict[TensorSpec, bytearray] = {}
    files = sorted(kept.glob(f"{STEPS}.*"))
    fence(store, 1)
    for rank, file in enumerate(files):
        facts, content = pickle.loads(file.read_bytes())
        pieces = [Piece(spec=spec, box=box, data=memoryview(data)) for spec, box, data in content]
        of_save: Any = {"step": STEPS, "made_in": 1, "attempt": 0, "world": len(files)}
        save_rank(store, rank=rank, pieces=pieces, facts=spelled_out(facts), **of_save)
        for spec, box, data in content:
            if spec.key.startswith("model/"):
                whole = tensors.setdefault(spec, bytearray(spec.box.numel * spec.itemsize))
                copy_box(data, box, whole, spec.box, spec.itemsize)
    commit(store, step=STEPS, made_in=1, attempt=0, committed_in=1, world=len(files))
    return {
        spec.key.removeprefix("model/"): torch.frombuffer(data, dtype=DTYPES[spec.dtype]).reshape(spec.shape)
        for spec, data in tensors.items()
    }
