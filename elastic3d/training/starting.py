"""A run that starts from foreign weights: its store holds a checkpoint that no run has saved, such as an import.

Only the model is taken from it, and the run begins at step 0 with a fresh optimizer, schedule and data. A parameter is
looked up by its name as it is, and below `model/` or `model.`, where runs and torch scripts put it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from checkpointing.format.tiles import TensorSpec
from checkpointing.reading.resolver import resolve
from checkpointing.reading.sources import TileSource
from elastic3d.devices import ComputeDevice
from elastic3d.errors import StateError
from elastic3d.parallel.restore_buffers import RestoreBuffers
from elastic3d.parallel.state import TensorInMemory, held_by_model
from elastic3d.pretrained.matching import is_exact
from elastic3d.training import restoring
from elastic3d.training.restoring import OWN
from elastic3d.values import StoreAt

_PLACES = (OWN, "", "model.")
_SHOWN = 4


_FOREIGN_FILES = (".metadata", "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
"""What other tools' checkpoints consist of, in a folder that somebody may take for a store."""


def check_imported(at: StoreAt) -> None:
    """Raise StateError where a store that holds no checkpoint is a folder of another tool's, which would be ignored."""
    folder = Path(at.url.removeprefix("file://"))
    if "://" in at.url and not at.url.startswith("file://"):
        return
    foreign = sorted(path.name for pattern in _FOREIGN_FILES for path in folder.glob(pattern) if path.is_file())
    if foreign:
        raise StateError(
            f"store {at.url} holds no checkpoint of a run, but another tool's ({', '.join(foreign[:_SHOWN])}"
            f"{', ...' if len(foreign) > _SHOWN else ''}), which would be ignored: the run would begin with random "
            f"weights. Trying again does not help: `elastic3d ckpt import NEW-STORE {at.url}` and begin with "
            "store=NEW-STORE to start from these weights; else give the run an empty store, or say "
            "elastic3d.run(..., fresh=True)"
        )


def load_weights(
    model: nn.Module,
    decision: restoring.Decision,
    sources: Mapping[str, TileSource],
    device: ComputeDevice,
    *,
    arrived: Callable[[], object] = lambda: None,
) -> None:
    """Load the weights into this rank's part of the model. arrived: called after each tile that was read.

    Values that the model's dtype holds exactly, such as bfloat16 in float32, are widened. StateError names tensors that
    are missing, have another shape, or would be rounded.
    """
    saved = decision.specs()
    wrong: list[str] = []
    held: list[TensorInMemory] = []
    for one in held_by_model(model):
        stored = _find(one.spec, saved)
        name = one.spec.key.removeprefix(OWN)
        if stored is None:
            wrong.append(f"{name} is not there")
        elif stored.shape != one.spec.shape or not is_exact(stored.dtype, one.local.dtype):
            wrong.append(
                f"{name} is {stored.dtype} {list(stored.shape)} there, {one.spec.dtype} {list(one.spec.shape)} here"
            )
        else:
            held.append(TensorInMemory(spec=stored, tensor=one.tensor))
    if wrong:
        some = ", ".join(sorted(saved)[:_SHOWN])
        raise StateError(
            "the newest checkpoint of the store was not saved by a run, so that this one starts at step 0 with its "
            f"weights, and {len(wrong)} tensors of the model do not fit: {'; '.join(wrong[:_SHOWN])}"
            f"{'; ...' if len(wrong) > _SHOWN else ''}. It holds {len(saved)} tensors: {some}"
            f"{', ...' if len(saved) > _SHOWN else ''}. Trying again does not help: import weights with the model's "
            "own names, shapes and dtypes (`elastic3d ckpt import`), or give the run an empty store to start from "
            "random weights"
        )
    buffers = RestoreBuffers(held, device)
    wanted = list(buffers.wanted())
    resolve(wanted, restoring.offers(decision, sources, wanted), sources, buffers.destination, arrived=arrived)
    buffers.settle()


def _find(spec: TensorSpec, saved: Mapping[str, TensorSpec]) -> TensorSpec | None:
    name = spec.key.removeprefix(OWN)
    return next((saved[place + name] for place in _PLACES if place + name in saved), None)
