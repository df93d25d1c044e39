"""Saves what DCP has planned; see `dcp`."""

from __future__ import annotations

import dataclasses
import io
import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
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
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from checkpointing.errors import FormatError, Inconsistent, NoCheckpoint, Superseded
from checkpointing.format import names
from checkpointing.format.tiles import Box, Piece, TensorSpec
from checkpointing.interchange import objects
from checkpointing.interchange.dcp_turns import Staged, Turns
from checkpointing.interchange.plain import NoPlainForm, name_of_class
from checkpointing.interchange.tensors import buffer_of, dtype_name, object_piece, shortened, shown
from checkpointing.reading.naming import committed
from checkpointing.reading.reader import Checkpoint, open_checkpoint, read_latest
from checkpointing.reading.registered import check_register
from checkpointing.saving.commit import Committed, commit, fence
from checkpointing.saving.options import SaveOptions
from checkpointing.saving.save import save_rank
from checkpointing.stores.opening import open_store
from checkpointing.stores.protocol import Store

FACTS: Mapping[str, Any] = {"made_by": "torch.distributed.checkpoint"}
"""The facts of a checkpoint if its Writer was given none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What the coordinator sends to each rank."""

    rank: int
    world: int
    made_in: int


@dataclass(slots=True, kw_only=True)
class _Save:
    """The state of one save, from its first call to its last, all of them made by one thread.

    alone: whether no other save was under way when it was requested. step: None until it is set up. save_id: another
    one each time, as in torch's writers. part: what the coordinator has sent. paths: where entries belong. names: of
    entries whose keys differ from their names, by key.
    """

    alone: bool
    save_id: str
    step: int | None = None
    coordinator: bool = False
    part: _Part | None = None
    generation: int | None = None
    paths: dict[str, objects.Path] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)


class Writer(StorageWriter, AsyncStager):
    """Save what DCP plans as one checkpoint of this format. Every rank makes one with the same arguments.

    store: a URL, or an open store (which then must be picklable for `async_save` in another process).
    step: the training step; `checkpoint_id` of each save replaces it, for that save. facts: JSON, the same on every
    rank. generation: fences out those below; by default the one after the newest in the store, taken at the first save
    and again when a step is not above the last.
    attempt: increase it to save other contents under the same step and generation. incremental: refer to the tiles of
    the newest checkpoint where they are equal. options: how each rank saves: codec, bandwidth, transfers.
    overwrite: as in torch; with False, a step that was already committed in the store is refused (FileExistsError).

    Saves of `async_save` run one after the other, in the order they were requested, in a thread or in a process, and
    each has its own step and tensors. Those requested while another one was under way belong to one history: the newest
    step is `latest`, and an older one that comes after it is Superseded. With an `async_stager` of your own the order
    is not known: wait for one save before you request the next.

    The coordinator's save raises Fenced, Superseded and their like (all of DCP's errors arrive as CheckpointException).
    `committed` is the result of the last save, on the coordinator only.
    """

    committed: Committed | None = None

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        *,
        step: int | None = None,
        facts: Mapping[str, Any] | None = None,
        generation: int | None = None,
        attempt: int = 0,
        incremental: bool = True,
        options: SaveOptions | None = None,
        overwrite: bool = True,
    ) -> None:
        super().__init__()
        self._url = os.fspath(store) if isinstance(store, str | os.PathLike) else None
        self._open = None if isinstance(store, str | os.PathLike) else store
        self._step = step
        self._facts = dict(FACTS if facts is None else facts)
        self._generation = generation
        self._given = generation is not None
        self._claimed = False
        self._last: int | None = None
        self._attempt = attempt
        self._incremental = incremental
        self._options = options or SaveOptions()
        self._overwrite = overwrite
        self._here, self._turns, self._lock = threading.local(), Turns(), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the saves of this process, and an opened store if its URL opens it again."""
        kept = {name: value for name, value in self.__dict__.items() if name not in ("_here", "_turns", "_lock")}
        return {**kept, "_open": None if self._url else self._open}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with no saves."""
        self.__dict__.update(state)
        self._here, self._turns, self._lock = threading.local(), Turns(), threading.Lock()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the id is a step."""
        return str(checkpoint_id).isdecimal()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the step that this thread saves next."""
        self._here.step = None
        if checkpoint_id is None:
            return
        if not self.validate_checkpoint_id(checkpoint_id):
            raise ValueError(
                f"checkpoint_id is {os.fspath(checkpoint_id)!r}; this writer takes the step, such as 100: where to "
                "write is said by the URL given to Writer"
            )
        self._here.step = int(str(checkpoint_id))

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy for `async_save`, which is saved when the earlier saves are done."""
        turn = self._turns.take()
        try:
            stager = DefaultStager(StagingOptions(False, False, False, False))
            try:
                staged = stager.stage(state_dict)
            finally:
                stager.close()
            assert isinstance(staged, dict)
            return Staged(staged, self._turns, turn)
        except BaseException:
            turn.end()
            raise

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Return False: the copy is made when `stage` returns."""
        return False

    def synchronize_staging(self) -> None:
        """Do nothing: the copy is made when `stage` returns."""

    def close(self) -> None:
        """Do nothing: nothing is kept between saves."""

    def storage_meta(self) -> StorageMeta:
        """Wait for this save's turn, and return its name: DCP asks for it before a planner is given the state."""
        self._here.save = save = _Save(alone=self._turns.enter(), save_id=str(uuid.uuid4()))
        step = self._asked()
        return StorageMeta(checkpoint_id=None if step is None else str(step), save_id=save.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Open the store, for the first save."""
        if not kwargs.get("use_collectives", True):
            raise ValueError("a checkpoint is committed once for all ranks: use_collectives=False cannot be used")
        save: _Save | None = getattr(self._here, "save", None)
        if save is None or save.step is not None:
            self.storage_meta()
            save = self._save
        save.step, self._here.step = self._asked(), None
        if save.step is None:
            raise ValueError("no step was given: Writer(url, step=100), or checkpoint_id=100 with each save")
        save.coordinator = is_coordinator
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
                wrong.append(f"{shown(item.index.fqn)}: {data.properties.dtype} {list(data.size)}")
        if wrong:
            raise ValueError(f"{len(wrong)} entries cannot be stored: {shortened(wrong)}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the generation, once, and give every rank its part."""
        usable = sum(plan.usable for plan in plans)
        if 0 < usable < len(plans) and not self._given:
            raise ValueError("plan caching hides from some ranks what the others are told: give Writer a generation")
        save = self._save
        with self._lock:
            save.generation = generation = self._claim(save)
        save.paths = {
            name: list(path) for plan in plans for name, path in (plan.planner_data or {}).items() if _is_path(path)
        }
        save.names = _other_names(item.index.fqn for plan in plans for item in plan.items)
        return [
            dataclasses.replace(plan, storage_data=_Part(rank=rank, world=len(plans), made_in=generation))
            for rank, plan in enumerate(plans)
        ]

    def _claim(self, save: _Save) -> int:
        """Return the generation that a save is made in; Superseded if a newer one of its history came first."""
        assert save.step is not None
        if not self._overwrite:
            self._refuse_overwriting(save.step)
        if not self._given and self._last is not None and save.step <= self._last:
            if save.step < self._last and not save.alone:
                raise Superseded(
                    f"step {save.step} is not saved: step {self._last}, asked for while it was under way or before it "
                    "was, is committed. To go back to an older step, wait for the saves under way first"
                )
            # Training went back: what follows is another history, which comes after the present one.
            self._claimed, self._generation, self._last = False, None, None
        if not self._claimed:
            check_register(self._store())
            if self._generation is None:
                ref = read_latest(self._store())
                self._generation = 1 if ref is None else ref.generation + 1
            fence(self._store(), self._generation)
            self._claimed = True
        assert self._generation is not None
        return self._generation

    def _refuse_overwriting(self, step: int) -> None:
        store = self._store()
        for name in committed(store, read_latest(store)):
            parsed = names.parse_checkpoint(name)
            if parsed is not None and parsed[0].step == step:
                raise FileExistsError(
                    f"store {store.url}: step {step} was committed before, as {name}, and overwrite=False was given"
                )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, durably."""
        save = self._save
        assert save.step is not None
        save.part = part = plan.storage_data
        assert isinstance(part, _Part)
        sizes: dict[Any, int] = {}
        save_rank(
            self._store(),
            step=save.step,
            made_in=part.made_in,
            attempt=self._attempt,
            rank=part.rank,
            world=part.world,
            pieces=self._pieces(save, plan, planner, sizes),
            facts=self._facts,
            parent=self._parent(),
            options=self._options,
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(index=index, size_in_bytes=size, storage_data=save.step) for index, size in sizes.items()]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written; Inconsistent when they wrote different steps."""
        save = self._save
        assert save.step is not None
        assert save.part is not None
        assert save.generation is not None
        for rank, written in enumerate(results):
            if written and written[0].storage_data != save.step:
                raise Inconsistent(
                    f"rank {rank} saved step {written[0].storage_data} where the coordinator saved step {save.step}: "
                    "give all ranks the same checkpoint_id, and wait for one save before the next if async_save has a "
                    "stager of your own"
                )
        done = commit(
            self._store(),
            step=save.step,
            made_in=save.part.made_in,
            attempt=self._attempt,
            committed_in=save.generation,
            world=save.part.world,
        )
        with self._lock:
            if save.generation == self._generation:
                self._last = save.step if self._last is None else max(save.step, self._last)
            self.committed = done
        metadata.storage_meta = StorageMeta(checkpoint_id=done.checkpoint, save_id=save.save_id)

    @property
    def _save(self) -> _Save:
        save: _Save = self._here.save
        return save

    def _asked(self) -> int | None:
        """Return the step that this thread was given for its save, else the Writer's own."""
        step: int | None = getattr(self._here, "step", None)
        return self._step if step is None else step

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
            # A damaged parent does not prevent a save: everything is written, and `verify` reports the damage.
            return None

    def _pieces(self, save: _Save, plan: SavePlan, planner: SavePlanner, sizes: dict[Any, int]) -> Iterator[Piece]:
        # Objects come first, so that those that cannot be kept are found before anything is written.
        kept = _objects(plan, planner)
        for item in plan.items:
            piece = object_piece(*kept[item.index]) if item.index in kept else _piece(item, planner)
            sizes[item.index] = piece.data.nbytes
            yield piece
        if save.coordinator:
            # Cached plans come without their paths, but the planner has kept the whole metadata.
            known = getattr(planner, "metadata", None)
            cached = getattr(known, "planner_data", None) or {}
            paths = {**{name: list(path) for name, path in cached.items() if _is_path(path)}, **save.paths}
            others = {**_other_names(getattr(known, "state_dict_metadata", None) or ()), **save.names}
            if others:
                yield object_piece(objects.NAMES, objects.to_json(others))
            if paths:
                yield object_piece(objects.PATHS, objects.to_json(paths))
            tied = _ties(planner)
            if tied:
                yield object_piece(objects.TIES, objects.to_json(tied))


def _other_names(given: Iterable[str]) -> dict[str, str]:
    """Return names that cannot be keys, by the keys that replace them."""
    return {key: name for name in given if (key := objects.key_of(name)) != name}


def _objects(plan: SavePlan, planner: SavePlanner) -> dict[Any, tuple[str, bytes]]:
    """Return key and bytes of every object; ValueError names those that could not be loaded again."""
    kept: dict[Any, tuple[str, bytes]] = {}
    refused = []
    for item in plan.items:
        if item.type is not WriteItemType.BYTE_IO:
            continue
        resolved = planner.resolve_data(item)
        assert isinstance(resolved, io.BytesIO)
        name = objects.key_of(item.index.fqn)
        key, data = objects.wrap_saved(name, resolved.getvalue())
        try:
            if not objects.loadable(key, data):
                key, data = objects.wrap_plain(name, _looked_up(item, planner, resolved.getvalue()))
            kept[item.index] = key, data
        except NoPlainForm as error:
            refused.append(f"{shown(item.index.fqn)}: {error}")
    if refused:
        raise ValueError(
            f"{len(refused)} entries are not saved, for they would be pickles that nobody could load: "
            f"{shortened(refused)}. Save them as tensors or plain data, such as numpy's arrays, dates and paths, or "
            "allow their classes with torch.serialization.add_safe_globals, here and wherever they are loaded"
        )
    return kept


def _looked_up(item: WriteItem, planner: SavePlanner, data: bytes) -> Any:
    """Return the value that a planner has pickled; NoPlainForm if it is not known to be the one it was given."""
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise NoPlainForm("a pickle of a planner that has no lookup_object")
    value = lookup(item.index)
    if objects.saved(value) != data:
        raise NoPlainForm(f"{name_of_class(type(value))}, which the planner changes")
    return value


def _is_path(path: Any) -> bool:
    return isinstance(path, tuple) and all(type(step) in (str, int) for step in path)


def _ties(planner: SavePlanner) -> list[list[str]]:
    """Return groups of names of tensors that share memory, as far as the planner has them by name."""
    groups: dict[Any, list[str]] = {}
    state = getattr(planner, "state_dict", None)
    for name, value in state.items() if isinstance(state, Mapping) else ():
        # A DTensor, recognised by its methods: this library knows no mesh.
        whole = not hasattr(value, "device_mesh")
        local = value if whole else value.to_local()
        if type(name) is str and isinstance(local, torch.Tensor) and _plain(local) and local.numel():
            where = (local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride())
            spread = None if whole else (tuple(value.shape), value.device_mesh, value.placements)
            groups.setdefault((where, spread), []).append(objects.key_of(name))
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _piece(item: WriteItem, planner: SavePlanner) -> Piece:
    assert item.tensor_data is not None
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    dtype, sizes = dtype_name(tensor.dtype), tuple(item.tensor_data.chunk.sizes)
    if dtype is None or tensor.layout is not torch.strided or tuple(tensor.shape) != sizes:
        raise ValueError(
            f"{shown(item.index.fqn)}: planned as {list(sizes)}, given as {tensor.layout} {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    start = tuple(item.tensor_data.chunk.offsets)
    spec = TensorSpec(key=objects.key_of(item.index.fqn), dtype=dtype, shape=tuple(item.tensor_data.size))
    box = Box(start=start, stop=tuple(a + n for a, n in zip(start, sizes, strict=True)))
    try:
        data = buffer_of(plain.cpu().contiguous())
    except (RuntimeError, TypeError) as error:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            raise
        raise ValueError(
            f"{shown(item.index.fqn)}: a {name_of_class(type(tensor))} has no bytes of its own ({error}); save what it "
            "is made of, or what its dequantize() returns, as plain tensors"
        ) from error
    return Piece(spec=spec, box=box, data=data)
