"""Saving what DCP has planned; `dcp` says what that means."""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from checkpointing.errors import FormatError, NoCheckpoint
from checkpointing.format.tiles import Box, Piece, TensorSpec
from checkpointing.interchange import objects
from checkpointing.interchange.tensors import buffer_of, dtype_name, object_piece, shortened
from checkpointing.reading.reader import Checkpoint, open_checkpoint, read_latest
from checkpointing.saving.commit import Committed, commit, fence
from checkpointing.saving.options import SaveOptions
from checkpointing.saving.save import save_rank
from checkpointing.stores.opening import open_store
from checkpointing.stores.protocol import Store

FACTS: Mapping[str, Any] = {"made_by": "torch.distributed.checkpoint"}
"""The facts of a checkpoint whose Writer was given none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What the coordinator tells each rank."""

    rank: int
    world: int
    made_in: int


class Writer(StorageWriter):
    """Save what DCP plans as one checkpoint of this format. Every rank makes one, alike.

    store: a URL, or an open store (which then must be picklable for `async_save` in another process).
    step: the training step; `checkpoint_id` of each save replaces it. facts: JSON, the same on every rank.
    generation: fences out those below; by default the one after the newest in the store, taken at the first save and
    again when a step is not above the last.
    attempt: count it up to save other contents under the same step and generation. incremental: refer to the tiles of
    the newest checkpoint where they are equal. options: how each rank saves: codec, bandwidth, transfers.

    The coordinator's save raises Fenced, Superseded and their like (all of DCP's errors arrive as CheckpointException).
    `committed` is what the last save made, on the coordinator alone.
    """

    committed: Committed | None = None

    def __init__(
        self,
        store: str | Store,
        *,
        step: int | None = None,
        facts: Mapping[str, Any] | None = None,
        generation: int | None = None,
        attempt: int = 0,
        incremental: bool = True,
        options: SaveOptions | None = None,
    ) -> None:
        super().__init__()
        self._url = store if isinstance(store, str) else None
        self._open = None if isinstance(store, str) else store
        self._step = step
        self._facts = dict(FACTS if facts is None else facts)
        self._generation = generation
        self._given = generation is not None
        self._claimed = False
        self._last: int | None = None
        self._attempt = attempt
        self._incremental = incremental
        self._options = options or SaveOptions()
        self._paths: dict[str, objects.Path] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave an opened store behind where its URL opens it again."""
        return {**self.__dict__, "_open": None if self._url else self._open}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a step."""
        return str(checkpoint_id).isdecimal()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the step to be saved next."""
        if checkpoint_id is None:
            return
        if not self.validate_checkpoint_id(checkpoint_id):
            raise ValueError(
                f"checkpoint_id is {os.fspath(checkpoint_id)!r}; this writer takes the step, such as 100: where to "
                "write is said by the URL given to Writer"
            )
        self._step = int(str(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Open the store, for the first save."""
        if not kwargs.get("use_collectives", True):
            raise ValueError("a checkpoint is committed once for all ranks: use_collectives=False cannot be used")
        if self._step is None:
            raise ValueError("no step was given: Writer(url, step=100), or checkpoint_id=100 with each save")
        self._coordinator = is_coordinator
        self.committed = None
        self._store()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan; ValueError names every item that cannot be stored."""
        wrong = []
        for item in plan.items:
            data = item.tensor_data
            if objects.is_object(item.index.fqn):
                wrong.append(f"{item.index.fqn}: a key kept for objects")
            elif data is not None and dtype_name(data.properties.dtype) is None:
                wrong.append(f"{item.index.fqn}: {data.properties.dtype} {list(data.size)}")
        if wrong:
            raise ValueError(f"{len(wrong)} entries cannot be stored: {shortened(wrong)}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the generation, once, and tell every rank its part."""
        usable = sum(plan.usable for plan in plans)
        if 0 < usable < len(plans) and not self._given:
            raise ValueError("plan caching hides from some ranks what the others are told: give Writer a generation")
        if not self._given and self._last is not None and self._known_step <= self._last:
            # Training went back: what follows is another history, and comes after the one that is left.
            self._claimed, self._generation = False, None
        if not self._claimed:
            if self._generation is None:
                ref = read_latest(self._store())
                self._generation = 1 if ref is None else ref.generation + 1
            fence(self._store(), self._generation)
            self._claimed = True
        assert self._generation is not None
        self._paths = {
            name: list(path) for plan in plans for name, path in (plan.planner_data or {}).items() if _is_path(path)
        }
        return [
            dataclasses.replace(plan, storage_data=_Part(rank=rank, world=len(plans), made_in=self._generation))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, durably."""
        self._part: _Part = plan.storage_data
        sizes: dict[Any, int] = {}
        save_rank(
            self._store(),
            step=self._known_step,
            made_in=self._part.made_in,
            attempt=self._attempt,
            rank=self._part.rank,
            world=self._part.world,
            pieces=self._pieces(plan, planner, sizes),
            facts=self._facts,
            parent=self._parent(),
            options=self._options,
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(index=index, size_in_bytes=size, storage_data=None) for index, size in sizes.items()]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written. The results say nothing that the manifests do not say better."""
        assert self._generation is not None
        self.committed = commit(
            self._store(),
            step=self._known_step,
            made_in=self._part.made_in,
            attempt=self._attempt,
            committed_in=self._generation,
            world=self._part.world,
        )
        self._last = self._known_step
        metadata.storage_meta = StorageMeta(checkpoint_id=self.committed.checkpoint)

    @property
    def _known_step(self) -> int:
        assert self._step is not None
        return self._step

    def _store(self) -> Store:
        if self._open is None:
            assert self._url is not None
            self._open = open_store(self._url)
        return self._open

    def _parent(self) -> Checkpoint | None:
        if not self._incremental:
            return None
        try:
            return open_checkpoint(self._store())
        except (NoCheckpoint, FormatError):
            # A damaged parent is no reason not to save: everything is written, and `verify` tells of the damage.
            return None

    def _pieces(self, plan: SavePlan, planner: SavePlanner, sizes: dict[Any, int]) -> Iterator[Piece]:
        refused = []
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                found = planner.resolve_data(item)
                assert isinstance(found, io.BytesIO)
                key, data = objects.wrap_saved(item.index.fqn, found.getvalue())
                if not objects.loadable(key, data):
                    refused.append(item.index.fqn)
                piece = object_piece(key, data)
            else:
                piece = _piece(item, planner)
            sizes[item.index] = piece.data.nbytes
            yield piece
        if self._coordinator:
            # Cached plans come without their ways, but the planner has kept the whole metadata.
            cached = getattr(getattr(planner, "metadata", None), "planner_data", None) or {}
            paths = {**{name: list(path) for name, path in cached.items() if _is_path(path)}, **self._paths}
            if paths:
                yield object_piece(objects.PATHS, objects.to_json(paths))
        if refused:
            warnings.warn(
                f"saved, but not loadable before their classes are allowed with "
                f"torch.serialization.add_safe_globals: {shortened(refused)}",
                stacklevel=2,
            )


def _is_path(path: Any) -> bool:
    return isinstance(path, tuple) and all(type(step) in (str, int) for step in path)


def _piece(item: WriteItem, planner: SavePlanner) -> Piece:
    assert item.tensor_data is not None
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    dtype, sizes = dtype_name(tensor.dtype), tuple(item.tensor_data.chunk.sizes)
    if dtype is None or tensor.layout is not torch.strided or tuple(tensor.shape) != sizes:
        raise ValueError(
            f"{item.index.fqn}: planned as {list(sizes)}, given as {tensor.layout} {tensor.dtype} {list(tensor.shape)}"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    start = tuple(item.tensor_data.chunk.offsets)
    spec = TensorSpec(key=item.index.fqn, dtype=dtype, shape=tuple(item.tensor_data.size))
    box = Box(start=start, stop=tuple(a + n for a, n in zip(start, sizes, strict=True)))
    return Piece(spec=spec, box=box, data=buffer_of(plain.cpu().contiguous()))
