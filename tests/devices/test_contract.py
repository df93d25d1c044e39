"""What a trainer's environment says to the libraries of its device."""

from __future__ import annotations

import pytest
import torch

from elastic3d.devices import contract


def names(kind: str, *, interface: str = "", tp: int = 1) -> dict[str, str]:
    return {one.variable.name: one.value for one in contract.settings(kind, interface=interface, tp=tp)}


def test_a_cpu_needs_its_interface_only() -> None:
    assert names("cpu") == {}
    assert names("cpu", interface="eth1") == {"GLOO_SOCKET_IFNAME": "eth1"}


def test_sums_in_the_switch_are_off_where_layers_are_cut() -> None:
    """They differ from call to call, and one tp gives one digest; without tp no such sum decides a bit."""
    assert "NCCL_NVLS_ENABLE" not in names("cuda")
    assert names("cuda", tp=2)["NCCL_NVLS_ENABLE"] == "0"


def test_no_watchdog_of_torchs_ends_a_trainer() -> None:
    seen = names("cuda")
    assert (seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"], seen["TORCH_NCCL_ENABLE_MONITORING"]) == ("0", "0")


def test_what_the_user_set_stays_where_no_promise_depends_on_it() -> None:
    """The interface is theirs to choose; what fixes the bits is not, and they are told."""
    variables = {"NCCL_SOCKET_IFNAME": "ib0", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    replaced = contract.apply(contract.settings("cuda", interface="eth0", tp=1), variables)
    assert replaced == ["CUBLAS_WORKSPACE_CONFIG"]
    assert variables["NCCL_SOCKET_IFNAME"] == "ib0"
    assert variables["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert contract.apply(contract.settings("cuda", interface="eth0", tp=1), variables) == []


def test_what_libraries_read_is_told_from_the_rest() -> None:
    """A standby has loaded them before `main` is called; communicators are made after it."""
    read = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "HIP_VISIBLE_DEVICES")
    others = ("NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "WANDB_MODE")
    assert sorted(contract.read_by_libraries(dict.fromkeys((*read, *others), "1"))) == sorted(read)


def test_fresh_memory_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch fills it wherever deterministic algorithms are asked for, one pass over each allocation."""
    try:
        contract.deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)
