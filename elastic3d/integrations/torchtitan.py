"""Checkpoints of torchtitan in a store of ours, by torch's own distributed checkpoints.

    from elastic3d.integrations.torchtitan import StoreCheckpointManager

    def llama3_8b_in_a_store() -> Trainer.Config:
        config = llama3_8b()
        config.checkpoint = StoreCheckpointManager.Config(enable=True, interval=500, store="s3://bucket/run")
        return config

Under `torchrun --rdzv-backend=etcd` in mode `restart` the workers of each generation go on from the newest committed
checkpoint. For torchtitan from 0.3 on, whose configurations take any checkpoint manager.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchtitan.components.checkpointer import MODEL, CheckpointManager
from torchtitan.components.checkpointer.dcp import AsyncMode

from checkpointing.interchange.dcp import Reader, Writer
from elastic3d.errors import UsageError
from elastic3d.integrations.newest import newest_step

_Settings = CheckpointManager.Config


class StoreCheckpointManager(CheckpointManager):  # type: ignore[misc]  # torchtitan has no types here
    """Saves and restores what torchtitan's own manager does, in the same order, into a store.

    A run goes on from the newest checkpoint of its store, or from the one that `load_step` names; while there is none,
    from `initial_load_path`, as ever. `folder` is only for what `last_save_in_hf` writes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Settings):  # type: ignore[misc, valid-type]
        """Those of torchtitan, and store: URL (any fsspec one) or path, which must be given."""

        store: str = ""

    pg: dist.ProcessGroup | None

    def __init__(self, config: Config, **given: Any) -> None:
        if config.enable and not config.store:
            raise UsageError('StoreCheckpointManager: say where checkpoints go, as in store="s3://bucket/run"')
        if config.enable and AsyncMode(config.async_mode) is AsyncMode.ASYNC_WITH_PINNED_MEM:
            raise UsageError('StoreCheckpointManager: async_mode="async_with_pinned_mem" is not taken; give "async"')
        super().__init__(config, **given)
        if config.enable:
            self._url, self._writer = config.store, Writer(config.store)
            # Saves in the background must not mix their collectives with those of training; and they are of the host.
            if self.pg is None:
                self.pg = dist.new_group(backend="gloo")

    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode, *more: Any, **others: Any
    ) -> Any:
        """Commit a state as that of the step in `checkpoint_id`; in the background if so configured."""
        if others.get("to_hf"):
            return super().dcp_save(state_dict, checkpoint_id, async_mode, *more, **others)
        step = checkpoint_id.rpartition("-")[2]
        if async_mode is AsyncMode.DISABLED:
            return save(state_dict, storage_writer=self._writer, checkpoint_id=step)
        saving = async_save(state_dict, storage_writer=self._writer, checkpoint_id=step, process_group=self.pg)
        assert isinstance(saving, Future)
        return saving

    def _load(self, step: int = -1) -> bool:
        step = self._newest() if step == -1 else step
        if step == -1:
            return bool(super()._load())
        states = self._states_to_load(step == 0)
        load(states, storage_reader=Reader(self._url, str(step)))
        # What DCP loads in place are tensors of the model's own; a fused one is put together from several.
        self.states[MODEL].load_state_dict(states)
        return True

    def _newest(self) -> int:
        """Return the newest step as rank 0 reads it, -1 for none: `latest` may move between the reads of two ranks."""
        step = torch.full((1,), -1, dtype=torch.int64)
        if dist.get_rank() == 0 and (newest := newest_step(self._url)) is not None:
            step.fill_(newest)
        dist.broadcast(step, 0, group=self.pg)
        return int(step)

    def _find_load_step(self, folder: str = "") -> int:
        """Return that there is nothing to go on from in a folder: checkpoints are in the store."""
        return -1

    def _should_purge(self) -> bool:
        """Return False: `elastic3d ckpt gc` removes what is not to be kept."""
        return False
