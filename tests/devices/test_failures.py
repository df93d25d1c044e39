"""What a device's failure is taken for: the peer's end, this rank's own trouble, or what no fork survives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from elastic3d.parallel.peer_errors import is_lost_peer
from elastic3d.worker.processes import process

# Words of torch 2.13's NCCL backend (csrc/distributed/c10d/NCCLUtils.cpp).
REMOTE = (
    "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.28.9\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
)
SYSTEM = "NCCL error in: x.cpp:1, unhandled system error\nncclSystemError: System call (e.g. socket, malloc) failed"
OWN = (
    "NCCL error in: x.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.",
    "NCCL error in: x.cpp:1, internal error\nncclInternalError: Internal check failed.",
    "NCCL error in: x.cpp:1, invalid argument\nncclInvalidArgument: Invalid value for an argument.",
    "NCCL error in: x.cpp:1, invalid usage\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
)


@pytest.mark.parametrize("words", [REMOTE, SYSTEM, "NCCL communicator was aborted on rank 1"])
def test_a_remote_failure_of_nccl_is_a_lost_peer(words: str) -> None:
    assert is_lost_peer(dist.DistBackendError(words))


@pytest.mark.parametrize("words", OWN)
def test_a_failure_of_this_ranks_own_is_no_lost_peer(words: str) -> None:
    """Two ranks on one device, or a device that broke: forming anew without the "lost" peer would mend nothing."""
    assert not is_lost_peer(dist.DistBackendError(words))


def test_an_open_driver_is_a_reason_not_to_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy, numba or a call of the CUDA library open it without torch's knowledge. Any file stands for the driver."""
    driver = tmp_path / "nvidia-uvm"
    driver.touch()
    monkeypatch.setattr(process, "_DRIVERS", (str(driver),))
    assert process._open_driver() == ""
    descriptor = os.open(driver, os.O_RDONLY)
    try:
        assert process._open_driver() == str(driver)
        assert str(driver) in (process.fork_hazard() or "")
    finally:
        os.close(descriptor)
