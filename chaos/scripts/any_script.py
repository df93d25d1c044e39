"""Run a person's script as it is, but with its events and checkpoints elsewhere, and say the digest at its end.

    any_script.py STORE EVENTS OUT SCRIPT [ARGUMENT...]

Whatever store the script names is left alone. What it calls `elastic3d.run` with is passed on otherwise.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import elastic3d
from chaos.scripts import ASKED
from chaos.scripts.train_gpt import report


def main(store: str, events: str, out: str, script: str, *arguments: str) -> None:
    """Run `script` as `__main__`, with its own arguments and folder of modules."""
    run_as_given = elastic3d.run

    def run(script_main: Callable[[elastic3d.Run], None], **given: Any) -> None:
        if isinstance(given.get("layout"), elastic3d.Layout):
            _note_layout(given["layout"], Path(out))

        def with_digest(job: elastic3d.Run) -> None:
            script_main(job)
            report(job, Path(out))

        run_as_given(with_digest, **{**given, "store": store, "events": events})

    elastic3d.run = run  # type: ignore[assignment]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def _note_layout(asked: elastic3d.Layout, out: Path) -> None:
    """Leave what the script asks for in `out`, as every process of the job does at its start."""
    unfinished = out / f"{ASKED}.{os.getpid()}"
    unfinished.write_text(asked.request())
    unfinished.replace(out / ASKED)


if __name__ == "__main__":
    main(*sys.argv[1:])
