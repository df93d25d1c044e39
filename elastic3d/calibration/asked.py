"""A script that is asked about its model instead of being trained: the side of the script.

The command line runs the user's script with a question in its environment. When the script calls `elastic3d.run`, its
`main` is gone through on meta up to `run.restore`, the answer is written where the question says, and the process ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from elastic3d import environment
from elastic3d.calibration.block import time_block
from elastic3d.port import Assignment
from elastic3d.training.run import Run
from elastic3d.training.standalone import StandalonePort
from elastic3d.values import ModelProfile, from_json, to_json
from elastic3d.worker.process import die_with_parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question to a script. answer: file for the answer. parent: process that asks, with which the script dies.

    blocks: also run one of the model's blocks on `device` and time it, in at most `seconds`.
    """

    answer: str
    parent: int
    blocks: bool = False
    device: str = "cpu"
    seconds: float = 10.0


class _Told(BaseException):
    """Carries the profile out of the user's `main`, past what it catches."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile


class _Listening(StandalonePort):
    """A port that wants the profile and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        own = self.assignment
        fields = {name: getattr(own, name) for name in own.__dataclass_fields__}
        self.assignment = Assignment(**fields | {"measuring": True, "layout": None})

    def measured(self, profile: ModelProfile) -> NoReturn:
        """Leave `main` with the profile."""
        raise _Told(profile)


def answer_if_asked(main: Callable[[Run], None]) -> None:
    """Answer the question in this process's environment and end it; return where there is none."""
    text = environment.ASKED.take()
    if text is None:
        return
    asked = from_json(Asked, json.loads(text))
    die_with_parent(asked.parent)
    run = Run(_Listening())
    try:
        main(run)
    except _Told as told:
        profile = told.profile
    else:
        sys.exit("main returned without calling run.restore, which is where its model is known")
    answer = {"profile": to_json(profile)}
    if asked.blocks:
        plan, batches = run._plan, run._batches
        assert plan is not None
        assert batches is not None
        example = batches.example()[0]
        answer["block"] = to_json(time_block(plan, profile, example, device=asked.device, seconds=asked.seconds))
    unfinished = Path(f"{asked.answer}.part")
    unfinished.write_text(json.dumps(answer))
    unfinished.replace(asked.answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
