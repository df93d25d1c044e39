"""Mains that build models on a device with a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic3d.devices.cpu import CpuDevice
from elastic3d.parallel.assembly import Assembly
from elastic3d.parallel.mesh import Mesh, join_world
from elastic3d.parallel.shard_request import ShardRequest
from elastic3d.parallel.state import local
from elastic3d.training import Run

DEPTH, WIDTH = 12, 128
BLOCK = 4 * (WIDTH + 1) * WIDTH


class Deep(nn.Module):
    """Blocks that have nearly all of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH))


class Budget(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A device's memory: what operations have made and is still held, but for what was made while `elsewhere`."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nbytes, self._elsewhere = nbytes, False
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        self._elsewhere = True
        yield
        self._elsewhere = False

    @property
    def used(self) -> int:
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        return sum(nbytes for _, nbytes in self._held.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = local(leaf).untyped_storage()
                held = self._held.get(storage._cdata)
                if held is None or held[0].expired():
                    self._held[storage._cdata] = StorageWeakRef(storage), 0 if self._elsewhere else storage.nbytes()
                    if (used := self.used) > self._nbytes:
                        raise torch.OutOfMemoryError(f"{used} bytes held of {self._nbytes}")
        return made


class Apart(CpuDevice):
    """A device whose memory is not the host's: what is placed on it is copied there."""

    def place(self, module: nn.Module) -> None:
        module._apply(torch.clone, recurse=False)  # type: ignore[no-untyped-call]


def build_within(run: Run) -> list[bool]:
    """Build the model in each way with room for this rank's part and two blocks; return which ways left it blank."""
    device = Apart()
    join_world(run._assignment, device)
    mesh = Mesh(run.layout, run.rank, device)
    blank = []
    for whole_below in (1 << 30, 0):
        for expects_state in (False, True):
            with Budget(4 * (8 * WIDTH + 1) + DEPTH * BLOCK // run.world + 2 * BLOCK) as budget:
                build = partial(_elsewhere, budget, Deep)
                plan = ShardRequest(
                    build=build,
                    blocks="blocks",
                    seed=3,
                    reduction="ordered",
                    whole_below=whole_below,
                    tensor={"blocks.*.0": "column"} if run.layout.tp > 1 else None,
                )
                assembly = Assembly(plan, mesh, expects_state=expects_state)
                blank.append(assembly.deferred is not None)
                assembly.initialise()
                parts = [local(parameter) for parameter in assembly.model.parameters()]
                assert DEPTH * BLOCK // run.world <= sum(part.nbytes for part in parts) < DEPTH * BLOCK
                assert all(float(part.std()) > 0 for part in parts)
            del assembly, parts
    return blank


def _elsewhere(budget: Budget, build: Callable[[], nn.Module]) -> nn.Module:
    with budget.elsewhere():
        return build()
