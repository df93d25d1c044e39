"""Another peer: the same model under torchft, whole on each of its replicas, as its own example does it.

One process is one replica group; a store of the process's own stands for that of its group. Each step is one line of
`<out>/steps-<replica>.jsonl`: {"step", "at", "world"}. With `--serve` the process is the lighthouse instead: it prints
its address and serves until its standard input ends. Its timings are tuned by hand, as short as this machine allows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from chaos.machine.processes import wait_until
from chaos.scripts.train_gpt import GPT, SourceFiles, add_sizes, cross_entropy

QUICK = timedelta(seconds=5)


def main() -> None:
    """Train until `--steps`, or serve."""
    options = arguments()
    if options.serve:
        serve()
    else:
        train(options)


def serve() -> None:
    """Be the lighthouse."""
    server = importlib.import_module("torchft.coordination").LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000, quorum_tick_ms=10, heartbeat_timeout_ms=1000
    )
    # It names itself by the host's name, which need not resolve.
    print("http://127.0.0.1:" + str(server.address()).rpartition(":")[2], flush=True)
    sys.stdin.read()


def train(options: argparse.Namespace) -> None:
    """Be one replica."""
    torchft = importlib.import_module("torchft")
    # The first ones to have imported everything would otherwise be done before the last one comes.
    (Path(options.out) / f"ready-{options.replica}").touch()
    wait_until(lambda: len(list(Path(options.out).glob("ready-*"))) == options.replicas, math.inf)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model: Any = GPT(width=options.width, blocks=options.blocks, context=options.context)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=QUICK),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        timeout=QUICK,
        replica_id=f"replica{options.replica}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=options.lighthouse,
        hostname="127.0.0.1",
    )
    wrapped, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, inner)
    data = SourceFiles(options.context)
    with (Path(options.out) / f"steps-{options.replica}.jsonl").open("a") as log:
        while manager.current_step() < options.steps:
            optimizer.zero_grad()
            world = max(1, manager.num_participants())
            rounds = -(-options.global_batch // (options.micro_batch * world))
            for number in range(rounds):
                first = (manager.current_step() * rounds + number) * options.micro_batch
                pairs = [data[i % len(data)] for i in range(first, first + options.micro_batch)]
                inputs, targets = (torch.stack(part) for part in zip(*pairs, strict=True))
                (cross_entropy(wrapped(inputs), targets) / rounds).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                line = {"step": manager.current_step(), "at": time.time(), "world": manager.num_participants()}
                log.write(json.dumps(line) + "\n")
                log.flush()
    manager.shutdown()


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    for name in ("out", "lighthouse", "replica"):
        parser.add_argument(f"--{name}", default="")
    add_sizes(parser)
    parser.add_argument("--replicas", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
