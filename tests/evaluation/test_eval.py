"""`elastic3d eval`: a real script evaluates the checkpoints of a run beside it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from chaos.machine.processes import wait_until
from checkpointing import Store, commit, fence, open_checkpoint, open_store, save_rank
from checkpointing.format.tiles import Piece
from checkpointing.interchange.contents import Contents
from checkpointing.reading.naming import read_ref
from checkpointing.retention import protection
from elastic3d.cli import application
from elastic3d.errors import Elastic3dError, UsageError
from elastic3d.evaluation.answering import checked
from elastic3d.evaluation.results import Results
from tests.parallel.evaluated_mains import HELD_OUT, losses
from tests.parallel.models import Model
from tests.training.stored import Tensors, trained

run = CliRunner()

SCRIPT = """
import pathlib, sys
import elastic3d
from tests.parallel.evaluated_mains import HELD_OUT, losses
from tests.parallel.models import Model

def main(run):
    raise SystemExit("trains")

def evaluate(run):
    if "fail" in sys.argv:
        raise ValueError("no such thing")
    model = run.shard(Model, blocks="blocks", seed=5)
    if "step" in sys.argv:
        run.backward(model, None, None)
    run.restore(model=model)
    if "odd" in sys.argv:
        return {"eval/loss": "low"}
    if run.is_first:
        with pathlib.Path("calls").open("a") as calls:
            print(run.steps, run.world, file=calls)
    return {"eval/loss": run.evaluate(model, HELD_OUT, losses), "steps": run.steps}

elastic3d.run(main, evaluate=None if "none" in sys.argv else evaluate)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A store with a checkpoint of step 2, and the tensors of its model."""
    folder = tmp_path_factory.mktemp("run")
    return folder / "store", trained(folder, Model, "blocks")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The script, in the folder in which it is called."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return "train.py"


def evaluated(*arguments: str, code: int = 0) -> tuple[list[Any], str]:
    """Return the lines of the command, and what it said besides."""
    result = run.invoke(application(), ["eval", *arguments, "--json"])
    assert result.exit_code == code, result.output
    error = str(result.exception) if isinstance(result.exception, Elastic3dError) else ""
    return [json.loads(line) for line in result.stdout.splitlines()], result.stderr + error


def loss_of(tensors: Tensors) -> float:
    """Return the metric as plain torch has it, two samples at a time: the model looks at the first of them."""
    model = Model().eval()
    model.load_state_dict(tensors)
    total = number = 0.0
    for first in range(0, len(HELD_OUT), 2):
        inputs, targets = (torch.stack(column) for column in zip(*HELD_OUT[first : first + 2], strict=True))
        with torch.no_grad():
            sums, counts = losses(model(inputs), targets)
        total, number = total + float(sums.double().sum()), number + float(counts.double().sum())
    return total / number


def again(store: Store, step: int) -> None:
    """Commit the newest checkpoint's tensors once more, as a later step."""
    opened = open_checkpoint(store)
    specs = list(opened.specs.values())
    held: dict[str, bytearray] = {spec.key: bytearray() for spec in specs}
    for spec, _, part in Contents(opened).slabs(specs):
        held[spec.key] += part
    pieces = [Piece(spec=spec, box=spec.box, data=memoryview(held[spec.key])) for spec in specs]
    facts = {**opened.facts, "step": step}
    save_rank(store, step=step, made_in=1, attempt=0, rank=0, world=1, pieces=pieces, facts=facts)
    commit(store, step=step, made_in=1, attempt=0, committed_in=1, world=1)


def test_a_checkpoint_is_evaluated_once(made: tuple[Path, Tensors], script: str) -> None:
    """The number is that of the whole model; the second call, and a torn line, change nothing."""
    (line,), _ = evaluated(script, "--store", f"{made[0]}@latest")
    assert (line["step"], line["steps"]) == (2, 2)
    assert line["eval/loss"] == pytest.approx(loss_of(made[1]), rel=1e-6)
    with Path("evaluations.jsonl").open("a") as file:
        file.write('{"step": 3, "at": 1.0, "che')
    assert evaluated(script, "--store", f"{made[0]}@2")[0] == [line]
    assert Path("calls").read_text() == "2 1\n"
    first, torn = Path("evaluations.jsonl").read_text().splitlines()
    assert json.loads(first)["eval/loss"] == line["eval/loss"]
    with Results(Path("evaluations.jsonl"), line["store"]) as results:
        results.add("000000000004.00000001.0000.00000001", 4, 2.0, {"eval/loss": float("nan")})
    assert json.loads(Path("evaluations.jsonl").read_text().splitlines()[2])["eval/loss"] is None, torn


@pytest.mark.gloo
@pytest.mark.long
def test_ranks_beside_each_other_find_the_same_number(made: tuple[Path, Tensors], script: str) -> None:
    """To the last bit, though each holds a part of the model and runs a part of the data."""
    (one,), _ = evaluated(script, "--store", f"{made[0]}@latest", "--out", "one")
    (two,), _ = evaluated(script, "--store", f"{made[0]}@latest", "--out", "two", "--layout", "dp=2")
    assert one == two
    assert Path("calls").read_text() == "2 1\n2 2\n"


def test_what_is_verified_is_evaluated_as_it_comes(made: tuple[Path, Tensors], script: str, tmp_path: Path) -> None:
    """A live run's store: nothing is verified at first, and what is committed alone is none of it."""
    store = open_store(str(tmp_path / "live"))
    fence(store, 1)
    copy = open_store(str(made[0]))
    for entry in copy.entries(""):
        if not entry.name.startswith("refs/"):
            store.put(entry.name, copy.get(entry.name))
    commit(store, step=2, made_in=1, attempt=0, committed_in=1, world=1)

    def go_on() -> None:
        protection.mark_verified(store, "2")
        assert wait_until(lambda: Path("calls").exists(), 100.0)
        again(store, 3)
        again(store, 4)
        protection.mark_verified(store, "4")

    work = threading.Thread(target=go_on)
    work.start()
    lines, said = evaluated(
        script, "--store", store.url, "--follow", "--until-step", "4", "--every", "0.1s", "--tracker", "csv:curve.csv"
    )
    work.join()
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[0]["eval/loss"] == lines[1]["eval/loss"]
    rows = Path("curve.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "2", "4"]
    assert said.count("\n") <= 2
    assert evaluated(script, "--store", store.url, "--follow", "--until-step", "4") == ([], "")
    ref = read_ref(store)
    assert ref is not None
    assert not ref.pins
    assert not list(store.entries("announcements"))


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("fail", "ValueError: no such thing"),
        pytest.param("none", "does not say how it is evaluated", marks=pytest.mark.long),
        pytest.param("odd", "returned eval/loss as str", marks=pytest.mark.long),
        pytest.param("step", "this run evaluates a checkpoint and trains nothing", marks=pytest.mark.long),
    ],
)
def test_what_goes_wrong_is_said(made: tuple[Path, Tensors], script: str, word: str, wanted: str) -> None:
    """An error of the script's with its last lines; no function; no numbers; a step. Nothing is written for them."""
    assert wanted in evaluated(script, "--store", f"{made[0]}@latest", "--", word, code=1)[1]
    assert Path("evaluations.jsonl").read_text() == ""


def test_wrong_calls_are_said_at_once(made: tuple[Path, Tensors], script: str, tmp_path: Path) -> None:
    """Before any process is started."""

    def refused(*arguments: str) -> str:
        result = run.invoke(application(), ["eval", *arguments])
        assert isinstance(result.exception, UsageError), result.output
        return str(result.exception)

    url = str(made[0])
    assert "is not a script" in refused("nowhere.py", "--store", url)
    assert "stays where it is" in refused(script, "--store", f"{url}@2", "--follow")
    assert "give --follow too" in refused(script, "--store", url, "--until-step", "2")
    assert "no pipeline stages" in refused(script, "--store", url, "--layout", "pp=2")
    assert "no tracker is named" in refused(script, "--store", url, "--tracker", "paper:desk")
    with Results(tmp_path / "evaluations.jsonl", url):
        assert "another command writes it" in refused(script, "--store", url)
    wrong: list[Callable[[], object]] = [lambda: checked({}), lambda: checked({"step": 1.0}), lambda: checked([1.0])]
    for call in wrong:
        with pytest.raises(UsageError):
            call()
