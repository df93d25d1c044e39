"""The command line, the budget, and what is left of a stage that is ended at its limit."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import chaos.gpu.__main__ as command_line
from chaos.gpu import needs
from chaos.gpu.__main__ import main, parser, read
from chaos.gpu.catalogue import BY_VALUE, SHORTEST, SMALL_LIMIT, STAGES, Stage, chosen
from chaos.gpu.running import MARK, run_stage
from chaos.machine.processes import marked
from tests.paths import ROOT


def test_stages_are_taken_in_the_order_asked_for() -> None:
    """Any case, each once."""
    assert [stage.name for stage in chosen("p6, P0,P6")] == ["P6", "P0"]
    assert sorted(stage.name for stage in chosen(BY_VALUE)) == [stage.name for stage in STAGES]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stages", "P9"], "give some of P0, P1"),
        (["--stages", ","], "give some of P0, P1"),
        (["--budget", "0"], "give seconds, 1 or more"),
        (["--budget", "soon"], "give seconds, 1 or more"),
        (["--device", "tpu"], "invalid choice"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2, before anything is started."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_list_and_help_name_every_stage_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Without touching torch or a device."""
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{stage.name} " in listed for stage in STAGES)
    assert "python -m chaos.gpu --device cpu --size small" in parser().format_help()


def test_no_stage_gets_more_than_is_left_of_the_budget() -> None:
    """And none is started for a moment."""
    (stage,) = chosen("P6")
    assert stage.limit("full", 1000.0) == stage.seconds
    assert stage.limit("full", 100.0) == 100.0
    assert stage.limit("small", 1000.0) == SMALL_LIMIT
    assert stage.limit("full", 4.0) == 0.0


def test_what_is_missing_is_said_before_anything_of_ours_is_imported(tmp_path: Path) -> None:
    """On an interpreter without any package: one line with what to do."""
    bare = [sys.executable, "-S", "-m", "chaos.gpu", "--out", str(tmp_path / "out")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(bare, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "missing here: torch numpy grpcio" in done.stderr
    assert "--no-index --find-links wheels" in done.stderr
    assert not (tmp_path / "out").exists()


def test_elastic3d_registers_for_torchrun_where_it_is_not_installed(tmp_path: Path) -> None:
    """An entry point in a folder on the path is all that torchrun looks for."""
    needs.register_in(tmp_path)
    ask = "import importlib.metadata as m; print([p.load().__module__ for p in m.entry_points(name='etcd-v3')])"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    said = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, timeout=60)
    assert "elastic3d.rendezvous.registration" in said.stdout, said.stderr


SPEAKS_THEN_HANGS = """\
import os, sys, time
print('{"figure": "one"}', flush=True)
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
print('{"figure": "two"}', flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize(("sleeps", "how"), [("600", "over its limit"), ("0", "ok")])
def test_a_stage_leaves_what_it_had_said_and_no_process(tmp_path: Path, sleeps: str, how: str) -> None:
    """Neither at its limit nor at its own end, a child in a session of its own included."""
    lines: list[str] = []
    mark = f"test-{os.getpid()}-{sleeps}"
    with (tmp_path / "log").open("wb") as log:
        ended = run_stage(
            [sys.executable, "-c", SPEAKS_THEN_HANGS, sleeps],
            limit=6.0 if sleeps == "600" else 60.0,
            mark=mark,
            environment=dict(os.environ),
            take=lines.append,
            log=log,
        )
    assert ended.how == how
    assert lines == ['{"figure": "one"}', '{"figure": "two"}']
    assert bool(ended.left) == (how == "ok")
    assert not marked(mark, MARK)


def test_the_rest_goes_on_where_a_stage_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is killed at its limit, one dies, one is whole; there is no time for the last."""
    scripts = {
        "P1": """print('{"figure": "one", "value": 1}', flush=True); import time; time.sleep(600)""",
        "P2": "import sys; sys.exit(3)",
        "P3": """print('{"figure": "two", "value": 2}')""",
    }

    def script(stage: Stage, *given: object, deadline: float) -> list[str]:
        return [sys.executable, "-c", scripts[stage.name]]

    monkeypatch.setattr(command_line, "command", script)
    limits = {"P1": 8.0, "P2": 60.0, "P3": 60.0}
    stages = [dataclasses.replace(stage, seconds=limits[stage.name]) for stage in chosen("P1,P2,P3")]
    options = parser().parse_args(["--device", "cpu", "--budget", "600", "--out", str(tmp_path / "out")])
    options.stages = [*stages, dataclasses.replace(stages[0], name="P4", seconds=SHORTEST / 2)]
    assert command_line.run(options, needs.TorchFacts(torch="2.11.0")) == 1
    lines = read(tmp_path / "out" / "figures.jsonl")
    assert [line["figure"] for line in lines if "figure" in line] == ["one", "two"]
    assert [line["ended"] for line in lines if "ended" in line] == [
        "over its limit",
        "ended with 3",
        "ok",
        "not begun: the budget is spent",
    ]
    assert "equal bits" in (tmp_path / "out" / "gates.txt").read_text()


def test_a_stage_that_dies_says_so(tmp_path: Path) -> None:
    """By its exit code; a last line without an end is passed on."""
    lines: list[str] = []
    with (tmp_path / "log").open("wb") as log:
        ended = run_stage(
            [sys.executable, "-c", "import os; print('half', end='', flush=True); os.kill(os.getpid(), 9)"],
            limit=60.0,
            mark=f"test-{os.getpid()}-dies",
            environment=dict(os.environ),
            take=lines.append,
            log=log,
        )
    assert (ended.how, lines) == (f"ended with {-signal.SIGKILL}", ["half"])


@pytest.mark.long
@pytest.mark.gloo
@pytest.mark.timeout(900)
def test_all_stages_but_the_last_run_on_the_emulated_device(tmp_path: Path) -> None:
    """At the small size: each ends by itself, none of its figures fails, and all bits are equal."""
    out = tmp_path / "out"
    stages = ",".join(stage.name for stage in STAGES[:-1])
    command = [sys.executable, "-m", "chaos.gpu", "--device", "emulated", "--size", "small", "--stages", stages]
    done = subprocess.run([*command, "--budget", "800", "--out", str(out)], cwd=ROOT, capture_output=True, text=True)
    lines = read(out / "figures.jsonl")
    log = (out / "stages.log").read_text()
    assert [line for line in lines if "error" in line or "garbled" in line] == [], log
    assert {line["stage"]: line["ended"] for line in lines if "ended" in line} == dict.fromkeys(stages.split(","), "ok")
    assert all(line["device"] == "emulated" and line["size"] == "small" for line in lines if "figure" in line)
    printed = [json.loads(text) for text in done.stdout.splitlines()]
    assert [line for line in printed if "gate" not in line] == lines
    verdicts = {line["gate"]: line["verdict"] for line in printed if "gate" in line}
    assert verdicts.pop("equal bits") == "pass"
    assert set(verdicts.values()) == {"not measured"}
    late = {line["figure"]: line["value"] for line in lines if line.get("figure", "").startswith("late_work")}
    assert late["late_work"] == 0
    assert late["late_work_control"] > 0
    assert done.returncode == 0, done.stderr
