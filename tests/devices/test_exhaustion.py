"""Out of memory is known by whatever a library calls it, and who holds the memory is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from elastic3d.devices.cuda import device_files
from elastic3d.devices.exhaustion import DeviceUse, Holder, asked, describe, holders, is_out_of_memory, of_host
from elastic3d.parallel.peer_errors import is_lost_peer
from elastic3d.shortfall import STANDBY

GIB = 1 << 30

NCCL = "NCCL error in: x.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Cuda failure 2 'out of memory'"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
        dist.DistBackendError(NCCL),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_memory_that_ran_out_has_many_names(error: Exception) -> None:
    """Also as the cause of another error, as pipelines raise theirs."""
    assert is_out_of_memory(error)
    assert not is_lost_peer(error)
    outer = RuntimeError("stage 1 failed")
    outer.__cause__ = error
    assert is_out_of_memory(outer)


@pytest.mark.parametrize(
    "words", ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDNN_STATUS_ALLOC_FAILED"]
)
def test_a_librarys_words_for_the_devices_memory_are_not_the_hosts(words: str) -> None:
    """Though it does not name the device."""
    assert not of_host(RuntimeError(words))


def test_other_errors_are_not_about_memory() -> None:
    assert not is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"))
    assert not is_out_of_memory(RuntimeError("expected a tensor of shape [3]"))
    assert not is_out_of_memory(KeyError("memory"))


def test_the_host_says_so_itself() -> None:
    """The error that torch really raises."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value)
    assert of_host(caught.value)
    assert asked(caught.value) == 4 << 50


LIMITED = """
import resource, sys
from elastic3d.devices.exhaustion import is_out_of_memory, left, of_host
error = RuntimeError("could not create a primitive")
assert left() == float("inf") and not is_out_of_memory(error)
kind = getattr(resource, sys.argv[1])
for room, short in ((1 << 30, False), (32 << 20, True)):
    resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    held = 1 << 40
    resource.setrlimit(kind, (held, resource.RLIM_INFINITY))
    resource.setrlimit(kind, (held - int(left()) + room, resource.RLIM_INFINITY))
    assert is_out_of_memory(error) is short and of_host(error), (room, left())
assert not is_out_of_memory(RuntimeError("expected a tensor of shape [3]"))
"""


@pytest.mark.parametrize("limit", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_an_error_that_gives_no_reason_is_about_memory_where_hardly_any_is_left(limit: str) -> None:
    """As oneDNN's; by the limits of the process itself."""
    subprocess.run([sys.executable, "-c", LIMITED, limit], check=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "nbytes"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB", 20 << 20),
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 3 has a total capacity of 79.11 GiB", 3 << 29),
        ("HIP out of memory. Tried to allocate 512.00 KiB.", 512 << 10),
        ("emulated device out of memory", 0),
    ],
)
def test_what_was_asked_for_is_read_from_the_error(words: str, nbytes: int) -> None:
    """Also from one that caused another; and it was a device's."""
    outer = RuntimeError("stage 1 failed")
    outer.__cause__ = torch.OutOfMemoryError(words)
    assert asked(outer) == nbytes
    assert not of_host(outer)


def test_who_holds_a_device_is_named() -> None:
    use = DeviceUse(device="cuda:1", total=80 * GIB, free=GIB, tensors=60 * GIB, cached=4 * GIB)
    assert describe(use, [Holder(pid=4711, command="python other.py")]) == (
        "cuda:1 has 80.00 GiB: 60.00 GiB in this trainer's tensors, 4.00 GiB cached beside them, 15.00 GiB in contexts "
        "and other processes (pid 4711 python other.py), 1.00 GiB free"
    )
    assert "processes that cannot be seen from here" in describe(use, [])
    assert " and 2 more)" in describe(use, [Holder(pid=pid, command="x") for pid in range(7)])


def test_processes_with_a_device_open_are_found(tmp_path: Path) -> None:
    """Any file stands for the device's: one process has it open, this one too, and is not among the others."""
    file = tmp_path / "nvidia0"
    file.touch()
    program = "import sys; held = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", program, str(file)]
    with file.open(), subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        (holder,) = holders([str(file)])
        assert holder.pid == other.pid != os.getpid()
        assert holder.command.startswith(sys.executable)
        other.communicate()


def test_a_standby_is_named_as_what_it_is(tmp_path: Path) -> None:
    """With what does without it: its command line is the trainer's."""
    file = tmp_path / "nvidia0"
    file.touch()
    (tmp_path / "4711" / "fd").mkdir(parents=True)
    (tmp_path / "4711" / "fd" / "3").symlink_to(file)
    (tmp_path / "4711" / "comm").write_text(f"{STANDBY}\n")
    (tmp_path / "4711" / "cmdline").write_bytes(b"python\0train.py\0")
    (holder,) = holders([str(file)], tmp_path)
    assert holder.command == "the standby of the next trainer; --rdzv-conf=standby=off does without"


def test_the_file_of_a_device_is_the_drivers(tmp_path: Path) -> None:
    """Devices may be numbered otherwise than their files; where the driver does not say, all of them count."""
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert device_files(place, tmp_path) == ["/dev/kfd", "/dev/nvidia0", "/dev/nvidia1"]
    facts = tmp_path / "proc/driver/nvidia/gpus/0000:3b:00.0/information"
    facts.parent.mkdir(parents=True)
    facts.write_text("Model: \t\t NVIDIA H200\nDevice Minor: \t 1\n")
    assert device_files(place, tmp_path) == ["/dev/nvidia1"]
