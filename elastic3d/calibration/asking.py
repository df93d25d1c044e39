"""A script that is asked about its model instead of being trained: the side of the command line.

The script runs in a process group of its own, which is gone when this returns, whatever happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic3d import environment
from elastic3d.calibration.record import BlockTimes
from elastic3d.errors import Elastic3dError, UsageError
from elastic3d.values import ModelProfile, from_json, to_json

LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptAnswer:
    """What a script says of its model: the profile, and the times of one block where they were asked for."""

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
    """Run a script up to `run.restore` and return what it says; nothing is trained, and no cluster is needed.

    limit: seconds the script may take. blocks: also time one block, for at most `seconds`, on `device`.
    UsageError for a script that is not there, fails, or never calls `elastic3d.run`.
    """
    if not Path(script).is_file():
        raise UsageError(f"{script!r} is no script: give a Python file that calls elastic3d.run, or --model NAME")
    with tempfile.TemporaryDirectory(prefix="elastic3d-") as folder:
        answer, said = Path(folder, "answer.json"), Path(folder, "said")
        asked = {
            "answer": str(answer),
            "parent": os.getpid(),
            "blocks": blocks,
            "device": device,
            "seconds": seconds,
        }
        variables = {
            **os.environ,
            environment.ASKED.name: json.dumps(to_json(asked)),
            environment.THREADS.name: environment.THREADS.read(),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, script, *arguments],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                raise Elastic3dError(
                    f"{script} did not reach run.restore within {limit:.0f} s: does it build or load something large "
                    f"before? Give it longer with --timeout.{_tail(said)}"
                ) from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not answer.exists():
            how = f"ended with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
            if code == 0:
                how = "ended without calling elastic3d.run"
            raise UsageError(f"{script} {how} before its model was known.{_tail(said)}")
        return from_json(ScriptAnswer, json.loads(answer.read_text()))


def _tail(said: Path) -> str:
    lines = said.read_text(errors="replace").strip().splitlines()[-LINES:]
    return "\nIt said last:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
