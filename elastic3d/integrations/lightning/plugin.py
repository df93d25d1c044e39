"""A CheckpointIO of Lightning that writes to a store of ours, as any storage URL says.

    from elastic3d.integrations.lightning import checkpoint_io

    io = checkpoint_io("s3://bucket/run", keep=3)
    trainer = Trainer(plugins=[io], callbacks=[ModelCheckpoint(every_n_train_steps=500, save_top_k=-1)])
    trainer.fit(model, data, ckpt_path=io.newest())

Under `torchrun --rdzv-backend=etcd` in mode `restart`, the workers of each generation go on from the newest committed
checkpoint. Lightning calls it on rank 0 alone, with the whole state, as for DDP.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from checkpointing import open_store
from checkpointing.errors import CheckpointError
from checkpointing.interchange.dcp import Reader, Writer
from checkpointing.retention.collection import collect
from checkpointing.retention.policy import Retention
from checkpointing.stores.address import redacted
from elastic3d import threads
from elastic3d.errors import UsageError
from elastic3d.integrations.newest import newest_step
from elastic3d.integrations.packages import need
from elastic3d.integrations.tree import put_together, taken_apart

LIBRARIES = ("lightning.fabric", "lightning_fabric")
"""Two packages, each with classes of its own: the one that the script has imported is meant."""

STEP = re.compile(r"(?<![A-Za-z0-9_])step=?(\d+)")
LAST = re.compile(r"last(-v\d+)?(\.ckpt)?")


def checkpoint_io(
    store: str | os.PathLike[str], *, keep: int | None = None, background: bool = True, grace: float = 300.0
) -> Any:
    """Return a CheckpointIO for `Trainer(plugins=[...])`, with a method `newest()` for its `ckpt_path=`.

    Args:
        store: URL (any fsspec one) or path of the checkpoints.
        keep: How many of the newest are kept; None, the default, for all. Lightning's own removals change nothing.
        background: Whether a save returns once the state is copied, True by default. The next save waits for it, and
            raises what it raised; so does the end.
        grace: Seconds that objects of dropped checkpoints stay for readers, 300 by default.
    """
    library = next((name for name in LIBRARIES if name in sys.modules), None)
    module = library or need("lightning_fabric", install="elastic3d[lightning]", why="checkpoint_io").__name__
    base = need(f"{module}.plugins", install="elastic3d[lightning]", why="checkpoint_io").CheckpointIO
    kind = type("StoreCheckpointIO", (StoreCheckpoints, base), {})
    return kind(store, keep=keep, background=background, grace=grace)


class StoreCheckpoints:
    """What `checkpoint_io` returns, without Lightning's own base class."""

    def __init__(self, store: str | os.PathLike[str], *, keep: int | None, background: bool, grace: float) -> None:
        self._url, self._background, self._grace = os.fspath(store), background, grace
        self._retention = Retention(keep_last=keep) if keep is not None else None
        self._writer = Writer(self._url)
        self._under_way: Future[None] | None = None

    def newest(self) -> str | None:
        """Return a path that stands for the newest committed checkpoint, None where there is none yet."""
        step = newest_step(self._url)
        return None if step is None else f"step={step}.ckpt"

    def save_checkpoint(
        self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Copy the state, and commit it under its global step; errors of a save in the background come at the next."""
        if storage_options is not None:
            raise UsageError("trainer.save_checkpoint(storage_options=...): options of the store belong to its URL")
        name, step = PurePath(path).name, int(checkpoint["global_step"])
        if not LAST.fullmatch(name) and _step_of(name) != step:
            raise UsageError(
                f"checkpoints are kept by their step, and {name!r} does not name that of this one, {step}, so that it "
                "could not be found again: give ModelCheckpoint a filename with the step, such as '{epoch}-{step}', "
                "its default, and log no metric as 'step'"
            )
        self._wait()
        # Training goes on while they are written.
        flat = {name: _copied(value) for name, value in taken_apart(checkpoint).items()}
        if not self._background:
            self._save(flat, step)
            return
        self._under_way = _in_thread(lambda: self._save(flat, step))

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint of the step that a path names; every tile is verified, and tensors are on the CPU."""
        self._wait()
        name = PurePath(path).name
        step = _step_of(name)
        if step is None and not LAST.fullmatch(name):
            raise UsageError(
                f"{name!r} names no step, and checkpoints are kept by theirs: give ckpt_path=io.newest(), "
                "'step=500.ckpt', or a path that ModelCheckpoint has written"
            )
        flat: dict[str, Any] = {}
        _load_state_dict(
            flat,
            storage_reader=Reader(self._url, str(step) if step is not None else "latest"),
            planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
            no_dist=True,
        )
        return put_together(flat)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: `keep=` says which ones stay, and `elastic3d ckpt gc` removes the others."""

    def teardown(self) -> None:
        """Wait for the save under way."""
        self._wait()

    def _wait(self) -> None:
        saving, self._under_way = self._under_way, None
        if saving is not None:
            saving.result()

    def _save(self, flat: dict[str, Any], step: int) -> None:
        # Skeletons stay in one piece: each of the two would leave out what is empty.
        whole = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        save(flat, storage_writer=self._writer, planner=whole, checkpoint_id=str(step), no_dist=True)
        if self._retention is not None:
            try:
                collect(open_store(self._url), self._retention, grace=self._grace, wait=False)
            except (CheckpointError, OSError) as error:
                # This checkpoint is committed, and the next save collects again.
                warnings.warn(f"{redacted(self._url)}: checkpoints beyond keep= stay for now: {error}", stacklevel=2)


def _step_of(name: str) -> int | None:
    """Return the step that a file's name has, None for none; other metrics', such as `loss_step=0.5`, come after it."""
    steps = STEP.findall(name) or re.findall(r"step=?(\d+)", name)
    return int(steps[-1]) if steps else None


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _in_thread(work: Callable[[], None]) -> Future[None]:
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # the edge of the thread: whoever waits for it gets it
            done.set_exception(error)
        else:
            done.set_result(None)

    threads.start(run, name="elastic3d-lightning", edge=threads.Edge.ALONE)
    return done
