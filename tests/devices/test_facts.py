"""What a device is: which nodes may share a job, and what a plan is made with where nothing was calibrated."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from elastic3d.devices.cuda import driver
from elastic3d.errors import ConfigurationError
from elastic3d.membership.machine.roster import refusal
from elastic3d.membership.records import MemberRecord
from elastic3d.planner.devices import costs_of, sheet_of
from elastic3d.values import DeviceFacts, ModelProfile, Node, Slot
from elastic3d.worker.keeper.warming import planned_with

CPU = DeviceFacts(kind="cpu", name="a CPU", memory=4 << 30, devices=2, torch="2.13.0")
H200 = DeviceFacts(
    kind="cuda",
    name="NVIDIA H200",
    memory=143771 << 20,
    devices=8,
    torch="2.13.0",
    runtime="CUDA 12.8, cuDNN 91002",
    products="float32",
    reserve=700 << 20,
)
PROFILE = ModelProfile(blocks=4, parameters=1000, micro_batches=4, micro_batch=1, digest="d", compute_bytes=2)


def member(name: str, device: DeviceFacts | None) -> MemberRecord:
    node = Node(name=name, incarnation="1", address="127.0.0.1", slots=(Slot(tile_port=1),))
    return MemberRecord(node=node, profile=PROFILE, device=device)


def test_a_node_that_would_train_on_its_cpu_is_kept_out_of_a_job_on_gpus() -> None:
    assert "this node computes on cpu, the job's nodes on cuda" in refusal(member("b", CPU), member("a", H200))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (
            "name",
            "NVIDIA A100-SXM4-80GB",
            "this node computes on NVIDIA A100-SXM4-80GB, the job's nodes on NVIDIA H200",
        ),
        ("torch", "2.12.1", "this node computes on torch 2.12.1, the job's nodes on torch 2.13.0"),
        ("runtime", "CUDA 13.0, cuDNN 91400", "this node computes on CUDA 13.0, cuDNN 91400"),
        ("products", "tf32", "products in tf32, the job's nodes on products in float32"),
    ],
)
def test_devices_that_give_other_bits_do_not_share_a_job(field: str, value: str, words: str) -> None:
    assert words in refusal(member("b", replace(H200, **{field: value})), member("a", H200))  # type: ignore[arg-type]


def test_processors_that_compute_otherwise_do_not_share_a_job() -> None:
    """Whatever their names are: kernels are chosen by instruction sets, and sums come out otherwise by them."""
    command = "from elastic3d.devices.cpu import kernels; print(kernels())"
    said = []
    for chosen in ("default", "avx2", "avx2"):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": chosen}
        ended = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
        said.append(ended.stdout.strip())
    plain, wide, again = (replace(CPU, runtime=one) for one in said)
    assert "results" in wide.runtime
    assert not refusal(member("b", wide), member("a", again))
    assert f"this node computes on {plain.runtime}, the job's nodes on {wide.runtime}: the same step" in refusal(
        member("b", plain), member("a", wide)
    )
    assert not refusal(member("b", CPU), member("a", wide)), "an older version does not say"


def test_memory_drivers_and_names_of_cpus_may_differ() -> None:
    """They fix no bit, as far as is known."""
    assert not refusal(member("b", replace(H200, driver="570.1", memory=1, reserve=9)), member("a", H200))
    assert not refusal(member("b", replace(CPU, name="another CPU", memory=1)), member("a", CPU))
    assert not refusal(member("b", None), member("a", H200))


@pytest.mark.parametrize(
    ("name", "gib", "sheet"),
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80g"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA B200", 178.0, "b200"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.4, None),
        ("Tesla V100-SXM2-16GB", 15.8, None),
        ("NVIDIA GeForce RTX 4090", 23.6, None),
    ],
)
def test_a_device_is_known_by_its_name_and_its_memory(name: str, gib: float, sheet: str | None) -> None:
    """As drivers report both; a slice of a device has no sheet."""
    known = sheet_of(replace(H200, name=name, memory=int(gib * 2**30)))
    assert (known.name if known is not None else None) == sheet


def test_without_a_calibration_plans_are_made_with_the_device_that_is_there() -> None:
    """Speeds from the sheet; memory, and what of it is not the model's, as measured."""
    costs = costs_of(replace(H200, reserve=9 << 30), compute_bytes=2)
    assert costs is not None
    assert (costs.device.memory, costs.device.reserve, costs.device.name) == (143771 << 20, 9 << 30, "NVIDIA H200")
    assert costs.device.flops == pytest.approx(989.5e12 * 0.42)
    full = costs_of(H200, compute_bytes=4)
    assert full is not None
    assert full.device.flops == pytest.approx(67e12 * 0.42)
    assert costs_of(replace(H200, name="NVIDIA GeForce RTX 4090"), compute_bytes=2) is None


def test_cpus_are_planned_by_shape_unless_calibrated() -> None:
    assert planned_with(None, CPU, PROFILE) is None
    assert planned_with(None, H200, PROFILE) == costs_of(H200, 2)


@pytest.mark.parametrize(
    ("name", "reserve", "kept"),
    [
        ("NVIDIA H200", 9 << 30, 9 << 30),
        ("NVIDIA H200", 0, 4 * 10**9),
        ("NVIDIA GeForce RTX 4090", 700 << 20, 700 << 20),
    ],
)
def test_a_calibration_leaves_the_memory_that_is_not_the_models(name: str, reserve: int, kept: int) -> None:
    """Its speeds are taken; of memory what this node measured, or the sheet's reserve where that is more."""
    costs = costs_of(replace(H200, memory=139 << 30), 2)
    assert costs is not None
    calibrated = replace(costs, device=replace(costs.device, name=name, flops=1e12, reserve=0))
    made = planned_with(calibrated, replace(H200, name=name, reserve=reserve), PROFILE)
    assert made is not None
    assert (made.device.memory, made.device.reserve) == (H200.memory, kept)
    assert replace(made, device=calibrated.device) == calibrated
    assert made.device.flops == 1e12


def test_a_calibration_of_another_device_is_refused() -> None:
    costs = costs_of(replace(H200, name="NVIDIA H100 80GB HBM3", memory=80 << 30), 2)
    with pytest.raises(ConfigurationError, match="is of NVIDIA H100 80GB HBM3, and this node computes on NVIDIA H200"):
        planned_with(costs, H200, PROFILE)


def test_the_drivers_version_is_read_from_the_kernel(tmp_path: object) -> None:
    from pathlib import Path

    root = Path(str(tmp_path))
    assert driver(root) == ""
    (root / "proc/driver/nvidia").mkdir(parents=True)
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 23 21:50:12 UTC 2025\nGCC version: 12.2\n"
    )
    (root / "proc/driver/nvidia/version").write_text(text)
    assert driver(root) == "570.133.20"
