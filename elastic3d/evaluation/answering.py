"""The script's side of an evaluation: its `evaluate` function is called for one checkpoint, and the process ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointing.errors import CheckpointError
from elastic3d import environment
from elastic3d.errors import Elastic3dError, UsageError
from elastic3d.values import Layout, StoreAt, from_json

if TYPE_CHECKING:
    from checkpointing.stores.keys import Key
    from elastic3d.training.run import Run

Evaluation = Callable[["Run"], Mapping[str, float]]
"""A script's evaluation of the model of one checkpoint: numbers by name, the same on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationQuestion:
    """The question to one process of a script."""

    store: StoreAt
    """Where the checkpoint is."""
    checkpoint: str
    """Its name."""
    answer: str
    """File for the answer; only rank 0 writes it, unless it fails."""
    parent: int
    """The process that asks, with which this one ends."""
    layout: Layout
    """Of the processes that evaluate together."""
    rank: int = 0
    """Of this one."""
    port: int = 0
    """Where they meet on this machine, 0 for a single one."""
    device: str = ""
    """The kind of device, "" for what the script says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAnswer:
    """What came of it: the values, or why there are none."""

    values: dict[str, float] | None = None
    """By name; None where it failed."""
    error: str = ""
    """Why it failed."""
    away: bool = False
    """Whether that is because the store cannot be reached now."""


def answer_if_asked(evaluate: Evaluation | None, *, device: str, threads: int) -> None:
    """Answer the question in this process's environment and end the process; return if there is none."""
    text = environment.EVALUATED.take()
    if text is None:
        return
    from elastic3d.worker.processes.process import die_with_parent

    question = from_json(EvaluationQuestion, json.loads(text))
    die_with_parent(question.parent)
    code = 0
    try:
        answer = _answer(question, evaluate, device=question.device or device, threads=threads)
    except (Elastic3dError, CheckpointError) as error:
        from checkpointing.reading.following import is_away

        answer, code = EvaluationAnswer(error=str(error), away=is_away(error)), 1
    if question.rank == 0 or code:
        unfinished = Path(f"{question.answer}.{question.rank}")
        unfinished.write_text(json.dumps({"values": answer.values, "error": answer.error, "away": answer.away}))
        unfinished.replace(question.answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _answer(
    question: EvaluationQuestion, evaluate: Evaluation | None, *, device: str, threads: int
) -> EvaluationAnswer:
    from checkpointing import open_checkpoint, open_store
    from elastic3d import devices
    from elastic3d.training.evaluated import EvaluatedState
    from elastic3d.training.run import Run
    from elastic3d.training.standalone import StandalonePort

    if evaluate is None:
        raise UsageError(
            "the script does not say how it is evaluated: give elastic3d.run(main, evaluate=...) a function of the "
            "run, which makes the model with run.shard, calls run.restore(model=model), and returns numbers by name, "
            'such as {"eval/loss": run.evaluate(model, held_out, losses)}'
        )
    at = question.store
    store = open_store(at.url, write=False, key=_key(at.key), patience=at.patience)
    state = EvaluatedState(open_checkpoint(store, question.checkpoint))
    port = StandalonePort(threads=threads, device=devices.choose(device), slot=question.rank)
    port.assignment = replace(
        port.assignment,
        rank=question.rank,
        slot=question.rank,
        world=question.layout.world,
        layout=question.layout,
        store_host="127.0.0.1",
        store_port=question.port,
        store_prefix="evaluation",
        expects_state=True,
    )
    return EvaluationAnswer(values=checked(evaluate(Run(port, evaluated=state))))


def _key(file: str) -> Key | None:
    """Return the key of an encrypted store: in a file, or in the environment, as the command has it."""
    if not file and not environment.STORE_KEY.read():
        return None
    from checkpointing.stores.keys import Key  # imports cryptography, which only encrypted stores need

    return Key.from_file(file) if file else Key.from_env(environment.STORE_KEY.name)


def checked(values: Any) -> dict[str, float]:
    """Return what an evaluation returned; UsageError if it is not numbers by name."""
    if not isinstance(values, Mapping) or not values:
        raise UsageError(
            f"the script's evaluate= returned {type(values).__name__}: return a dictionary of numbers, such as "
            '{"eval/loss": 2.5}'
        )
    for name, value in values.items():
        if not isinstance(name, str) or not name or name in RESERVED:
            raise UsageError(f"the script's evaluate= returned a number named {name!r}: give it a name of its own")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"the script's evaluate= returned {name} as {type(value).__name__}: give a number")
    return {name: float(value) for name, value in values.items()}


RESERVED = ("schema", "step", "at", "checkpoint", "store")
"""What a line of results has besides."""
