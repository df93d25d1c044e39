"""`torch.distributed.checkpoint` writing and reading this format: FSDP2, tensor-parallel and pipeline states alike.

    dcp.save(state, storage_writer=Writer("s3://bucket/run", step=100))
    dcp.load(state, storage_reader=Reader("s3://bucket/run"))

Nothing but storage differs from torch's own: each rank's shards are boxes of their global tensors, cut into verified
tiles, and the coordinator commits what all ranks have written, so `latest` never names half a checkpoint.

**What is no tensor** (`objects`) is kept as JSON where JSON gives it back unchanged. Anything else DCP has pickled with
`torch.save`: it is stored as opaque bytes, and **not loaded unless torch's `weights_only` unpickler takes it**; allow
the classes you trust with `torch.serialization.add_safe_globals`. Saving warns of such objects.

**Generations.** A Writer fences out every older one at its first save, so that a job which was thought dead cannot
move `latest` any more: keep one Writer for the life of a job, and pass `checkpoint_id=step` to each save. Somebody who
counts generations already gives theirs, and so may somebody who saves in another process, where each save is given a
copy of the Writer and takes a generation of its own.
"""

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
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from checkpointing.errors import FormatError, NoCheckpoint, SpecMismatch
from checkpointing.format.tiles import Box, Piece, TensorSpec
from checkpointing.interchange import objects
from checkpointing.interchange.contents import BATCH_BYTES, Contents, Wanted
from checkpointing.interchange.tensors import DTYPES, buffer_of, dtype_name, tensor_of
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


class Reader(StorageReader):
    """Load a checkpoint of this format into whatever layout DCP plans; every tile is verified.

    store: a URL, or an open store. checkpoint: `latest` or a checkpoint's name; `checkpoint_id` of a load replaces it.
    All ranks read the checkpoint that the coordinator has opened.

    Values are never cast: a tensor of another dtype is an error that names all of them. Objects saved as pickles are
    loaded only if torch's `weights_only` unpickler takes them, else Unloadable.
    """

    def __init__(self, store: str | Store, checkpoint: str = "latest") -> None:
        super().__init__()
        self._store = open_store(store, write=False) if isinstance(store, str) else store
        self._name = checkpoint
        self._contents: Contents | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: what it names is found out when it is opened."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the checkpoint to be loaded next."""
        self._contents = None
        if checkpoint_id is not None:
            self._name = str(checkpoint_id)

    # Not named kwargs: DCP would call it a second time for a rank's own metadata, which is not a thing here.
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return what the checkpoint holds, in DCP's words: each tensor as a single chunk."""
        self._contents = contents = Contents(open_checkpoint(self._store, self._name))
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for spec in contents.tensors:
            if spec.dtype not in DTYPES:
                raise SpecMismatch(f"{spec.key}: this torch has no {spec.dtype}; upgrade it to load the checkpoint")
            whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(spec.shape)), sizes=torch.Size(spec.shape))
            properties = TensorProperties(dtype=DTYPES[spec.dtype])
            found[spec.key] = TensorStorageMetadata(
                properties=properties, size=torch.Size(spec.shape), chunks=[whole] if spec.box.numel else []
            )
        found |= {name: BytesStorageMetadata() for name in contents.objects}
        paths = contents.paths()
        return Metadata(
            state_dict_metadata=found,
            planner_data={name: plain_path(name, paths) for name in found},
            storage_meta=StorageMeta(checkpoint_id=contents.checkpoint.name),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tell every rank which checkpoint it is: `latest` may have moved between two ranks' looks."""
        assert self._contents is not None
        name = self._contents.checkpoint.name
        return [dataclasses.replace(plan, storage_data=name) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank planned, straight into its tensors where they lie in one row of host memory."""
        assert self._contents is not None
        if plan.storage_data != self._contents.checkpoint.name:
            self._contents = Contents(open_checkpoint(self._store, plan.storage_data))
        self._load_tensors([item for item in plan.items if item.type is LoadItemType.TENSOR], planner)
        self._load_objects([item for item in plan.items if item.type is LoadItemType.BYTE_IO], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load_tensors(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        assert self._contents is not None
        specs = self._contents.checkpoint.specs
        targets, wrong = [], []
        for item in items:
            target = planner.resolve_tensor(item).detach()
            spec = specs.get(item.storage_index.fqn)
            box = _read_box(item)
            if spec is None or DTYPES.get(spec.dtype) != target.dtype or box.shape != tuple(target.shape):
                saved = f"{spec.dtype} {list(spec.shape)}" if spec else "not there"
                wrong.append(f"{item.storage_index.fqn}: saved {saved}, wanted {target.dtype} {list(target.shape)}")
            else:
                targets.append((item, spec, box, target))
        if wrong:
            raise SpecMismatch(
                f"{len(wrong)} tensors do not fit what was saved; values are never cast or reshaped: {shortened(wrong)}"
            )
        direct = [entry for entry in targets if _in_place(entry[3])]
        self._contents.fill(Wanted(spec=spec, box=box, buffer=buffer_of(target)) for _, spec, box, target in direct)
        for item, _, _, target in direct:
            planner.commit_tensor(item, target)
        self._stage([entry for entry in targets if not _in_place(entry[3])], planner)

    def _stage(self, targets: list[tuple[ReadItem, TensorSpec, Box, torch.Tensor]], planner: LoadPlanner) -> None:
        """Read what cannot be read in place by way of host memory, a batch at a time."""
        assert self._contents is not None
        while targets:
            held = 0
            batch: list[tuple[ReadItem, TensorSpec, Box, torch.Tensor, bytearray]] = []
            while targets and (not batch or held + targets[-1][3].nbytes <= BATCH_BYTES):
                item, spec, box, target = targets.pop()
                held += target.nbytes
                batch.append((item, spec, box, target, bytearray(target.nbytes)))
            self._contents.fill(Wanted(spec=spec, box=box, buffer=data) for _, spec, box, _, data in batch)
            for item, spec, box, target, data in batch:
                target.copy_(tensor_of(data, spec.dtype, box.shape))
                planner.commit_tensor(item, target)

    def _load_objects(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        assert self._contents is not None
        keys = self._contents.objects
        data = self._contents.read([keys[item.storage_index.fqn] for item in items])
        # All are checked before any is handed over; what torch gets to unpickle is written here, never what was stored.
        values = {key: objects.unwrap(key, bytes(found)) for key, found in data.items()}
        for item in items:
            planner.load_bytes(item, io.BytesIO(objects.saved(values[keys[item.storage_index.fqn]])))


def object_piece(key: str, data: bytes) -> Piece:
    """Return an object's bytes as a tensor of uint8."""
    spec = TensorSpec(key=key, dtype="uint8", shape=(len(data),))
    return Piece(spec=spec, box=spec.box, data=memoryview(data))


def shortened(lines: list[str]) -> str:
    """Return the first of many lines, in one."""
    return "; ".join(lines[:8]) + ("; ..." if len(lines) > 8 else "")


def plain_path(name: str, paths: Mapping[str, objects.Path]) -> tuple[str | int, ...]:
    """Return the way to an entry in DCP's words, which knows text for keys alone."""
    return tuple(str(step[1]) if isinstance(step, list) else step for step in paths.get(name, (name,)))


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


def _read_box(item: ReadItem) -> Box:
    offset = item.storage_index.offset
    start = tuple(a + b for a, b in zip(offset, item.storage_offsets, strict=True)) if offset is not None else ()
    return Box(start=start, stop=tuple(a + n for a, n in zip(start, item.lengths, strict=True)))


def _in_place(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
