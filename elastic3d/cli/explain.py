"""`elastic3d explain`: what went wrong in a generation, from etcd or from the files that its nodes left."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic3d.cli.events_folder import event_files, no_run, others_said
from elastic3d.cli.job import JobOptions
from elastic3d.errors import JobUnknown, UsageError
from elastic3d.health.explanation import Explanation, Formed, explain, page
from elastic3d.health.meanings import TroubleKind
from elastic3d.health.past_verdicts import EVENTS_OF_VERDICTS, PastVerdict, event_verdict, place_of, read_bundles
from elastic3d.health.trouble import Trouble, distinct, explain_trouble, is_trouble, newest, trouble_page
from elastic3d.membership.inspection.keys import RunKeys, find
from elastic3d.membership.records import GenerationHistory
from elastic3d.membership.stalls import Verdict, VerdictKind
from elastic3d.values import Cause, to_json

SCHEMA = 1


def explain_job(
    options: JobOptions,
    generation: Annotated[
        int,
        typer.Argument(min=0, metavar="[N]", help="The generation. Default: the newest with any trouble."),
    ] = 0,
    events: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Read what nodes left there (`events=`), and ask no etcd.",
            show_default=False,
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Explain what went wrong in a job: who is at fault and why, what was done, and what to do now.

    Ranks that stood still, were slow or ran out of memory, devices that compute wrongly, bits that changed in memory,
    samples that were left out, a loss that jumped up. etcd has what was found about the last 200 generations, and of
    numbers and devices only which nodes were set aside, and where the run went back. The folder of
    `elastic3d.run(events=...)` has all of it, and the evidence: stacks, /proc, and what each rank was at. Where several
    runs wrote to it, events are those of the one that wrote last, or that `--id` names; evidence is of all. Exit codes:
    0, 2 for a wrong call, 3 if there is no such job, 1 if nothing was found.

    Examples:

        elastic3d explain --id gpt-1b

        elastic3d explain 12 --events /data/gpt-1b/events

        elastic3d explain --json
    """
    explanation = _from_files(Path(events), options.id, generation) if events else _from_etcd(options, generation)
    if explanation is None:
        which = f"generation {generation}" if generation else "any generation"
        print(f"nothing was found about {which}: no rank held others up, and no numbers were wrong, as far as is known")
        if not events:
            print("where nobody was set aside for it, only the events know what was wrong: --events FOLDER reads them")
        raise typer.Exit(1)
    if as_json:
        print(json.dumps({"schema": SCHEMA, **to_json(explanation)}, indent=2))
    elif explanation.kind in set(TroubleKind):
        print(trouble_page(explanation))
    else:
        print(page(explanation))


def _from_etcd(options: JobOptions, generation: int) -> Explanation | None:
    with options.connect() as (client, job):
        items, _ = client.range(job.root)
    if not items:
        raise JobUnknown(f"job {job.run_id!r} is gone: nothing stands under {job.root} any more")
    run_keys = find(job.root, items)
    verdict = _chosen(run_keys.verdicts.values(), generation)
    formed = formed_in(run_keys)
    ended = run_keys.end.detail if run_keys.end is not None and run_keys.end.failed else ""
    troubles = troubles_in(run_keys)
    return _newer(verdict, troubles, generation, formed=formed, ended=ended)


def formed_in(run_keys: RunKeys) -> list[Formed]:
    """Return the generations of a job, as its history in etcd has them."""
    rows = sorted(run_keys.history.values(), key=lambda one: (one.number, one.attempt))
    return [Formed(number=one.number, active=one.active, left=one.left) for one in rows]


def troubles_in(run_keys: RunKeys) -> list[Trouble]:
    """Return what ended generations of a job though no rank stood still, as its history in etcd has it."""
    return [_ended_by(one) for one in run_keys.history.values() if one.cause in _ENDED_BY]


_ENDED_BY = {Cause.SPIKE: "run.rolled_back", Cause.LYING: "node.lying"}


def _ended_by(history: GenerationHistory) -> Trouble:
    """Return for what the generation before this one ended, as its history tells it."""
    named, _, detail = history.detail.partition(": ")
    lying = history.cause is Cause.LYING
    fields = {"detail": detail if lying else history.detail, "nodes": named.split(", ") if lying else []}
    return Trouble(event=_ENDED_BY[history.cause], generation=history.number - 1, at=history.at, fields=fields)


def _newer(
    verdict: Verdict | None, troubles: list[Trouble], generation: int, *, formed: list[Formed], ended: str = ""
) -> Explanation | None:
    """Return the explanation of a verdict, or of the trouble in a newer generation."""
    trouble = newest(troubles, generation)
    if trouble is None:
        return None if verdict is None else explain(verdict, formed=formed, ended=ended)
    if verdict is not None and place_of(verdict)[0] >= trouble.generation:
        return explain(verdict, formed=formed, ended=ended)
    return explain_trouble(trouble, troubles, formed=formed, ended=ended)


def _chosen(verdicts: Any, generation: int) -> Verdict | None:
    """Return the newest verdict, or the newest on one generation; those that had something done before others."""
    fitting = [verdict for verdict in verdicts if generation in (0, place_of(verdict)[0])]
    return max(fitting, key=lambda verdict: (*place_of(verdict), verdict.act), default=None)


_SEALED = "generation.sealed"


def _from_files(folder: Path, run_id: str, generation: int) -> Explanation | None:
    if not folder.is_dir():
        raise UsageError(
            f"--events {str(folder)!r}: there is no such folder; give the one that the script names in "
            "elastic3d.run(events=...)"
        )
    bundles, problems = read_bundles(folder)
    for problem in problems:
        print(f"elastic3d: {problem}", file=sys.stderr)
    lines = _lines(folder, run_id)
    formed = _formed(lines)
    of_events = filter(None, (event_verdict(str(line.get("event")), line) for line in lines))
    verdict = _chosen([*(one.verdict for one in bundles), *of_events], generation)
    other = _newer(verdict, list(_troubles(lines)), generation, formed=formed)
    unbundled = verdict is None or verdict.kind is not VerdictKind.STUCK
    if verdict is None or unbundled or (other is not None and other.kind in set(TroubleKind)):
        return other
    mine = next((one for one in bundles if one.verdict == verdict), PastVerdict(verdict=verdict))
    return explain(verdict, formed=formed, stalls=mine.stalls, evidence=mine.evidence)


def _troubles(lines: list[dict[str, Any]]) -> Iterator[Trouble]:
    """Yield what events tell of numbers, devices and state; several nodes may tell the same."""
    return distinct(
        Trouble(event=str(line["event"]), generation=int(line.get("generation", 0)), at=float(line["at"]), fields=line)
        for line in lines
        if is_trouble(str(line.get("event")), line) and isinstance(line.get("at"), int | float)
    )


def _formed(lines: list[dict[str, Any]]) -> list[Formed]:
    """Return the generations that any node's events tell of."""
    sealed = {int(line["number"]): line for line in lines if line.get("event") == _SEALED}
    formed: list[Formed] = []
    before: set[str] = set()
    for number, line in sorted(sealed.items()):
        nodes = {*line["nodes"], *(line.get("spares") or ())}
        formed.append(Formed(number=number, active=len(line["nodes"]), left=tuple(sorted(before - nodes))))
        before = nodes
    return formed


def _lines(folder: Path, run_id: str) -> list[dict[str, Any]]:
    """Return what a run's events tell of verdicts, trouble and generations.

    It is the run that wrote last, unless it is named.
    """
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    newest: dict[str, float] = defaultdict(float)
    for path in event_files(folder):
        with path.open(errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # half a line, as after a crash
                if not isinstance(line, dict):
                    continue
                run, at, event = str(line.get("run") or ""), line.get("at"), str(line.get("event"))
                newest[run] = max(newest[run], at if isinstance(at, int | float) else 0)
                if event == _SEALED or event in EVENTS_OF_VERDICTS or is_trouble(event, line):
                    runs[run].append(line)
    if not newest:
        return []
    chosen = run_id or max(newest, key=lambda name: newest[name])
    if chosen not in newest:
        raise no_run(chosen, folder, newest)
    if others := sorted(newest.keys() - {chosen}):
        print(f"elastic3d: {others_said(others)}", file=sys.stderr)
    return runs[chosen]
