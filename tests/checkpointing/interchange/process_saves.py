"""Run by itself: three overlapping saves with one Writer in the process that `async_save` starts."""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from checkpointing.interchange import Writer


def save(writer: Writer, step: int) -> Future[Any]:
    saving = dcp.async_save(
        {"w": torch.full((3,), float(step)), "note": f"of {step}"},
        storage_writer=writer,
        checkpoint_id=str(step),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    assert isinstance(saving, Future)
    return saving


def main() -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    writer = Writer(sys.argv[1])
    # The first is waited for, so that one process is started and not three.
    save(writer, 1).result()
    for saving in [save(writer, step) for step in (2, 3, 4)]:
        saving.result()


if __name__ == "__main__":
    main()
