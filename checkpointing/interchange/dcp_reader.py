"""Loads what DCP has planned; see `dcp`."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
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
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from checkpointing.errors import SpecMismatch
from checkpointing.format.announcement import Role
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.interchange import objects
from checkpointing.interchange.contents import BATCH_BYTES, Contents, Wanted
from checkpointing.interchange.tensors import DTYPES, buffer_of, shortened, tensor_of
from checkpointing.reading.announcing import announced
from checkpointing.reading.reader import open_checkpoint
from checkpointing.stores.opening import open_store
from checkpointing.stores.protocol import Store


class Reader(StorageReader):
    """Load a checkpoint of this format into whatever layout DCP plans; every tile is verified.

    store: a URL, or an open store. checkpoint: `latest` or a checkpoint's name; `checkpoint_id` of a load replaces it.
    All ranks read the checkpoint that the coordinator has opened.

    Tensors of another dtype are an error that names all of them, unless `cast` lets torch convert the values. Objects
    saved as pickles are loaded only if torch's `weights_only` unpickler accepts them, otherwise Unloadable. A missing
    store is an error of the load, and arrives as CheckpointException like all others.
    """

    def __init__(
        self, store: str | os.PathLike[str] | Store, checkpoint: str = "latest", *, cast: bool = False
    ) -> None:
        super().__init__()
        self._url = os.fspath(store) if isinstance(store, str | os.PathLike) else None
        self._open = None if isinstance(store, str | os.PathLike) else store
        self._name = checkpoint
        self._cast = cast
        self._contents: Contents | None = None
        self.load_id = str(uuid.uuid4())

    @property
    def _store(self) -> Store:
        if self._open is None:
            assert self._url is not None
            self._open = open_store(self._url, write=False)
        return self._open

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: whether it exists shows when it is opened."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the checkpoint to be loaded next."""
        self._contents = None
        self.load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self._name = str(checkpoint_id)

    # Not named kwargs: DCP would then call it again for a rank's own metadata, which does not exist here.
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the checkpoint's contents in DCP's terms: each tensor as a single chunk."""
        self._contents = contents = Contents(open_checkpoint(self._store, self._name))
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for spec in contents.tensors:
            if spec.dtype not in DTYPES:
                raise SpecMismatch(f"{spec.key}: this torch has no {spec.dtype}; upgrade it to load the checkpoint")
            whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(spec.shape)), sizes=torch.Size(spec.shape))
            properties = TensorProperties(dtype=DTYPES[spec.dtype])
            entries[contents.name(spec.key)] = TensorStorageMetadata(
                properties=properties, size=torch.Size(spec.shape), chunks=[whole] if spec.box.numel else []
            )
        entries |= {name: BytesStorageMetadata() for name in contents.objects}
        paths = contents.paths()
        return Metadata(
            state_dict_metadata=entries,
            planner_data={name: objects.plain_path(name, paths) for name in entries},
            storage_meta=StorageMeta(checkpoint_id=contents.checkpoint.name, load_id=self.load_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tell every rank which checkpoint it is: `latest` may move between the reads of two ranks."""
        assert self._contents is not None
        name = self._contents.checkpoint.name
        return [dataclasses.replace(plan, storage_data=name) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank planned, directly into tensors that are contiguous in host memory."""
        assert self._contents is not None
        if plan.storage_data != self._contents.checkpoint.name:
            self._contents = Contents(open_checkpoint(self._store, plan.storage_data))
        with announced(self._store, Role.READER, self._contents.checkpoint.name):
            self._load_tensors([item for item in plan.items if item.type is LoadItemType.TENSOR], planner)
            self._load_objects([item for item in plan.items if item.type is LoadItemType.BYTE_IO], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load_tensors(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        assert self._contents is not None
        targets, wrong = [], []
        for item in items:
            target = planner.resolve_tensor(item).detach()
            spec = self._contents.spec(item.storage_index.fqn)
            box = _read_box(item)
            other = spec is not None and DTYPES.get(spec.dtype) != target.dtype
            if spec is None or (other and not self._cast) or box.shape != tuple(target.shape):
                saved = f"{spec.dtype} {list(spec.shape)}" if spec else "not there"
                wrong.append(f"{item.storage_index.fqn}: saved {saved}, wanted {target.dtype} {list(target.shape)}")
            else:
                targets.append((item, spec, box, target))
        if wrong:
            raise SpecMismatch(
                f"{len(wrong)} tensors do not fit what was saved: {shortened(wrong)}. Nothing is reshaped; "
                "Reader(..., cast=True) converts values to another dtype, as torch does it"
            )
        direct = [entry for entry in targets if _in_place(entry[3], entry[1])]
        self._contents.fill(Wanted(spec=spec, box=box, buffer=buffer_of(target)) for _, spec, box, target in direct)
        for item, _, _, target in direct:
            planner.commit_tensor(item, target)
        self._stage([entry for entry in targets if not _in_place(entry[3], entry[1])], planner)

    def _stage(self, targets: list[tuple[ReadItem, TensorSpec, Box, torch.Tensor]], planner: LoadPlanner) -> None:
        """Read by way of host memory what cannot be read in place, a batch at a time."""
        assert self._contents is not None
        while targets:
            held = 0
            batch: list[tuple[ReadItem, TensorSpec, Box, torch.Tensor, bytearray]] = []
            while targets and (not batch or held + targets[-1][3].nbytes <= BATCH_BYTES):
                item, spec, box, target = targets.pop()
                nbytes = box.numel * spec.itemsize
                held += nbytes
                batch.append((item, spec, box, target, bytearray(nbytes)))
            self._contents.fill(Wanted(spec=spec, box=box, buffer=data) for _, spec, box, _, data in batch)
            for item, spec, box, target, data in batch:
                target.copy_(tensor_of(data, spec.dtype, box.shape))
                planner.commit_tensor(item, target)

    def _load_objects(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        assert self._contents is not None
        keys = self._contents.objects
        data = self._contents.read([keys[item.storage_index.fqn] for item in items])
        # All are checked before any is passed on; torch only unpickles bytes written here, never those stored.
        values = {key: objects.unwrap(key, bytes(wrapped)) for key, wrapped in data.items()}
        for item in items:
            planner.load_bytes(item, io.BytesIO(objects.saved(values[keys[item.storage_index.fqn]])))


def _read_box(item: ReadItem) -> Box:
    offset = item.storage_index.offset
    start = tuple(a + b for a, b in zip(offset, item.storage_offsets, strict=True)) if offset is not None else ()
    return Box(start=start, stop=tuple(a + n for a, n in zip(start, item.lengths, strict=True)))


def _in_place(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    if tensor.dtype != DTYPES[spec.dtype]:
        return False
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
