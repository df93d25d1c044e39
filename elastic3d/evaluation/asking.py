"""The command's side of an evaluation: the script's processes for one checkpoint, all gone when the answer is there."""

from __future__ import annotations

import json
import os
import select
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from elastic3d import environment, script_processes
from elastic3d.errors import StateError, UsageError
from elastic3d.evaluation.answering import EvaluationAnswer, EvaluationQuestion
from elastic3d.script_processes import ScriptProcess
from elastic3d.values import from_json, to_json


class StoreAway(StateError):
    """The store could not be reached by the processes that evaluate; it is asked again when it answers."""


def ask(script: str, arguments: Sequence[str], question: EvaluationQuestion) -> dict[str, float]:
    """Evaluate one checkpoint; return the numbers of the script.

    question: of rank 0, without the file for the answer and the port. StoreAway; StateError with the script's last
    lines for any other failure.
    """
    if not Path(script).is_file():
        raise UsageError(f"{script!r} is not a script: give a Python file that calls elastic3d.run")
    with tempfile.TemporaryDirectory(prefix="elastic3d-") as folder, _meeting(question.layout.world) as port:
        answer, said = Path(folder, "answer.json"), Path(folder, "said")
        whole = replace(question, answer=str(answer), parent=os.getpid(), port=port)
        processes: list[ScriptProcess] = []
        try:
            with said.open("wb") as output:
                for rank in range(question.layout.world):
                    mine = {environment.EVALUATED.name: json.dumps(to_json(replace(whole, rank=rank)))}
                    processes.append(script_processes.start(script, arguments, mine, output))
            codes = _wait(processes)
        finally:
            for process in processes:
                script_processes.end(process)
        if not answer.exists():
            how = script_processes.how_ended(next((code for code in codes if code), 0))
            last = script_processes.last_lines(said)
            raise StateError(f"{script} {how} before its evaluation was there.{last}")
        made = from_json(EvaluationAnswer, json.loads(answer.read_text()))
        if made.away:
            raise StoreAway(made.error)
        if made.values is None:
            raise StateError(made.error)
        return made.values


def _wait(processes: Sequence[ScriptProcess]) -> list[int]:
    """Wait until all have ended, or one of them badly; return the codes of those that have."""
    left = {os.pidfd_open(process.pid): process for process in processes}
    codes: list[int] = []
    try:
        while left and not any(codes):
            ready, _, _ = select.select(list(left), [], [])
            for descriptor in ready:
                codes.append(left.pop(descriptor).wait())
                os.close(descriptor)
    finally:
        for descriptor in left:
            os.close(descriptor)
    return codes


@contextmanager
def _meeting(world: int) -> Iterator[int]:
    """Yield the port where processes of this machine meet, 0 for one alone."""
    if world == 1:
        yield 0
        return
    from torch._C._distributed_c10d import TCPStore  # takes seconds, which one process alone need not wait

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store
