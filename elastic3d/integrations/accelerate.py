"""Checkpoints of a script of Accelerate in a store of ours, by torch's own distributed checkpoints.

    from elastic3d.integrations.accelerate import AcceleratorCheckpoints

    accelerator = Accelerator()
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    checkpoints = AcceleratorCheckpoints(accelerator, "s3://bucket/run")
    for step in range(checkpoints.restore(), 20_000):
        ...
        if step % 500 == 499:
            checkpoints.save(step + 1)
    checkpoints.finish()

Models under DDP and FSDP2 are saved as they are spread, and loaded into any other number of processes. Under
`torchrun --rdzv-backend=etcd` in mode `restart` the workers of each generation go on from the newest committed
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from checkpointing.interchange.dcp import Reader, Writer
from elastic3d.errors import UsageError
from elastic3d.integrations.newest import newest_step

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class AcceleratorCheckpoints:
    """Saves and restores what an Accelerator has prepared: models, optimizers, schedules, and registered objects.

    Every rank makes one, after `accelerator.prepare`, and makes all its calls alike.

    accelerator: An Accelerator; several models need as many optimizers, in the same order. store: URL (any fsspec one)
    or path. extra: further objects with state_dict and load_state_dict, by name.
    """

    def __init__(
        self, accelerator: Any, store: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None
    ) -> None:
        models, optimizers = list(accelerator._models), list(accelerator._optimizers)
        if not models:
            raise UsageError("AcceleratorCheckpoints: call accelerator.prepare(model, optimizer, ...) first")
        if str(accelerator.distributed_type).rpartition(".")[2] in ("DEEPSPEED", "MEGATRON_LM"):
            raise UsageError(f"{accelerator.distributed_type} keeps its state by itself; DDP and FSDP2 are taken")
        if optimizers and len(models) != len(optimizers):
            raise UsageError(
                f"accelerator.prepare: {len(models)} models and {len(optimizers)} optimizers; give each model one"
            )
        self._url, self._writer = os.fspath(store), Writer(store)
        self._pairs = [
            (model, [optimizers[place].optimizer] if optimizers else []) for place, model in enumerate(models)
        ]
        self._others: dict[str, Any] = {
            **{f"schedule{place}": one for place, one in enumerate(accelerator._schedulers)},
            **{f"object{place}": one for place, one in enumerate(accelerator._custom_objects)},
            # Of losses, with mixed_precision="fp16".
            **({"scaler": accelerator.scaler} if getattr(accelerator, "scaler", None) is not None else {}),
            **dict(extra or {}),
        }
        self._group: Any = None
        if dist.is_initialized():
            # Saves in the background must not mix their collectives with those of training; and they are of the host.
            self._group = dist.new_group(backend="gloo")
        self._saving: Future[Any] | None = None

    def restore(self) -> int:
        """Load the newest committed checkpoint, verified; return its step, 0 where there is none yet."""
        step = self._newest()
        if step:
            state = self._state()
            load(state, storage_reader=Reader(self._url, str(step)), process_group=self._group)
            for place, (model, optimizers) in enumerate(self._pairs):
                set_state_dict(
                    model,
                    optimizers,
                    model_state_dict=state[f"model{place}"],
                    optim_state_dict=state[f"optimizer{place}"],
                    options=OPTIONS,
                )
            for name, one in self._others.items():
                one.load_state_dict(state[name])
        return step

    def save(self, step: int, *, wait: bool = False) -> None:
        """Copy the state and commit it as that of so many steps, in the background unless `wait`.

        Waits for the save before it, and raises what that one raised.
        """
        self.finish()
        if self._group is None:
            save(self._state(), storage_writer=self._writer, checkpoint_id=str(step))
            return
        saving = async_save(
            self._state(), storage_writer=self._writer, checkpoint_id=str(step), process_group=self._group
        )
        assert isinstance(saving, Future)
        self._saving = saving
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way; call it at the end."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _newest(self) -> int:
        """Return the newest step as rank 0 reads it: `latest` may move between the reads of two ranks."""
        step = torch.zeros(1, dtype=torch.int64)
        if self._group is None or dist.get_rank() == 0:
            step.fill_(newest_step(self._url) or 0)
        if self._group is not None:
            dist.broadcast(step, 0, group=self._group)
        return int(step)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for place, (model, optimizers) in enumerate(self._pairs):
            state[f"model{place}"], state[f"optimizer{place}"] = get_state_dict(model, optimizers, options=OPTIONS)
        return {**state, **{name: one.state_dict() for name, one in self._others.items()}}
