"""Which device a job trains on: what is asked for, what is there, and what is refused rather than left idle."""

from __future__ import annotations

from pathlib import Path

import pytest

import elastic3d
from elastic3d.devices.selection import Accelerators, available, choose
from elastic3d.errors import ConfigurationError, UsageError

NOTHING = Accelerators()
TWO = Accelerators(nvidia=2)


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own environment says "cpu"."""
    monkeypatch.delenv("ELASTIC3D_DEVICE", raising=False)


def host(root: Path, *, nvidia: int = 0, amd: int = 0) -> Path:
    """Write the files that a host with these devices has, and some that mean none."""
    (root / "dev").mkdir()
    for name in [*map(str, range(nvidia)), *(("ctl", "-uvm") if nvidia else ())]:
        (root / "dev" / f"nvidia{name}").touch()
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for node in range(amd + 1 if amd else 0):
        (nodes / str(node)).mkdir(parents=True)
        (nodes / str(node) / "properties").write_text(f"cpu_cores_count 8\nsimd_count {304 if node else 0}\n")
    if amd:
        (root / "dev/kfd").touch()
    return root


def test_devices_are_counted_from_the_systems_files(tmp_path: Path) -> None:
    """NVIDIA's control files are no devices, and AMD's topology names the processors too."""
    assert available(host(tmp_path, nvidia=8), {}) == Accelerators(nvidia=8)


def test_amds_processors_are_not_counted(tmp_path: Path) -> None:
    assert available(host(tmp_path, amd=4), {}) == Accelerators(amd=4)


def test_a_host_without_devices_has_none(tmp_path: Path) -> None:
    assert available(host(tmp_path), {"CUDA_VISIBLE_DEVICES": ""}) == NOTHING


@pytest.mark.parametrize("value", ["", "-1", " "])
def test_devices_that_the_user_hides_are_known_to_be_there(tmp_path: Path, value: str) -> None:
    there = available(host(tmp_path, nvidia=1), {"CUDA_VISIBLE_DEVICES": value})
    assert there == Accelerators(nvidia=1, hidden="CUDA_VISIBLE_DEVICES")


def test_a_variable_hides_the_devices_of_its_own_maker(tmp_path: Path) -> None:
    """An AMD device beside the NVIDIA ones is often hidden; CUDA's variable hides both, as ROCm reads it, too."""
    root, hip = host(tmp_path, nvidia=1, amd=2), {"HIP_VISIBLE_DEVICES": "-1"}
    assert available(root, hip) == Accelerators(nvidia=1)
    assert choose("auto", available(root, hip), "cuda") == "cuda"
    assert available(root, {"CUDA_VISIBLE_DEVICES": ""}) == Accelerators(nvidia=1, amd=2, hidden="CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("asked", "there", "built", "kind"),
    [
        ("auto", NOTHING, "", "cpu"),
        ("auto", NOTHING, "cuda", "cpu"),
        ("auto", TWO, "cuda", "cuda"),
        ("auto", Accelerators(amd=1), "hip", "cuda"),
        ("auto", Accelerators(nvidia=1, hidden="CUDA_VISIBLE_DEVICES"), "cuda", "cpu"),
        ("cpu", TWO, "cuda", "cpu"),
        ("cuda", TWO, "cuda", "cuda"),
    ],
)
def test_auto_takes_what_is_there(asked: str, there: Accelerators, built: str, kind: str) -> None:
    """A device that the user hides is not used, and is no error either."""
    assert choose(asked, there, built) == kind


@pytest.mark.parametrize(
    ("asked", "there", "built", "words"),
    [
        ("auto", TWO, "", r"2 NVIDIA device.*built for the CPU alone.*idle.*device='cpu'"),
        ("auto", Accelerators(amd=4), "cuda", r"4 AMD device.*built for CUDA.*idle"),
        ("cuda", TWO, "", r"device='cuda'.*2 NVIDIA device.*built for the CPU alone"),
        ("cuda", NOTHING, "cuda", r"no accelerator: neither /dev/nvidia0 nor /dev/kfd.*docker run --gpus all"),
        ("cuda", Accelerators(nvidia=1, hidden="CUDA_VISIBLE_DEVICES"), "cuda", "CUDA_VISIBLE_DEVICES hides them"),
    ],
)
def test_a_device_is_never_left_idle_in_silence(asked: str, there: Accelerators, built: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        choose(asked, there, built)


@pytest.mark.parametrize("asked", ["tpu", "", "CUDA", 3, None])
def test_what_is_no_kind_of_device_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="give one of auto, cpu, cuda"):
        choose(asked, NOTHING, "")


def test_a_host_may_say_what_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """ELASTIC3D_DEVICE belongs to a machine; a script that names a device is not overruled by it."""
    monkeypatch.setenv("ELASTIC3D_DEVICE", "cpu")
    assert choose("auto", TWO, "cuda") == "cpu"
    assert choose("cuda", TWO, "cuda") == "cuda"
    monkeypatch.setenv("ELASTIC3D_DEVICE", "xpu")
    with pytest.raises(UsageError, match="ELASTIC3D_DEVICE=xpu: give one of auto, cpu, cuda"):
        choose("auto", TWO, "cuda")


@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_a_run_on_a_device_that_cannot_be_had_starts_nothing(device: str) -> None:
    """Refused where the script asks, before any process or file of the run."""

    def main(run: elastic3d.Run) -> None:
        raise AssertionError("nothing was to be started")

    if device == "cuda" and available().number:
        device = "hip"
    with pytest.raises(UsageError):
        elastic3d.run(main, device=device)
