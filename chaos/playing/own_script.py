"""A job of anybody's script, and the run of it that nothing happens to.

The script is any that calls `elastic3d.run`, or any at all, which torchrun restarts (`RESTART`). How many steps it
makes and of how many samples is known from the undisturbed run, which is kept in a folder: another schedule of the same
script is compared with the same run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from chaos.history.claims import Accusation
from chaos.history.follow import Picture, Step
from chaos.playing.outcome import Outcome
from chaos.playing.setting import RESTART, Setting
from chaos.storms.folders import in_words
from elastic3d.errors import UsageError
from elastic3d.values import Layout, from_json, to_json

ANY_SCRIPT = Path(__file__).parents[1] / "scripts" / "any_script.py"
PLACES = ("seed", "out", "events", "store")
"""What `{...}` in an argument of a script may stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSetting(Setting):
    """A job of a script. target: its file. given: its arguments, in which {seed}, {out} and such are filled in.

    ends: steps, each with the position after its last sample. steps is 0, and ends empty, until the undisturbed run has
    shown them.
    """

    target: Path
    given: tuple[str, ...] = ()
    steps: int = 0
    ends: tuple[tuple[int, int], ...] = ()
    script: Path = ANY_SCRIPT

    def arguments(self, *, store: str, events: Path, out: Path) -> tuple[str, ...]:
        """Return the arguments of what runs the script, and the script's own after them; these alone if it is any."""
        places = {"seed": str(self.seed), "out": str(out), "events": str(events), "store": store}
        given = tuple(filled(one, places) for one in self.given)
        return (store, str(events), str(out), str(self.target), *given) if self.resident else given

    def consumed(self, step: int) -> int:
        """Return the samples of the steps up to one: a script may have its batch grow."""
        return max((end for number, end in self.ends if number <= step), default=0)


def filled(argument: str, places: Mapping[str, str]) -> str:
    """Return an argument with what its braces stand for; braces around anything else are left."""
    for name, value in places.items():
        argument = argument.replace(f"{{{name}}}", value)
    return argument


def known_steps(setting: ScriptSetting, quiet: Outcome) -> ScriptSetting:
    """Return the setting with what its undisturbed run has shown; UsageError where it has made no step.

    A script that torchrun restarts need not tell its steps.
    """
    steps = quiet.picture.steps
    if not steps and not setting.resident:
        return setting
    if not steps:
        raise UsageError(
            f"{setting.target.name}: it made no step, so nothing can happen to it"
            + (f"; {quiet.failure}" if quiet.failure else "; does it call elastic3d.run and run.step?")
        )
    ends = tuple((step.number, step.samples[1]) for step in steps)
    return replace(setting, steps=quiet.picture.step, ends=ends)


def quiet_key(setting: ScriptSetting) -> str:
    """Return what an undisturbed run is kept by: all that its bits depend on, and nothing of how it is laid out."""
    # It brings torch, for which nobody waits who only looks at the help.
    import torch

    from elastic3d.devices.cpu import processor

    facts = {
        "script": blake3(setting.target.read_bytes()).hexdigest(),
        "beside": _beside(setting.target),
        "named": _named(setting.given),
        "given": setting.given,
        "seed": setting.seed,
        **({} if setting.resident else {"mode": RESTART}),
        **({"steps": setting.step_pattern} if setting.step_pattern else {}),
        "sources": _sources(),
        "torch": torch.__version__,
        "python": sys.version,
        "machine": (platform.machine(), processor()),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }
    return blake3(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _beside(script: Path) -> str:
    """Return the digest of the Python files that a script finds beside it, and in packages there.

    A folder of Python files is a package without an `__init__.py` too.
    """
    files, folders = blake3(), [script.parent]
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.suffix == ".py" and path.is_file():
                files.update(f"{path.relative_to(script.parent)}\0".encode())
                with contextlib.suppress(PermissionError):
                    files.update(path.read_bytes())
            elif path.name.isidentifier() and not path.is_symlink() and any(path.glob("*.py")):
                folders.append(path)
    return files.hexdigest()


def _named(arguments: Iterable[str]) -> list[tuple[int, int]]:
    """Return the size and the time of each file that arguments name, as `settings.yaml` or `--config=settings.yaml`."""
    values = (one.partition("=")[2] if one.startswith("-") else one for one in arguments)
    stats = [os.stat(value) for value in values if os.path.isfile(value)]
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


@functools.cache
def _sources() -> str:
    """Return the digest of all code of ours that takes part in a run."""
    import checkpointing
    import elastic3d

    sources = blake3()
    for folder in (Path(elastic3d.__file__).parent, Path(checkpointing.__file__).parent, ANY_SCRIPT.parent):
        for path in sorted(folder.rglob("*.py")):
            sources.update(path.read_bytes())
    return sources.hexdigest()


def quiet_run(setting: ScriptSetting, folder: Path, play: Callable[[], Outcome]) -> Outcome:
    """Return the undisturbed run of `setting` that is kept in `folder`; where there is none, `play` it and keep it.

    One that failed is not kept. UsageError where the folder cannot be written.
    """
    kept = folder / f"quiet-{quiet_key(setting)}.json"
    try:
        return _read(setting, json.loads(kept.read_text()))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    outcome = play()
    if sound(outcome):
        # Another run of the same job may keep it at the same time.
        unfinished = kept.with_suffix(f".{uuid.uuid4().hex}.part")
        with in_words(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.write_text(json.dumps(_written(outcome)))
                os.replace(unfinished, kept)
            finally:
                unfinished.unlink(missing_ok=True)
    return outcome


def sound(outcome: Outcome) -> bool:
    """Return whether an undisturbed run has come to its end on all nodes; `elastic3d.run` leaves a digest then."""
    if outcome.failure or any(outcome.exit_codes.values()):
        return False
    return outcome.digest is not None or not outcome.setting.resident


def _written(outcome: Outcome) -> dict[str, Any]:
    return {
        "digest": outcome.digest,
        "steps": [to_json(step) for step in outcome.picture.steps],
        "accused": [to_json(one) for one in outcome.picture.accused],
        "checkpoints": list(outcome.picture.checkpoints),
        "asked": None if outcome.asked is None else outcome.asked.request(),
    }


def _read(setting: ScriptSetting, kept: dict[str, Any]) -> Outcome:
    # Pairs of positions are tuples, which JSON does not have.
    steps = [
        Step(
            **{
                **one,
                "samples": tuple(one["samples"]),
                "excluded": tuple((first, stop) for first, stop in one["excluded"]),
            }
        )
        for one in kept["steps"]
    ]
    return Outcome(
        setting=setting,
        faults=(),
        picture=Picture(
            steps=tuple(steps),
            checkpoints=tuple(kept["checkpoints"]),
            accused=tuple(from_json(Accusation, one) for one in kept.get("accused", ())),
        ),
        digest=None if kept["digest"] is None else str(kept["digest"]),
        exit_codes={},
        killed=(),
        undone=(),
        leftovers=(),
        asked=None if kept["asked"] is None else Layout.parse(kept["asked"]),
    )
