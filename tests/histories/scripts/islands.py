"""Train an island: the model of the tests' worlds of islands, in a job of real processes.

Arguments: the folder of everything, the island's name, the least number of islands, seconds before each step, and with
how many steps an exchange overlaps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import elastic3d
from elastic3d.training import Run
from tests.islands import mains

FOLDER, NAME, MINIMUM, PAUSE = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
OVERLAP = int(sys.argv[5])
ROUNDS = 8


def main(run: Run) -> None:
    """Train; entered once per generation."""
    digests = mains.train(run, steps=ROUNDS * mains.EVERY, pause=PAUSE)
    if run.is_first:
        (FOLDER / f"{NAME}.json").write_text(json.dumps(digests))


if __name__ == "__main__":
    elastic3d.run(
        main,
        store=FOLDER / f"store-{NAME}",
        events=FOLDER / f"events-{NAME}",
        islands=elastic3d.Islands(
            store=FOLDER / "between",
            name=NAME,
            every=mains.EVERY,
            overlap=OVERLAP,
            minimum=MINIMUM,
            patience=20,
            longest="3m",
            keep=None,
        ),
    )
