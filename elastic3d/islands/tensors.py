"""Deltas and outer parameters in the store: written by all ranks of an island, each what it holds, as a checkpoint.

Another island reads of it what its own ranks hold, however that is cut. Every tile is compared with its digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from checkpointing import Committed, Piece, SaveOptions, commit, open_checkpoint, resolve, save_rank
from checkpointing.interchange.tensors import buffer_of
from checkpointing.stores.protocol import Store
from elastic3d.devices import ComputeDevice
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.restore_buffers import RestoreBuffers
from elastic3d.parallel.state import TensorInMemory, box_of, copied_on, is_copy, local, sharded_like, specification

_OPTIONS = SaveOptions(workers=1)
_STORE = "store"


def write(store: Store, mesh: Mesh, tensors: Mapping[str, torch.Tensor], *, outer: int) -> int:
    """Write this rank's parts of tensors, by name; return the bytes that went to the store."""
    pieces = []
    for name, tensor in tensors.items():
        box = box_of(tensor)
        if box.numel and not copied_on(tensor) and not is_copy(tensor, mesh.place.tp):
            part = local(tensor).cpu().contiguous()
            pieces.append(Piece(spec=specification(name, tensor), box=box, data=buffer_of(part)))
    saved = save_rank(
        store,
        step=outer,
        made_in=1,
        attempt=0,
        rank=mesh.rank,
        world=mesh.layout.world,
        pieces=pieces,
        facts={"outer": outer},
        options=_OPTIONS,
    )
    return saved.sent


def complete(store: Store, mesh: Mesh, *, outer: int) -> Committed:
    """Have what all ranks have written be whole; Incomplete where some have not."""
    return commit(store, step=outer, made_in=1, attempt=0, committed_in=1, world=mesh.layout.world)


def read(store: Store, checkpoint: str, into: Mapping[str, torch.Tensor], device: ComputeDevice) -> int:
    """Read this rank's parts of tensors, by name; return their bytes. MissingTile where one has no good copy."""
    opened = open_checkpoint(store, checkpoint)
    held = [TensorInMemory(spec=specification(name, tensor), tensor=tensor) for name, tensor in into.items()]
    buffers = RestoreBuffers(held, device)
    wanted = list(buffers.wanted())
    resolve(wanted, opened.offers(_STORE), {_STORE: opened.source(_STORE)}, buffers.destination)
    buffers.settle()
    return sum(box.numel * spec.itemsize for spec, box in wanted)


def rooms_like(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return memory for tensors that are cut like these."""
    return {
        name: sharded_like(one, torch.empty_like(local(one), memory_format=torch.contiguous_format))
        for name, one in tensors
    }
