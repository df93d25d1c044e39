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
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, _get_fqns, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from checkpointing.interchange.dcp import Reader, Writer
from elastic3d.errors import UsageError
from elastic3d.integrations.newest import newest_step
from elastic3d.integrations.tree import SKELETON, put_together, taken_apart

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
        if step is not None:
            reader = Reader(self._url, str(step))
            state = self._begun(reader.read_metadata().state_dict_metadata)
            load(state, storage_reader=reader, process_group=self._group)
            for place, (model, optimizers) in enumerate(self._pairs):
                set_state_dict(
                    model,
                    optimizers,
                    model_state_dict=state[f"model{place}"],
                    optim_state_dict=state[f"optimizer{place}"],
                    options=OPTIONS,
                )
            others = put_together({n: v[0] if n.startswith(SKELETON) else v for n, v in state.items()})
            for name, one in self._others.items():
                one.load_state_dict(others[name])
        return step or 0

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

    def _newest(self) -> int | None:
        """Return the newest step as rank 0 reads it: `latest` may move between the reads of two ranks."""
        none = -1
        step = torch.full((1,), none, dtype=torch.int64)
        if self._group is None or dist.get_rank() == 0:
            newest = newest_step(self._url)
            step.fill_(none if newest is None else newest)
        if self._group is not None:
            dist.broadcast(step, 0, group=self._group)
        return None if int(step) == none else int(step)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for place, (model, optimizers) in enumerate(self._pairs):
            state[f"model{place}"], state[f"optimizer{place}"] = get_state_dict(model, optimizers, options=OPTIONS)
        others = taken_apart({name: one.state_dict() for name, one in self._others.items()})
        # A tuple is one value for DCP; of a dictionary it would load only what a fresh object has, too.
        return {**state, **{name: (one,) if name.startswith(SKELETON) else one for name, one in others.items()}}

    def _begun(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state to load into, with those tensors of objects that were kept; kept: what DCP says of each.

        Those that a fresh object does not have, or has in another size, are made.
        """
        state = self._state()
        for place, (model, optimizers) in enumerate(self._pairs):
            for optimizer in optimizers:
                _forget_unused(model, optimizer, state[f"optimizer{place}"], {*kept}, f"optimizer{place}.")
        for name in [name for name in state if _is_of(name, self._others) and name not in kept]:
            del state[name]
        for name, one in kept.items():
            if _is_of(name, self._others) and isinstance(one, TensorStorageMetadata):
                fresh = state.get(name)
                if fresh is None or (fresh.shape, fresh.dtype) != (one.size, one.properties.dtype):
                    state[name] = torch.empty(one.size, dtype=one.properties.dtype)
        return state


def _forget_unused(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, flat: dict[str, Any], kept: set[str], prefix: str
) -> None:
    """Drop the state that torch has made for parameters of which an optimizer had none: no gradient until it was saved.

    Where it had none of any, another optimizer was saved; DCP names what is missing.
    """
    state = {key for key in flat if key.startswith("state.")}
    missing = {key for key in state if f"{prefix}{key}" not in kept}
    if not missing or missing == state:
        return
    for name, parameter in model.named_parameters():
        for whole in _get_fqns(model, name):
            own = {key for key in missing if key.startswith(f"state.{whole}.")}
            if own and own == {key for key in state if key.startswith(f"state.{whole}.")}:
                optimizer.state.pop(parameter, None)
                for key in own:
                    del flat[key]


def _is_of(name: str, objects: Iterable[str]) -> bool:
    """Return whether a tensor of this name is one of these objects'."""
    return any(name.startswith((f"{one}.", f"~{SKELETON}{one}.")) for one in objects)
