"""`elastic3d eval`: a script's evaluation of checkpoints, on any machine, while the run that makes them goes on."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from checkpointing import Store
from checkpointing.errors import CheckpointError, NoCheckpoint
from checkpointing.reading.announcing import reading
from checkpointing.reading.following import MOVING, Follower, is_away, place
from checkpointing.stores.address import split_name
from elastic3d.cli.ckpt.ending import ended_by_signals
from elastic3d.cli.ckpt.export_following import PATIENCE, LookEvery, UntilStep
from elastic3d.cli.ckpt.naming import choose
from elastic3d.cli.ckpt.place import KeyFile, StorePlace, complain
from elastic3d.cli.ckpt.telling import SCHEMA, plain
from elastic3d.clock import SYSTEM
from elastic3d.errors import Elastic3dError, StateError, UsageError
from elastic3d.evaluation.answering import EvaluationQuestion
from elastic3d.evaluation.asking import StoreAway, ask
from elastic3d.evaluation.results import Results
from elastic3d.quantities import some_seconds
from elastic3d.trackers.choice import Named, chosen
from elastic3d.values import Layout, StoreAt

OUT = "evaluations.jsonl"


def evaluate(
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [-- ARGUMENTS...]", help="It calls elastic3d.run(evaluate=...).")
    ],
    store: Annotated[
        str, typer.Option("--store", metavar="URL", help="The store, and which checkpoint: URL@verified, URL@1200.")
    ],
    follow: Annotated[bool, typer.Option("--follow", help="Evaluate each new one as it comes, until Ctrl-C.")] = False,
    until_step: UntilStep = None,
    every: LookEvery = "2s",
    output: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="A line for each; what has one is not evaluated again.")
    ] = Path(OUT),
    tracker: Annotated[
        list[str] | None,
        typer.Option("--tracker", metavar="KIND:PLACE", help="Also write curves there, as trackers= of a run does."),
    ] = None,
    layout: Annotated[
        str, typer.Option("--layout", help="Ranks on this machine: dp=4 shards the model, tp=2 cuts its layers.")
    ] = "dp=1",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.", show_default="as the script says")] = "",
    key_file: KeyFile = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Evaluate a run's checkpoints with the script that makes them, beside the run or after it.

    The script's `evaluate(run)` is called in fresh processes for each checkpoint: it makes the model with `run.shard`,
    calls `run.restore(model=model)`, and returns numbers by name. Weights alone are read, and no training data is
    needed. With `--follow` each that is found to be verified (`URL@latest`: each that is committed) is evaluated once,
    also over restarts; collections leave alone what is being read, and a store that does not answer is waited for. Exit
    code 1 if one could not be evaluated, 130 after Ctrl-C.

    Examples:

        elastic3d eval train.py --store s3://bucket/gpt-1b

        elastic3d eval train.py --store s3://bucket/gpt-1b@verified --follow --tracker tensorboard:runs/eval

        elastic3d eval train.py --store /data/run-7@1200 --layout dp=4 --json -- --width 1024
    """
    url, wanted = split_name(store)
    wanted = wanted or "verified"
    if follow and wanted not in MOVING:
        raise UsageError(f"--follow goes with {', '.join(MOVING)}: {wanted!r} stays where it is")
    if until_step is not None and not follow:
        raise UsageError("--until-step says when --follow ends; give --follow too")
    ranks = ranks_of(layout)
    seconds, trackers = some_seconds(every, "--every"), chosen(tracker or [])
    if not Path(script[0]).is_file():
        raise UsageError(f"{script[0]!r} is not a script: give a Python file that calls elastic3d.run")
    at = StorePlace(url=url, key_file=key_file)
    question = EvaluationQuestion(
        store=StoreAt(url=url, key=key_file, patience=PATIENCE),
        checkpoint="",
        answer="",
        parent=0,
        layout=ranks,
        device=device,
    )
    try:
        with ExitStack() as stack:
            opened = at.open(patience=PATIENCE)
            stack.enter_context(ended_by_signals(lambda: f"stopped; what was evaluated is in {output}"))
            results = stack.enter_context(Results(output, opened.url))
            evaluator = _Evaluator(opened, script, question, results, trackers, as_json=as_json)
            if follow:
                good = evaluator.follow(wanted, every=seconds, until_step=until_step)
            else:
                evaluator.evaluate(choose(opened, wanted).name)
                good = evaluator.written
    except (CheckpointError, OSError) as error:
        complain(error)
        raise typer.Exit(1) from None
    if not good:
        raise typer.Exit(1)


def ranks_of(text: str) -> Layout:
    """Return the layout of `--layout`; UsageError for one that only training has."""
    asked = Layout.parse(text)
    if asked.pp > 1:
        raise UsageError(f"--layout {text!r}: without training there are no pipeline stages; give dp or tp")
    return Layout(pp=1, dp=max(1, asked.dp), tp=max(1, asked.tp), zero=asked.zero or 3)


class _Evaluator:
    """Evaluates checkpoints one by one, and writes what came of each."""

    def __init__(
        self,
        store: Store,
        script: list[str],
        question: EvaluationQuestion,
        results: Results,
        trackers: tuple[Named, ...],
        *,
        as_json: bool,
    ) -> None:
        self._store, self._script, self._question, self._as_json = store, script, question, as_json
        self._results, self._trackers = results, trackers
        self.written = True
        """Whether all trackers have taken all points."""

    def follow(self, wanted: str, *, every: float, until_step: int | None) -> bool:
        """Evaluate each new checkpoint; return whether all were, when the last that was asked for has come."""
        good = True
        done = self._results.points
        follower = Follower(self._store, wanted, done=done, every=every, say=complain, sleep=SYSTEM.sleep)
        while until_step is None or not any(step >= until_step for step, _, _ in done.values()):
            name = follower.next()
            try:
                self.evaluate(name)
            except NoCheckpoint as error:
                complain(f"{name} is passed over, for it is gone: {error}")
            except (StateError, CheckpointError) as error:
                if isinstance(error, StoreAway) or is_away(error):
                    follower.away(error)
                    continue
                good = False
                complain(f"{name} could not be evaluated, and is passed over: {error}")
            follower.passed(name)
            if until_step is not None and place(name)[1] >= until_step:
                break
        return good and self.written

    def evaluate(self, name: str) -> None:
        """Evaluate one checkpoint, unless it was before; print and write what came of it."""
        known = self._results.points.get(name)
        if known is None:
            with reading(self._store, name, after=0) as opened:
                values = ask(self._script[0], self._script[1:], replace(self._question, checkpoint=opened.name))
            self._results.add(opened.name, opened.step, SYSTEM.wall(), values)
            known = self._results.points[name]
        step, _, values = known
        if self._as_json:
            head = {"schema": SCHEMA, "store": self._store.url, "checkpoint": name, "step": step}
            print(json.dumps({**head, **plain(values)}, allow_nan=False), flush=True)
        else:
            print(f"step {step}: " + ", ".join(f"{key} {value:.6g}" for key, value in values.items()), flush=True)
        for tracker in self._trackers:
            self._track(tracker)

    def _track(self, one: Named) -> None:
        """Have a tracker take all points that it does not have yet, in order of steps."""
        tracker = one.tracker
        try:
            position = tracker.open("evaluation", {"run": "evaluation", "store": self._store.url})
            newest = position.step if position is not None else -1
            for step, at, values in sorted(self._results.points.values(), key=lambda point: point[0]):
                if step > newest:
                    tracker.write(step, values, at)
                    newest = step
            tracker.flush()
        except (OSError, Elastic3dError) as error:
            self.written = False
            complain(f"{one.name} takes no points, and is tried again with the next: {error}")
        else:
            self.written = True
        finally:
            tracker.close()
