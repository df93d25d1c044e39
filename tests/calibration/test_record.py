"""The calibration file: it reads back unchanged, and any other file is refused with what to do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from elastic3d.calibration.linear_fit import fit
from elastic3d.calibration.record import BlockTimes, Calibration, MeasuredLink, Sample, load, save
from elastic3d.errors import ConfigurationError
from elastic3d.values import to_json

LINK = MeasuredLink(
    backend="gloo",
    ranks=2,
    latency=1e-4,
    bandwidth=1e9,
    error=0.1,
    samples=(Sample(bytes=1024, seconds=1e-4), Sample(bytes=1 << 20, seconds=1.1e-3)),
)
CALIBRATION = Calibration(
    made="2026-01-01T00:00:00Z",
    host="somewhere",
    torch="2.13.0",
    device="cpu",
    name="a CPU",
    threads=1,
    cores=2,
    memory=4 << 30,
    number="fp32",
    flops=1e11,
    memory_bandwidth=1e10,
    inside=LINK,
)


def test_a_calibration_reads_back_unchanged(tmp_path: Path) -> None:
    """It is JSON that a person can read."""
    path = tmp_path / "profile.json"
    save(CALIBRATION, path)
    assert load(path) == load(str(path), device="cpu") == CALIBRATION
    assert json.loads(path.read_text())["schema"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_measured_block_takes_precedence_over_matrix_products() -> None:
    """A block does more than matrix products; a link that was not measured is taken to be like the other."""
    plain = CALIBRATION.costs()
    assert plain.device.flops == 1e11
    assert plain.between == plain.inside
    block = BlockTimes(model="", forward=0.01, backward=0.02, flops=1e8, peak_bytes=0, kept_bytes=0, repeats=5)
    assert dataclasses.replace(CALIBRATION, block=block).costs().device.flops == pytest.approx(1e10)


def changed(**fields: object) -> str:
    return json.dumps(to_json(CALIBRATION) | fields)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[1]", "not a calibration"),
        ('{"flops": 1}', "no schema"),
        (changed(schema=2), "schema 2.*reads 1"),
        (changed(flops="fast"), "damaged"),
        (changed(flops=0.0), "flops is 0.0"),
        (changed(memory_bandwidth=-1.0), "memory_bandwidth is -1"),
        (changed(inside={**to_json(LINK), "bandwidth": 0.0}), "inside.bandwidth"),
        ('{"schema": 1}', "damaged"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(text: str, words: str, tmp_path: Path) -> None:
    """The message has the path, what is wrong, and the command that makes a new one."""
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=rf"profile\.json.*{words}.*elastic3d calibrate"):
        load(path)


def test_a_calibration_of_another_device_is_refused(tmp_path: Path) -> None:
    """The message says where it was made. A missing file is reported as missing."""
    save(CALIBRATION, tmp_path / "profile.json")
    with pytest.raises(ConfigurationError, match=r"made on cpu \(a CPU\).*computes on cuda.*elastic3d calibrate"):
        load(tmp_path / "profile.json", device="cuda")
    with pytest.raises(ConfigurationError, match=r"nowhere\.json.*No such file"):
        load(tmp_path / "nowhere.json")
    with pytest.raises(ConfigurationError, match=r"no link"):
        dataclasses.replace(CALIBRATION, inside=None).costs()


def line(latency: float, bandwidth: float, sizes: tuple[int, ...] = (1024, 1 << 16, 1 << 20, 1 << 24)) -> list[Sample]:
    return [Sample(bytes=size, seconds=latency + size / bandwidth) for size in sizes]


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-4, 1e9), (5e-6, 45e10), (1e-3, 1e7)])
def test_a_line_is_fitted_exactly(latency: float, bandwidth: float) -> None:
    """Where the samples lie on one."""
    fitted = fit(line(latency, bandwidth))
    assert fitted[:2] == (pytest.approx(latency, rel=1e-6), pytest.approx(bandwidth, rel=1e-6))
    assert fitted[2] < 1e-6


def test_fitted_latency_and_bandwidth_are_never_negative() -> None:
    """Whatever the noise: samples that curve down, or do not grow."""
    latency, bandwidth, error = fit([Sample(bytes=1000, seconds=1e-6), Sample(bytes=2000, seconds=1e-5)])
    assert latency == 0
    assert bandwidth > 0
    assert error > 0
    latency, bandwidth, _ = fit([Sample(bytes=1000, seconds=1e-3), Sample(bytes=100000, seconds=9e-4)])
    assert latency > 0
    assert 0 < bandwidth < float("inf")
