"""The peer: the same model under torchrun c10d, FSDP2 and DCP, as a careful person would write it by hand.

Data parallel over all ranks, ZeRO-3, a DCP save every `--save-every` steps, resumption from the newest complete one.
Each step is one line of `<out>/rank0-<pid>.jsonl`: {"step", "at", "world"}. The parts of its beginning are lines of
`<out>/marks-<pid>.jsonl`: {"name", "at"}, each at its end; the first is that of the process's beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from chaos.scripts.train_gpt import GPT, SourceFiles, add_sizes, cross_entropy


def main() -> None:
    """Train until `--steps`."""
    marks = [("noticing", began()), ("importing", time.time())]
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    marks.append(("groups", time.time()))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    model = GPT(width=options.width, blocks=options.blocks, context=options.context)
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = SourceFiles(options.context)
    saves = Path(options.out) / "saves"
    marks.append(("building", time.time()))
    step = load(model, optimizer, saves)
    marks.append(("loading", time.time()))
    if rank == 0:
        lines = "".join(json.dumps({"name": name, "at": at}) + "\n" for name, at in marks)
        (Path(options.out) / f"marks-{os.getpid()}.jsonl").write_text(lines)
    log = (Path(options.out) / f"rank0-{os.getpid()}.jsonl").open("a") if rank == 0 else None
    rounds = -(-options.global_batch // (options.micro_batch * world))
    while step < options.steps:
        for number in range(rounds):
            first = step * options.global_batch + (number * world + rank) * options.micro_batch
            pairs = [data[i % len(data)] for i in range(first, first + options.micro_batch)]
            inputs, targets = (torch.stack(part) for part in zip(*pairs, strict=True))
            (cross_entropy(model(inputs), targets) / rounds).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if log is not None:
            log.write(json.dumps({"step": step, "at": time.time(), "world": world}) + "\n")
            log.flush()
        if step % options.save_every == 0:
            save(model, optimizer, saves, step)
    dist.destroy_process_group()


def began() -> float:
    """Return when this process began, by the wall clock."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    running = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - running


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, saves: Path, step: int) -> None:
    """Write a checkpoint that all ranks have finished before its marker appears."""
    weights, state = get_state_dict(model, optimizer)
    dcp_save({"model": weights, "optimizer": state}, checkpoint_id=saves / str(step))
    dist.barrier()
    if dist.get_rank() == 0:
        (saves / f"{step}.done").touch()


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, saves: Path) -> int:
    """Load the newest complete checkpoint and return its step, 0 without one."""
    done = [int(path.stem) for path in saves.glob("*.done")]
    newest: list[int | None] = [max(done, default=0)]
    dist.broadcast_object_list(newest, src=0)
    step = newest[0] or 0
    if step:
        weights, state = get_state_dict(model, optimizer)
        dcp_load({"model": weights, "optimizer": state}, checkpoint_id=saves / str(step))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return step


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    add_sizes(parser)
    parser.add_argument("--save-every", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
