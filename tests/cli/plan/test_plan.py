"""`elastic3d plan`: what it prints, for a person and for a program, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from elastic3d.calibration.record import save
from elastic3d.cli import application
from elastic3d.errors import UsageError
from elastic3d.values import Layout
from tests.calibration.test_record import CALIBRATION
from tests.paths import ROOT

SCRIPT = str(ROOT / "chaos" / "scripts" / "train_gpt.py")
LLAMA = ("--model", "llama-7b", "--nodes", "7", "--slots", "8", "--device", "h200")
run = CliRunner()


def planned(*arguments: str, width: int = 100) -> Result:
    """Run `elastic3d plan` in a terminal of some width."""
    return run.invoke(application(), ["plan", *arguments], env={"COLUMNS": str(width)})


def answer(*arguments: str, code: int = 0) -> Any:
    """Return its JSON output."""
    result = planned(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_json_has_the_ranking_and_the_rejected_layouts() -> None:
    """Best first, each a whole layout with its time, memory and spares."""
    document = answer(*LLAMA)
    assert document["schema"] == 1
    seconds = [one["seconds"] for one in document["ranking"]]
    assert seconds
    assert seconds[0] == min(seconds)
    for one in document["ranking"]:
        assert {"pp", "dp", "tp", "zero", "schedule", "micro_batches", "seconds", "memory_bytes", "spares"} <= set(one)
        assert one["pp"] * one["dp"] * one["tp"] == 8 * one["nodes"]
        assert one["nodes"] + one["spares"] == 7
    for one in document["rejected"]:
        assert one["reason"]
        assert {"pp", "dp", "tp", "zero"} <= set(one)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_text_shows_the_best_layout_its_placement_and_its_step(width: int) -> None:
    """In a terminal of any width, with no line longer than that."""
    result = planned(*LLAMA, "--layout", "pp=2", width=width)
    assert result.exit_code == 0, result.output
    for words in ("llama-7b", "7 nodes x 8 slots", "Best:", "Places", "One step", "bubble"):
        assert words in result.stdout, words
    # Drawings fit; sentences are wrapped by the terminal.
    assert max(map(len, result.stdout.splitlines())) <= width


def test_only_the_sizes_given_by_layout_are_fixed() -> None:
    """--layout pp=2 leaves dp, tp and ZeRO to the planner."""
    document = answer(*LLAMA, "--layout", "pp=2")
    assert {one["pp"] for one in document["ranking"]} == {2}
    assert len({one["dp"] for one in document["ranking"]}) > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "llama-8b"), "'llama-8b'.*llama-7b.*mixtral-8x7b"),
        (("--model", "llama-7b", "--device", "h300"), "'h300'.*h200"),
        (("--model", "llama-7b", "--nodes", "0"), "--nodes 0.*at least one"),
        (("--model", "llama-7b", "--slots", "-1"), "--slots -1"),
        (("--model", "llama-7b", "--nodes", "1000000"), "at most"),
        (("--model", "llama-7b", "--global-batch", "7", "--micro-batch", "2"), "--global-batch 7.*micro-batches of 2"),
        (("--model", "llama-7b", "--layout", "qq=2"), "qq=2"),
        (("--model", "llama-7b", "--layout", "pp=two"), "pp"),
        (("--model", "llama-7b", "--precision", "int4"), "--precision 'int4'.*bf16"),
        (("--model", "llama-7b", "--device", "v100", "--precision", "bf16"), "v100 has no products in bf16"),
        (("--model", "llama-7b", "--recompute", "some"), "--recompute 'some'.*full"),
        (("--model", "llama-7b", "--optimizer", "magic"), "--optimizer 'magic'.*adamw"),
        (("--model", "llama-7b", "--context", "0"), "--context 0"),
        (("--model", "llama-7b", "--calibration", "/nowhere.json"), "/nowhere.json.*cannot be read"),
        (("--model", "llama-7b", "--slow", "0=0.5"), "--slow '0=0.5'.*above 1"),
        (("--model", "llama-7b", "--slow", "1=2"), "--slow '1=2'.*numbered from 0 to 0"),
        ((), "a script or --model"),
        (("train.py", "--model", "llama-7b"), "not both"),
        (("/nowhere/train.py",), "/nowhere/train.py.*not a script"),
        ((SCRIPT, "--micro-batch", "2"), "up to the script"),
    ],
)
def test_wrong_arguments_are_refused_with_what_would_be_right(arguments: tuple[str, ...], words: str) -> None:
    """Exit code 2 and no traceback."""
    result = planned(*arguments)
    assert isinstance(result.exception, UsageError), result.output
    assert result.exception.exit_code == 2
    assert re.search(words, str(result.exception), re.DOTALL), result.exception


def test_a_slow_nodes_stage_gets_fewer_blocks() -> None:
    """And the step is predicted with it."""
    asked = ("--model", "llama-7b", "--nodes", "4", "--device", "h100", "--layout", "pp=4,zero=2,tp=8,schedule=1f1b")
    even, slow = answer(*asked), answer(*asked, "--slow", "2=2")
    bounds = [0, *slow["ranking"][0]["cuts"], 32]
    assert bounds[3] - bounds[2] == min(stop - start for start, stop in pairwise(bounds))
    assert even["ranking"][0]["seconds"] < slow["ranking"][0]["seconds"] < 2 * even["ranking"][0]["seconds"]
    assert slow["slow"] == {"2": 2.0}
    text = planned(*asked, "--slow", "2=2").output
    assert "node 2 takes 2 times as long" in text
    assert "in each stage" in text


def test_long_sequences_are_planned_over_cp() -> None:
    """With a column of its own in the table, and in the drawing of the mesh."""
    long = ("--model", "llama-7b", "--nodes", "2", "--context", "65536", "--chunks", "8", "--global-batch", "16")
    result = planned(*long, "--recompute", "full", "--layout", "cp=4")
    assert result.exit_code == 0, result.output
    assert re.search(r"pp +dp +cp +tp", result.output)
    assert "keys and values" in result.output
    assert "d0 c1" in result.output
    refused = planned("--model", "llama-7b", "--chunks", "7")
    assert refused.exit_code != 0
    assert "cannot be cut into so many equal parts" in str(refused.exception)


def test_a_plan_can_use_a_calibration(tmp_path: Path) -> None:
    """A device twice as fast needs less time; the output says where it was measured."""
    slow, fast = tmp_path / "slow.json", tmp_path / "fast.json"
    save(CALIBRATION, slow)
    save(dataclasses.replace(CALIBRATION, flops=2 * CALIBRATION.flops), fast)
    common = ("--model", "gpt-125m", "--nodes", "2", "--slots", "2", "--global-batch", "8")
    slow_told, fast_told = (answer(*common, "--calibration", str(path)) for path in (slow, fast))
    assert fast_told["ranking"][0]["seconds"] < slow_told["ranking"][0]["seconds"]
    assert "measured on somewhere" in planned(*common, "--calibration", str(slow)).stdout


def test_a_script_is_profiled_without_a_cluster() -> None:
    """Its batches and blocks are its own; nothing is trained and nothing is left behind."""
    arguments = [SCRIPT, "--nodes", "2", "--slots", "2", "--device", "cpu", "--layout", "pp=2", "--json", "--"]
    result = planned(*arguments, "--width", "32", "--blocks", "4", "--global-batch", "16")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["parameters"] > 10_000
    assert document["global_batch"] == 16
    best = document["ranking"][0]
    assert Layout(pp=best["pp"], dp=best["dp"], tp=best["tp"]).world == 4
    assert best["seconds"] > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print('hello')", r"ended without calling elastic3d\.run.*hello"),
        ("raise ValueError('oops')", r"ended with code 1.*oops"),
        ("import time\ntime.sleep(100)", r"did not reach run\.restore within 1 s"),
        ("import elastic3d\nelastic3d.run(lambda run: None)", r"without calling run\.restore"),
    ],
)
def test_a_script_that_cannot_be_profiled_is_reported(text: str, words: str, tmp_path: Path) -> None:
    """With the last line it printed, and within its time limit."""
    script = tmp_path / "train.py"
    script.write_text(text)
    begun = time.monotonic()
    result = planned(str(script), "--timeout", "1s" if "sleep" in text else "2m")
    assert result.exit_code != 0
    assert re.search(words, str(result.exception), re.DOTALL), result.exception
    assert time.monotonic() - begun < 60


def test_layouts_that_do_not_fit_show_what_takes_most_memory() -> None:
    """For a person, nearest miss first; for a program, each layout with its reason; exit code 1."""
    arguments = ("--model", "llama-70b", "--device", "a100-40g", "--nodes", "1", "--slots", "2", "--global-batch", "8")
    result = planned(*arguments)
    assert result.exit_code == 1
    assert "No layout works" in result.stdout
    assert re.search(r"needs \d+\.\d GiB of 37\.3\s+GiB", result.stdout), result.stdout
    document = answer(*arguments, code=1)
    assert document["ranking"] == []
    fat = [one["reason"] for one in document["rejected"] if "needs" in one["reason"]]
    assert fat
    assert all(re.search(r"optimizer|activations|gradients|gathered|parameters", reason) for reason in fat)
    assert planned(*arguments, "--rejected").stdout.count("needs ") == len(fat)


def test_a_forbidden_layout_is_refused_with_its_reason() -> None:
    """ZeRO-3 under a schedule that splits its backward pass would be silently wrong."""
    document = answer(*LLAMA, "--layout", "pp=2,dp=28,zero=3,schedule=zbv", code=1)
    assert any("silently wrong" in one["reason"] for one in document["rejected"])


@pytest.mark.long
@pytest.mark.parametrize("nodes", [128, 2048])
def test_thousands_of_devices_are_planned(nodes: int) -> None:
    """Of a thousand devices, and of sixteen thousand, all that can be used are."""
    arguments = ("--model", "llama-70b", "--nodes", str(nodes), "--device", "h100", "--global-batch", str(8 * nodes))
    best = answer(*arguments, "--recompute", "full")["ranking"][0]
    assert best["pp"] * best["dp"] * best["tp"] == 8 * nodes


def test_host_memory_is_said_when_asked_for() -> None:
    """For a person and for a program, of the best layout; on fewer nodes each needs more."""
    assert answer(*LLAMA)["host_memory"] is None
    needed = answer(*LLAMA, "--host-memory")["host_memory"]
    assert needed["nodes"] == answer(*LLAMA)["ranking"][0]["nodes"]
    fewer = answer("--model", "llama-7b", "--nodes", "2", "--host-memory")["host_memory"]
    assert fewer["limit"] > needed["limit"] > needed["total"]
    result = planned(*LLAMA, "--host-memory")
    assert re.search(rf"limit +{needed['limit'] >> 30}Gi", result.stdout)
    assert "Host memory" not in planned(*LLAMA).stdout


def test_host_memory_of_cpus_holds_the_training_too(tmp_path: Path) -> None:
    """A calibration of cores has no memory but the host's."""
    file = tmp_path / "profile.json"
    save(dataclasses.replace(CALIBRATION, memory=256 << 30), file)
    question = ("--model", "llama-7b", "--nodes", "4", "--slots", "2", "--calibration", str(file), "--host-memory")
    needed = json.loads(planned(*question, "--json").stdout)["host_memory"]
    assert needed["training"] > 0
    assert needed["restoring"] == 0


def test_where_no_layout_works_no_memory_is_said() -> None:
    """Exit code 1, and the field is empty."""
    assert (
        answer("--model", "llama-70b", "--nodes", "1", "--slots", "1", "--host-memory", code=1)["host_memory"] is None
    )
