"""A script that is asked about its model instead of being trained.

The command line (`ask`) runs the user's script with a question in its environment, in its own process group, which is
gone when the answer is there, whatever happened. When the script calls `elastic3d.run` (`answer_if_asked`), its `main`
runs on meta up to `run.restore`, the answer is written where the question says, and the process ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from elastic3d import environment, script_processes
from elastic3d.calibration.record import BlockTimes
from elastic3d.errors import CalibrationFailed, UsageError
from elastic3d.values import ModelProfile, from_json, to_json

if TYPE_CHECKING:
    from elastic3d.training.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptQuestion:
    """The question to a script."""

    answer: str
    """File for the answer."""
    parent: int
    """The process that asks, with which the script dies."""
    blocks: bool = False
    """Also run one of the model's blocks and time it."""
    device: str = "cpu"
    """Where the block runs."""
    seconds: float = 10.0
    """Most time spent on the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptAnswer:
    """A script's answer about its model: the profile, and the times of one block if they were asked for."""

    profile: ModelProfile
    block: BlockTimes | None = None


def ask(
    script: str,
    arguments: Sequence[str] = (),
    *,
    limit: float,
    blocks: bool = False,
    device: str = "cpu",
    seconds: float = 10.0,
) -> ScriptAnswer:
    """Run a script up to `run.restore` and return its answer; nothing is trained, and no cluster is needed.

    limit: seconds the script may take. blocks: also time one block, for at most `seconds`, on `device`.
    UsageError for a script that is not there, fails, or never calls `elastic3d.run`.
    """
    if not Path(script).is_file():
        raise UsageError(f"{script!r} is not a script: give a Python file that calls elastic3d.run, or --model NAME")
    with tempfile.TemporaryDirectory(prefix="elastic3d-") as folder:
        answer, said = Path(folder, "answer.json"), Path(folder, "said")
        question = ScriptQuestion(answer=str(answer), parent=os.getpid(), blocks=blocks, device=device, seconds=seconds)
        asked = {environment.ASKED.name: json.dumps(to_json(question))}
        with said.open("wb") as output:
            process = script_processes.start(script, arguments, asked, output)
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                raise CalibrationFailed(
                    f"{script} did not reach run.restore within {limit:.0f} s: does it build or load something large "
                    f"before? Give it longer with --timeout.{script_processes.last_lines(said)}"
                ) from None
            finally:
                script_processes.end(process)
        if not answer.exists():
            how = script_processes.how_ended(code)
            raise UsageError(f"{script} {how} before its model was known.{script_processes.last_lines(said)}")
        return from_json(ScriptAnswer, json.loads(answer.read_text()))


class _ProfileMade(BaseException):
    """Carries the profile out of the user's `main`, past its except clauses."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile


def answer_if_asked(main: Callable[[Run], None]) -> None:
    """Answer the question in this process's environment and end the process; return if there is none."""
    text = environment.ASKED.take()
    if text is None:
        return
    # Only the script needs torch; the command line asks without it.
    from elastic3d.calibration.block import time_block
    from elastic3d.training.run import Run
    from elastic3d.training.standalone import StandalonePort
    from elastic3d.worker.processes.process import die_with_parent

    question = from_json(ScriptQuestion, json.loads(text))
    die_with_parent(question.parent)
    run = Run(StandalonePort(measured=_leave_main))
    try:
        main(run)
    except _ProfileMade as made:
        profile = made.profile
    else:
        sys.exit("main returned without calling run.restore, which is where its model is known")
    answer = {"profile": to_json(profile)}
    if question.blocks:
        plan, batches = run._plan, run._batches
        assert plan is not None
        assert batches is not None
        example = batches.example()[0]
        answer["block"] = to_json(time_block(plan, profile, example, device=question.device, seconds=question.seconds))
    unfinished = Path(f"{question.answer}.part")
    unfinished.write_text(json.dumps(answer))
    unfinished.replace(question.answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _leave_main(profile: ModelProfile) -> NoReturn:
    raise _ProfileMade(profile)
