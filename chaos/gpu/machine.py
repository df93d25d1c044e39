"""P0: versions, what the kernel allows, memory, and which of gloo's operations take tensors of the device."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from chaos.gpu.bench import Bench
from chaos.gpu.forked import Child, ChildFailed, Talk
from elastic3d.devices import device_at
from elastic3d.devices.cuda import driver, runtime
from elastic3d.errors import ConfigurationError
from elastic3d.etcd_server.binary import etcd_version, find_etcd
from elastic3d.snapshots.arena import Arena

_PR_SET_CHILD_SUBREAPER = 36
OPERATION_LIMIT = 8.0


def measure(bench: Bench) -> None:
    """Say what there is, then what gloo can do: two ranks try it meanwhile, forked before a library is asked."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Child(_try_all, bench.shared_kind, rank, store.port) for rank in (0, 1)]
    try:
        _versions(bench)
        _kernel(bench)
        _memory(bench)
        with bench.attempting("gloo"):
            _gloo(bench, ranks)
    finally:
        for rank in ranks:
            rank.end()


def _versions(bench: Bench) -> None:
    bench.say("python", platform.python_version())
    bench.say("torch", str(torch.__version__), built_for=runtime(), driver=driver())
    for package in ("triton", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "grpcio", "blake3", "nvidia-ml-py"):
        with suppress(importlib.metadata.PackageNotFoundError):
            bench.say("package", importlib.metadata.version(package), package=package)
    with bench.attempting("nccl"):
        version: Any = torch.cuda.nccl.version() if bench.cuda else ()  # type: ignore[no-untyped-call]
        bench.say("nccl", ".".join(map(str, version)) or None)
    try:
        etcd = find_etcd(bench.etcd or None)
        bench.say("etcd", ".".join(map(str, etcd_version(etcd))), path=str(etcd))
    except ConfigurationError as error:
        bench.failed("etcd", str(error))
    bench.say("kernel", platform.release(), machine=platform.machine())
    if bench.cuda and (smi := shutil.which("nvidia-smi")):
        with bench.attempting("nvidia_smi"):
            asked = "--query-gpu=name,memory.total,memory.used,compute_mode,persistence_mode,mig.mode.current"
            done = subprocess.run(
                [smi, asked, "--format=csv,noheader"], capture_output=True, text=True, timeout=10, check=False
            )
            bench.say("nvidia_smi", done.stdout.strip())


def _kernel(bench: Bench) -> None:
    with bench.attempting("memfd_seals"):
        arena = Arena.create()
        arena.reserve(1 << 20)
        try:
            os.ftruncate(arena.descriptor, 0)
            bench.say("memfd_seals", False)
        except PermissionError:
            bench.say("memfd_seals", True)
        arena.close()
    with bench.attempting("pidfd"):
        os.close(os.pidfd_open(os.getpid()))
        bench.say("pidfd", True)
    with bench.attempting("subreaper"):
        libc = ctypes.CDLL(None, use_errno=True)
        bench.say("subreaper", libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    with bench.attempting("children_file"):
        bench.say("children_file", Path(f"/proc/self/task/{os.getpid()}/children").exists())
    with bench.attempting("locked_memory"):
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        bench.say("locked_memory", soft, "bytes", hard=hard)


def _memory(bench: Bench) -> None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable", "HugePages_Total", "Hugepagesize", "Shmem"):
            bench.say("host_memory", int(rest.split()[0]), "KiB" if "kB" in rest else "pages", what=name)
    for name in ("enabled", "shmem_enabled", "defrag"):
        with bench.attempting("transparent_huge_pages", what=name):
            text = Path("/sys/kernel/mm/transparent_hugepage", name).read_text().strip()
            bench.say("transparent_huge_pages", text, what=name)
    with bench.attempting("shared_memory_limit"):
        stat = os.statvfs("/dev/shm")
        bench.say("shared_memory_limit", stat.f_frsize * stat.f_blocks, "bytes")
    bench.say("cores", len(os.sched_getaffinity(0)))


def _gloo(bench: Bench, ranks: list[Child]) -> None:
    """Say how each operation went on tensors of the device. Those that may hang come last."""
    for name in _operations(torch.empty(1), 0):
        try:
            said = [rank.answer(min(OPERATION_LIMIT + 10, bench.left() - 1)) for rank in ranks]
        except ChildFailed as error:
            bench.failed("gloo", f"{error}; this operation and those after it have no answer", operation=name)
            return
        why = next(filter(None, said), "")
        bench.say("gloo", not why, operation=name, **({"why": why} if why else {}))


def _try_all(talk: Talk, kind: str, rank: int, port: int) -> None:
    device = device_at(kind, 0)
    device.open()
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    limit = timedelta(seconds=OPERATION_LIMIT)
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=2, timeout=limit)
    tensor = torch.ones(8, device=device.torch_device)
    for operation in _operations(tensor, rank).values():
        why = ""
        try:
            operation()
        except Exception as error:  # noqa: BLE001 - whatever an operation raises is the finding
            why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        talk.say(why)


def _operations(tensor: torch.Tensor, rank: int) -> dict[str, Callable[[], object]]:
    halves = [tensor[: tensor.numel() // 2], tensor[tensor.numel() // 2 :]]

    def sent() -> object:
        return dist.send(tensor, 1) if rank == 0 else dist.recv(torch.empty_like(tensor), 0)

    return {
        "all_reduce": lambda: dist.all_reduce(tensor.clone()),
        "broadcast": lambda: dist.broadcast(tensor.clone(), src=0),
        "all_gather": lambda: dist.all_gather([torch.empty_like(tensor) for _ in range(2)], tensor),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(tensor.new_empty(16), tensor),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(tensor), tensor),
        "all_to_all_single, bytes": lambda: dist.all_to_all_single(
            torch.empty_like(tensor).view(torch.uint8), tensor.view(torch.uint8)
        ),
        "all_to_all_single, bf16": lambda: dist.all_to_all_single(tensor.bfloat16(), tensor.bfloat16()),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty_like(halves[0]), tensor),
        "send, recv": sent,
    }
