"""What finds a rank that hangs, elsewhere: the demo's model over plain gloo, under others' detectors.

    python -m chaos.bench.peer_hangs SYSTEM --out FOLDER --fault KIND:RANK@STEP [--tuned]

`nvidia`: a rank monitor of NVIDIA's Resiliency Extension for each rank. With its settings as shipped a rank sends a
heartbeat each step; tuned by hand, each step is cut into two sections with limits of their own, so that whoever waits
in a collective is told from whoever keeps others waiting. What the monitors say goes to standard error.

`recorder`: torch's flight recorder, in the ranks. As shipped nobody asks it before gloo's own timeout of 30 minutes;
tuned by hand, somebody does who looks for new steps, through torch's worker server, and gives what comes to torch's
analyzer `torchfrtrace`. `<out>/verdict.json` then has what it said.

The script is the launcher of its four ranks too; all of them end when its standard input does.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import json
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _WorkerServer

from chaos.machine.processes import free_port, leashed, wait_until
from chaos.scripts.train_gpt import GPT, SourceFiles, cross_entropy

WORLD, WIDTH, BLOCKS, CONTEXT, MICRO_BATCH, ROUNDS = 4, 32, 5, 32, 2, 2
STUCK = 3.0
"""Seconds without a sign after which a rank is suspected, where that is tuned: as long as ours by default."""

ANSWER = 1.0
"""Seconds that a rank's worker server has to answer; a stopped process's never does."""


def main() -> None:
    """Be the launcher, or with `--rank` one of its ranks."""
    options = arguments()
    if options.rank >= 0:
        train(options)
        return
    out, ranks, monitors = Path(options.out), [], []
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    for rank in range(WORLD):
        own = dict(environment)
        if options.system == "nvidia":
            own["FT_RANK_MONITOR_IPC_SOCKET"] = str(out / f"monitor-{rank}")
            monitors.append(monitor(own["FT_RANK_MONITOR_IPC_SOCKET"], tuned=options.tuned))
        elif options.tuned:
            own |= {"TORCH_FR_BUFFER_SIZE": "2000", "WORKER_SERVER": str(out / f"worker-{rank}")}
        command = [sys.executable, "-m", "chaos.bench.peer_hangs", *sys.argv[1:], f"--rank={rank}"]
        with (out / f"rank-{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(leashed(command), env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
    if options.system == "recorder" and options.tuned:
        ask_when_still(out)
    sys.stdin.read()


def train(options: argparse.Namespace) -> None:
    """Be one rank: train until the end of the world."""
    fault = re.fullmatch(r"([a-z]+):(\d+)@(\d+)", options.fault)
    assert fault is not None, options.fault
    kind, culprit, when = fault.groups()
    rank, out = options.rank, Path(options.out)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if "WORKER_SERVER" in os.environ:
        server = _WorkerServer(os.environ["WORKER_SERVER"])  # noqa: F841 (lives as long as it is referred to)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=timedelta(minutes=30))
    votes = dist.new_group()
    detector: Any = None
    if options.system == "nvidia":
        detector = importlib.import_module("nvidia_resiliency_ext.fault_tolerance").RankMonitorClient()
        detector.init_workload_monitoring()
    section = detector.start_section if detector is not None and options.tuned else lambda name: None
    leave = detector.end_section if detector is not None and options.tuned else lambda name: None
    model = GPT(width=WIDTH, blocks=BLOCKS, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = SourceFiles(CONTEXT)
    with (out / f"steps-{rank}").open("w") as log:
        for step in range(1 << 30):
            now = step == int(when) and rank == int(culprit)
            section("compute")
            for number in range(ROUNDS):
                if now and number == 0:
                    (out / "fault.json").write_text(json.dumps({"at": time.time()}))
                    FAULTS.get(kind, lambda: None)()
                first = ((step * ROUNDS + number) * WORLD + rank) * MICRO_BATCH
                pairs = [data[at % len(data)] for at in range(first, first + MICRO_BATCH)]
                inputs, targets = (torch.stack(part) for part in zip(*pairs, strict=True))
                torch.autograd.backward(cross_entropy(model(inputs), targets) / ROUNDS)
            leave("compute")
            section("reduce")
            flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            if not (now and kind == "skip"):
                dist.all_reduce(flat)
            dist.all_reduce(torch.ones(1), group=votes)
            leave("reduce")
            section("compute")
            optimizer.step()
            optimizer.zero_grad()
            leave("compute")
            if detector is not None and not options.tuned:
                detector.send_heartbeat()
            log.write(f"{step}\n")
            log.flush()


def _spin() -> None:
    while True:
        pass


FAULTS: dict[str, Callable[[], None]] = {"stop": lambda: os.kill(os.getpid(), signal.SIGSTOP), "spin": _spin}


def monitor(socket_path: str, *, tuned: bool) -> Any:
    """Start a rank's monitor, as NVIDIA's launcher does."""
    package = importlib.import_module("nvidia_resiliency_ext.fault_tolerance")
    # There is no such hardware here to look at.
    settings: dict[str, Any] = {"enable_nic_monitor": False}
    if tuned:
        settings |= {
            "workload_check_interval": 0.25,
            "initial_rank_heartbeat_timeout": None,
            "rank_heartbeat_timeout": None,
            "rank_section_timeouts": {"compute": STUCK, "reduce": 2 * STUCK},
        }
    context = torch.multiprocessing.get_context("spawn")
    return package.RankMonitorServer.run_in_subprocess(
        package.FaultToleranceConfig(**settings), socket_path, mp_ctx=context
    )


def ask_when_still(out: Path) -> None:
    """Wait until no rank has made a step for `STUCK` seconds, get all ranks' records, and have them analyzed."""

    def steps() -> list[os.stat_result]:
        return [one.stat() for one in out.glob("steps-*")]

    wait_until(lambda: sum(one.st_size > 0 for one in steps()) == WORLD, math.inf)
    wait_until(lambda: time.time() - max(one.st_mtime for one in steps()) >= STUCK, math.inf)
    folder = out / "dumps"
    folder.mkdir()
    silent = []
    for rank in range(WORLD):
        dump = asked(str(out / f"worker-{rank}"))
        if dump is None:
            silent.append(rank)
            continue
        # Under gloo a record does not say who is in which group, and the analyzer fails without; a person can add it.
        groups = {tuple(entry["process_group"]) for entry in dump.get("entries", [])}
        everybody = str(list(range(WORLD)))
        dump["pg_config"] = {name: {"name": name, "desc": desc, "ranks": everybody} for name, desc in groups}
        (folder / f"rank{rank}").write_bytes(pickle.dumps({"entries": [], **dump}))
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    command += ["--prefix", "rank", "--allow-incomplete-ranks"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    verdict = {"at": time.time(), "code": done.returncode, "said": said, "silent": silent}
    unfinished = out / "verdict.json.part"
    unfinished.write_text(json.dumps(verdict))
    os.replace(unfinished, out / "verdict.json")


def asked(path: str) -> dict[str, Any] | None:
    """Return what a rank's flight recorder has, None if it does not answer."""
    connection = http.client.HTTPConnection("localhost", timeout=ANSWER)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(ANSWER)
    with contextlib.closing(connection):
        try:
            connection.sock.connect(path)
            connection.request("POST", "/handler/fr_trace_json?includestacktraces=false")
            dump: dict[str, Any] = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
    return dump


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=("nvidia", "recorder"))
    parser.add_argument("--out", required=True)
    parser.add_argument("--fault", required=True)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--rank", type=int, default=-1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
