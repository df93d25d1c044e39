"""Two calibrations: what is slower is found, and what cannot be compared is not taken for a difference."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from elastic3d.calibration.comparison import Comparison, SpeedChange, compare, parse_tolerance
from elastic3d.calibration.record import BlockTimes, Calibration, Sample, save
from elastic3d.cli import application
from elastic3d.errors import Elastic3dError, UsageError
from tests.calibration.test_record import CALIBRATION, LINK

BLOCK = BlockTimes(model="m", forward=0.01, backward=0.02, flops=1e8, peak_bytes=0, kept_bytes=0, repeats=5)
OLD = dataclasses.replace(CALIBRATION, block=BLOCK)


def with_times(small: float, large: float, **fields: Any) -> Any:
    samples = (Sample(bytes=1024, seconds=small), Sample(bytes=1 << 20, seconds=large))
    return dataclasses.replace(LINK, samples=samples, **fields)


def found(
    new: Calibration, old: Calibration = OLD, tolerance: float = 0.1
) -> dict[str, tuple[SpeedChange, float | None]]:
    made = compare(old, new, tolerance)
    return {one.what: (one.change, one.ratio and round(one.ratio, 3)) for one in made.speeds}


def test_the_same_calibration_has_no_difference() -> None:
    """Every line is there, with a ratio of one."""
    same = (SpeedChange.SAME, 1.0)
    lines = ["products", "memory", "inside a node, small", "inside a node, large", "block, forward", "block, backward"]
    assert found(OLD) == dict.fromkeys(lines, same)
    assert compare(OLD, OLD, 0.0).slower == 0


def test_a_ratio_below_one_is_slower_whatever_the_unit() -> None:
    """Fewer FLOPs in a second are slower, and so are more seconds."""
    new = dataclasses.replace(
        OLD,
        flops=0.5e11,
        memory_bandwidth=2e10,
        inside=with_times(2e-4, 1.1e-3 / 4),
        block=dataclasses.replace(BLOCK, forward=0.04),
    )
    assert found(new) == {
        "products": (SpeedChange.SLOWER, 0.5),
        "memory": (SpeedChange.FASTER, 2.0),
        "inside a node, small": (SpeedChange.SLOWER, 0.5),
        "inside a node, large": (SpeedChange.FASTER, 4.0),
        "block, forward": (SpeedChange.SLOWER, 0.25),
        "block, backward": (SpeedChange.SAME, 1.0),
    }
    made = compare(OLD, new, 0.1)
    assert (made.slower, made.faster) == (3, 2)


@pytest.mark.parametrize(
    ("flops", "change"), [(0.91e11, SpeedChange.SAME), (0.89e11, SpeedChange.SLOWER), (1.09e11, SpeedChange.SAME)]
)
def test_the_tolerance_is_a_share_of_the_speed_before(flops: float, change: SpeedChange) -> None:
    """Up to it nothing is said."""
    assert found(dataclasses.replace(OLD, flops=flops))["products"][0] is change


def test_what_cannot_be_compared_says_why() -> None:
    """Another model, another backend, other sizes, or nothing on one side; none of it counts as slower."""
    new = dataclasses.replace(
        OLD, inside=with_times(9.0, 9.0, backend="nccl"), between=LINK, block=dataclasses.replace(BLOCK, model="n")
    )
    made = compare(OLD, new, 0.1)
    assert (made.slower, made.faster) == (0, 0)
    assert {one.what: one.why for one in made.speeds if one.change is SpeedChange.UNKNOWN} == {
        "inside a node, small": "gloo between 2 before, nccl between 2 now",
        "inside a node, large": "gloo between 2 before, nccl between 2 now",
        "between nodes, small": "measured now, and not before",
        "between nodes, large": "measured now, and not before",
        "block, forward": "of another model",
        "block, backward": "of another model",
    }
    other = dataclasses.replace(LINK, samples=(Sample(bytes=5, seconds=1.0),))
    sizes = compare(OLD, dataclasses.replace(OLD, inside=other, block=None), 0.1)
    assert {one.why for one in sizes.speeds if one.change is SpeedChange.UNKNOWN} == {
        "messages of other sizes",
        "measured before, and not now",
    }
    empty = dataclasses.replace(OLD, inside=dataclasses.replace(LINK, samples=()))
    assert "inside a node, small" not in found(empty, empty)


def test_what_else_differs_is_noted() -> None:
    """It may be why."""
    assert compare(OLD, dataclasses.replace(OLD, torch="3.0", cores=1), 0.1).notes == (
        "torch was 2.13.0 and is 3.0",
        "cores was 2 and is 1",
    )


def test_a_tolerance_is_a_share() -> None:
    """Of less than all; anything else is refused."""
    assert [parse_tolerance(text) for text in ("10%", "0.25", "2.5 %", "0")] == [0.1, 0.25, 0.025, 0.0]
    for wrong in ("", "10", "100%", "-1%", "x", "1e-2", "nan"):
        with pytest.raises(UsageError, match="--tolerance"):
            parse_tolerance(wrong)


def shown(folder: Path, new: Calibration, *arguments: str, old: Calibration | str = OLD) -> Result:
    """Compare files of two calibrations by the command, without measuring anything."""
    if isinstance(old, str):
        (folder / "old.json").write_text(old)
    else:
        save(old, folder / "old.json")
    save(new, folder / "new.json")
    files = ["--show", "-o", str(folder / "new.json"), "--compare", str(folder / "old.json")]
    return CliRunner().invoke(application(), ["calibrate", *files, *arguments], env={"COLUMNS": "120"})


def test_the_command_exits_with_1_if_anything_is_slower(tmp_path: Path) -> None:
    """It prints a line for each speed with what it means, or one JSON document."""
    slow = dataclasses.replace(OLD, flops=0.8e11)
    result = shown(tmp_path, slow)
    assert result.exit_code == 1
    assert "0.1 TFLOP/s" in result.stdout
    assert "x 0.80  slower" in result.stdout
    assert "matrix products in fp32" in result.stdout
    assert "1 slower and 0 faster by more than 10%" in result.stdout
    assert shown(tmp_path, slow, "--tolerance", "25%").exit_code == 0
    result = shown(tmp_path, slow, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["schema"], document["slower"], document["tolerance"]) == (1, 1, 0.1)
    assert document["speeds"][0]["ratio"] == pytest.approx(0.8)
    assert "nothing is slower or faster by more than 10%" in shown(tmp_path, OLD).stdout


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device": "cuda", "name": "H100"}, r"of another device, H100 \(cuda\), and this one is a CPU \(cpu\)"),
        ({"name": "another CPU"}, "of another device, another CPU"),
        ({"number": "bf16"}, "give --precision bf16"),
        ({"threads": 4}, "give --threads 4"),
    ],
)
def test_other_devices_are_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    """And what was measured in another way, with what makes it the same."""
    refused(shown(tmp_path, OLD, old=dataclasses.replace(OLD, **fields)), words)


def test_wrong_calls_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """A file that is no calibration, one that would be overwritten, and another device; all files stay as they are."""
    refused(shown(tmp_path, OLD, old="[1]"), "not a calibration")
    refused(shown(tmp_path, OLD, "--tolerance", "much"), "--tolerance 'much'")
    save(OLD, tmp_path / "old.json")
    before = (tmp_path / "old.json").read_bytes()
    old, new = str(tmp_path / "old.json"), str(tmp_path / "unmade.json")
    run = CliRunner().invoke
    refused(run(application(), ["calibrate", "--compare", old, "-o", old]), "would overwrite")
    refused(run(application(), ["calibrate", "--compare", "/nowhere.json", "-o", new]), "cannot be read")
    refused(
        run(application(), ["calibrate", "--compare", old, "-o", new, "--device", "cpu"]), "of another device, a CPU"
    )
    refused(run(application(), ["calibrate", "--tolerance", "5%", "-o", new]), "give --compare FILE too")
    assert (tmp_path / "old.json").read_bytes() == before
    assert not Path(new).exists()


def refused(result: Result, words: str) -> None:
    assert isinstance(result.exception, Elastic3dError), result.output
    assert result.exception.exit_code == 2
    with pytest.raises(type(result.exception), match=words):
        raise result.exception


def test_a_comparison_counts_what_it_lists() -> None:
    """The numbers are those of the lines."""
    made: Comparison = compare(OLD, dataclasses.replace(OLD, memory_bandwidth=1e9), 0.1)
    assert made.slower == len([one for one in made.speeds if one.change is SpeedChange.SLOWER]) == 1
