"""Schedules drawn by seeds, on real jobs: every promise holds, and one that does not is found and made small."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chaos.commands.app import app
from chaos.playing.setting import TRAIN_GPT

pytestmark = [pytest.mark.etcd, pytest.mark.gloo]

TENSOR = Path(__file__).parent / "scripts" / "train_tensor.py"
FORGOTTEN = Path(__file__).parent / "scripts" / "forgotten_warmup.py"
# With a pause, since a whole small job takes a second: on a busy machine it would be over before much happens to it.
SMALL = (
    *("--width=16", "--blocks=3", "--context=16", "--global-batch=8", "--micro-batch=2"),
    *("--pause=0.15", "--seed={seed}"),
)
RUNS = 6
"""Of one test of the long part: on a busy machine each takes more than a minute."""

Document = dict[str, Any]
Chaos = Callable[..., tuple[int, Document]]


@pytest.fixture
def chaos(tmp_path: Path) -> Chaos:
    """Return a call of a command, which gives its exit code and its document."""

    def call(command: str, *arguments: str) -> tuple[int, Document]:
        result = CliRunner().invoke(app, [command, f"--out={tmp_path / 'out'}", "--json", *arguments])
        assert result.stdout, result.stderr
        return result.exit_code, json.loads(result.stdout)

    return call


def drawn(
    chaos: Chaos, script: Path, options: Sequence[str], *, steps: int, every: int, given: Sequence[str] = ()
) -> tuple[int, Document]:
    """Play drawn schedules on a small job of a script. given: more of its arguments."""
    job = [f"--steps={steps}", f"--checkpoint-every={every}", *SMALL, *given]
    return chaos("random", "--script", str(script), "--patience", "240", *options, "--", *job)


def told(document: Document) -> str:
    """Return what was broken, for a message."""
    return json.dumps([run for run in document["runs"] if run["broken"]], indent=2)


@pytest.mark.timeout(600)
def test_promises_hold_under_three_drawn_schedules(chaos: Chaos) -> None:
    """Of two or three nodes, which are lost, come, and are sent away."""
    options = ["--seed=1", "--runs=3", "--each=2", "--nodes=3", "--faults=kill,kill-trainer,join,drain,etcd-compact"]
    code, document = drawn(chaos, TRAIN_GPT, options, steps=16, every=3)
    assert code == 0, told(document)
    assert [run["verdict"] for run in document["runs"]] == ["kept"] * 3


@pytest.mark.parametrize(
    ("seed", "runs"),
    [
        *(pytest.param(seed, RUNS, id=f"six from {seed}", marks=pytest.mark.long) for seed in range(100, 118, RUNS)),
        pytest.param(200, 60, id="sixty", marks=[pytest.mark.slow, pytest.mark.timeout(5400)]),
    ],
)
@pytest.mark.timeout(1500)
def test_promises_hold_under_drawn_schedules(seed: int, runs: int, chaos: Chaos) -> None:
    """Of everything that can happen to any script on this machine, and of two to four nodes."""
    code, document = drawn(chaos, TRAIN_GPT, [f"--seed={seed}", f"--runs={runs}"], steps=40, every=5)
    assert code == 0, told(document)
    assert {run["nodes"] for run in document["runs"]} == {2, 3, 4}


@pytest.mark.parametrize(
    ("runs", "nodes"),
    [
        pytest.param(2, 3, id="two", marks=pytest.mark.long),
        pytest.param(30, 4, id="thirty", marks=[pytest.mark.slow, pytest.mark.timeout(5400)]),
    ],
)
@pytest.mark.timeout(900)
def test_promises_hold_with_stages_of_tensor_parallel_ranks(runs: int, nodes: int, chaos: Chaos) -> None:
    """pp x dp x tp: two ranks of a node compute each block together, and a node is a stage or more of it."""
    options = ["--seed=300", f"--runs={runs}", "--each=3", f"--nodes={nodes}", "--slots=2"]
    code, document = drawn(chaos, TENSOR, options, steps=40, every=5, given=["--layout=pp=2,tp=2"])
    assert code == 0, told(document)
    assert {run["slots"] for run in document["runs"]} == {2}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_mistake_of_a_script_is_found_and_its_schedule_made_small(chaos: Chaos, tmp_path: Path) -> None:
    """Whatever begins another generation shows it; all else is left out, and what is left is a test that fails."""
    options = ["--seed=6", "--runs=1", "--each=5", "--nodes=3"]
    options += ["--faults=kill,kill-trainer,join,drain,sigterm,etcd-compact,revoke,pause"]
    code, document = drawn(chaos, FORGOTTEN, options, steps=24, every=5)
    assert code == 1
    (run,) = document["runs"]
    assert any("undisturbed" in text for text in run["broken"]), run
    code, shrunk = chaos("shrink", run["folder"], "--tries=12")
    assert code == 0, shrunk
    assert shrunk["promise"] == "whatever happens, the bits are those of a run that nothing happens to"
    assert len(shrunk["faults"]) < shrunk["before"]
    assert len(shrunk["faults"]) <= 3
    assert {path.name for path in Path(str(shrunk["folder"])).iterdir()} >= {
        "schedule.toml",
        "job.json",
        "verdict.json",
        "test_found_6.py",
    }
