"""The link between two processes: both send the same number of bytes to the other at the same time, in several sizes.

Inside a node `inside` starts them, and they meet in a file. Between nodes two processes that were started by hand, or
by torchrun, meet in a TCP store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from elastic3d.calibration.linear_fit import fit
from elastic3d.calibration.record import MeasuredLink, Sample
from elastic3d.clock import SYSTEM
from elastic3d.errors import CalibrationFailed
from elastic3d.values import from_json, to_json

SIZES = tuple(1 << power for power in (10, 14, 17, 20, 22, 24))
PATIENCE = 120.0
LEAST, MOST = 5, 200
TURN = 0.05
"""Seconds between two looks at the processes of a link."""

# Runs before the imports, which take seconds: a child must not outlive a parent that is interrupted during them.
_ONE = """\
import ctypes, json, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(85)
from elastic3d.calibration.link import one_of_two
one_of_two(json.loads(sys.argv[2]))
"""


def inside(device: str, *, seconds: float, sizes: Sequence[int] = SIZES, patience: float = PATIENCE) -> MeasuredLink:
    """Measure the link between two slots of this node, each a separate process, for about `seconds`."""
    with tempfile.TemporaryDirectory(prefix="elastic3d-") as folder:
        answer = Path(folder, "answer.json")
        asked = {"device": device, "seconds": seconds, "sizes": list(sizes), "meet": str(Path(folder, "meet"))}
        processes = []
        try:
            for rank in (0, 1):
                spec = {**asked, "rank": rank, "answer": str(answer)}
                with Path(folder, f"said-{rank}").open("wb") as said:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-c", _ONE, str(os.getpid()), json.dumps(spec)],
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                            stdin=subprocess.DEVNULL,
                            stdout=said,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            ends = SYSTEM.monotonic() + patience + seconds
            # One that fails is not waited for by way of the other, which waits for it.
            while not any(codes := [process.poll() for process in processes]) and None in codes:
                if SYSTEM.monotonic() > ends:
                    raise CalibrationFailed(
                        f"two processes of this node did not meet within {patience + seconds:.0f} s; try again when "
                        "the machine is less busy"
                    )
                SYSTEM.sleep(TURN)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if any(codes):
            said_last = Path(folder, f"said-{next(i for i, code in enumerate(codes) if code)}").read_text()[-2000:]
            raise CalibrationFailed(f"the link inside the node could not be measured:\n{said_last.strip()}")
        return from_json(MeasuredLink, json.loads(answer.read_text()))


def meet(
    host: str, port: int, rank: int, device: torch.device, *, master: bool, seconds: float, sizes: Sequence[int]
) -> MeasuredLink:
    """Measure the link to another node's process, which calls this with the other rank; both meet at host:port.

    master: serve the store there. CalibrationFailed if nobody comes, or leaves before it is done.
    """
    try:
        store = TCPStore(host, port, None, master, timedelta(seconds=PATIENCE), wait_for_workers=False)
        return exchange(PrefixStore("elastic3d-calibrate", store), rank, device, seconds=seconds, sizes=sizes)
    except dist.DistError as error:
        raise CalibrationFailed(
            f"no other node met this one at {host}:{port} within {PATIENCE:.0f} s, or it left: {error}. "
            "Start both at about the same time, and see that nothing between them closes that port"
        ) from error
    except RuntimeError as error:  # gloo's and the device's
        raise CalibrationFailed(
            f"the exchange with the other node at {host}:{port} failed: {error}. See what that one says, and start "
            "both again"
        ) from error


def exchange(
    store: Store, rank: int, device: torch.device, *, seconds: float, sizes: Sequence[int] = SIZES
) -> MeasuredLink:
    """Be one of two ranks that exchange messages; both return the same figures. Makes and ends a process group."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))
    try:
        samples = [_sample(rank, device, size, seconds / len(sizes)) for size in sizes]
        both = torch.tensor([sample.seconds for sample in samples], dtype=torch.float64, device=device)
        dist.all_reduce(both)
        samples = [Sample(bytes=size, seconds=total / 2) for size, total in zip(sizes, both.tolist(), strict=True)]
    finally:
        dist.destroy_process_group()
    latency, bandwidth, error = fit(samples)
    return MeasuredLink(
        backend=backend, ranks=2, latency=latency, bandwidth=bandwidth, error=error, samples=tuple(samples)
    )


def _sample(rank: int, device: torch.device, size: int, seconds: float) -> Sample:
    out, into = torch.ones(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8, device=device)
    count = torch.tensor([LEAST], dtype=torch.int64, device=device)

    def once() -> float:
        start = SYSTEM.monotonic()
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)])
        for work in works:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return SYSTEM.monotonic() - start

    once()
    # Rank 0 says how often, so that both do it the same number of times.
    count[0] = max(LEAST, min(MOST, int(seconds / max(once(), 1e-6))))
    dist.broadcast(count, src=0)
    return Sample(bytes=size, seconds=statistics.median(once() for _ in range(int(count))))


def one_of_two(spec: Any) -> None:
    """Be one of the two processes that `inside` starts."""
    torch.set_num_threads(1)
    device = torch.device(spec["device"], spec["rank"]) if spec["device"] == "cuda" else torch.device("cpu")
    store = FileStore(spec["meet"], 2)
    measured = exchange(store, spec["rank"], device, seconds=spec["seconds"], sizes=spec["sizes"])
    if spec["rank"] == 0:
        Path(spec["answer"]).write_text(json.dumps(to_json(measured)))
