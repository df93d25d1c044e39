"""torchtitan's debug model for torchrun on CPUs, with checkpoints of ours: torchtitan_debug.py STORE STEPS MODE FOLDER.

torchtitan knows GPUs only. What it asks of a device is answered here for a CPU; everything else is its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

if not torch.cuda.is_available():
    torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger

from elastic3d.integrations.torchtitan import StoreCheckpointManager

WORDS = 2048
"""Of the debug model's vocabulary."""
PLANNED = 12
"""Steps by which the learning rate is planned, whatever number of them is made."""


class CPUMemory:
    """In the place of a GPU's memory."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        """Do nothing."""


class Text(torch.utils.data.IterableDataset[Any]):
    """Samples drawn by their numbers, of which each rank takes its own; it knows where it is."""

    def __init__(self, rank: int, world: int, length: int) -> None:
        self.rank, self.world, self.length, self.taken = rank, world, length, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            generator = torch.Generator().manual_seed(self.taken * self.world + self.rank)
            self.taken += 1
            text = torch.randint(0, WORDS, (self.length + 1,), generator=generator)
            yield {"input": text[:-1]}, text[1:]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Loader(ParallelAwareDataloader):  # type: ignore[misc]
    """torchtitan's own loader, of that data set."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        """Nothing more."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **others: Any
    ) -> None:
        text = Text(dp_rank, dp_world_size, seq_len)
        super().__init__(text, dp_rank, dp_world_size, batch_size=local_batch_size)


class Numbers(BaseTokenizer):  # type: ignore[misc]
    """A tokenizer of which nothing is asked: samples are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Nothing more."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *given: Any, **others: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *given: Any, **others: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return WORDS


def made(store: str, mode: str, folder: str) -> Any:
    """Return the trainer."""
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelize = config.model_spec.parallelize_fn

    def spread(model: nn.Module, **given: Any) -> nn.Module:
        model = parallelize(model, **given)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo scales nothing
        return model

    config = dataclasses.replace(
        config,
        model_spec=dataclasses.replace(config.model_spec, parallelize_fn=spread),
        dataloader=Loader.Config(),
        tokenizer=Numbers.Config(),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=StoreCheckpointManager.Config(
            enable=True, interval=3, store=store, last_save_model_only=False, async_mode=mode
        ),
        training=dataclasses.replace(
            config.training,
            steps=PLANNED,
            local_batch_size=2,
            seq_len=64,
            disable_cuda_graphs=True,
        ),
        dump_folder=folder,
    )
    config.debug.seed, config.debug.deterministic, config.debug.enable_structured_logging = 3, True, False
    return config.build()


def digest(trainer: Any) -> str:
    """Return the digest of all weights; every rank calls it."""
    found = hashlib.sha256()
    for name, tensor in sorted(trainer.model_parts[0].state_dict().items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(name.encode() + whole.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(store: str, steps: int, mode: str, folder: str) -> None:
    init_logger()
    trainer = made(store, mode, folder)
    trainer.config.training.steps = steps
    trainer.train()
    said = f"worker: end step={trainer.step} digest={digest(trainer)}\n"
    if dist.get_rank() == 0:
        os.write(1, said.encode())
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        metrics.build_device_memory_monitor = CPUMemory
        utils.set_pg_timeouts = lambda *given, **others: None
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
