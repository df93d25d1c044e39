"""`elastic3d explain`: what went wrong in a generation, from etcd or from the files that its nodes left."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic3d.cli.job import JobOptions
from elastic3d.errors import JobUnknown, UsageError
from elastic3d.health.explanation import Explanation, Formed, explain, page
from elastic3d.health.meanings import TroubleKind
from elastic3d.health.past_verdicts import PastVerdict, event_verdict, place_of, read_bundles
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
    `elastic3d.run(events=...)` has all of it, and the evidence: stacks, /proc, and what each rank was at. Exit codes:
    0, 2 for a wrong call, 3 if there is no such job, 1 if nothing was found.

    Examples:

        elastic3d explain --id gpt-1b

        elastic3d explain 12 --events /data/gpt-1b/events

        elastic3d explain --json
    """
    explanation = _from_files(Path(events), generation) if events else _from_etcd(options, generation)
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


def _from_files(folder: Path, generation: int) -> Explanation | None:
    if not folder.is_dir():
        raise UsageError(
            f"--events {str(folder)!r}: there is no such folder; give the one that the script names in "
            "elastic3d.run(events=...)"
        )
    bundles, problems = read_bundles(folder)
    for problem in problems:
        print(f"elastic3d: {problem}", file=sys.stderr)
    of_events = filter(None, (event_verdict(str(line.get("event")), line) for line in _lines(folder)))
    verdict = _chosen([*(one.verdict for one in bundles), *of_events], generation)
    other = _newer(verdict, list(_troubles(folder)), generation, formed=_formed(folder))
    unbundled = verdict is None or verdict.kind is not VerdictKind.STUCK
    if verdict is None or unbundled or (other is not None and other.kind in set(TroubleKind)):
        return other
    mine = next((one for one in bundles if one.verdict == verdict), PastVerdict(verdict=verdict))
    return explain(verdict, formed=_formed(folder), stalls=mine.stalls, evidence=mine.evidence)


def _troubles(folder: Path) -> Iterator[Trouble]:
    """Yield what events tell of numbers, devices and state; several nodes may tell the same."""
    return distinct(
        Trouble(event=str(line["event"]), generation=int(line.get("generation", 0)), at=float(line["at"]), fields=line)
        for line in _lines(folder)
        if is_trouble(str(line.get("event")), line) and isinstance(line.get("at"), int | float)
    )


def _formed(folder: Path) -> list[Formed]:
    """Return the generations that any node's events tell of."""
    sealed = {int(line["number"]): line for line in _lines(folder) if line.get("event") == "generation.sealed"}
    formed: list[Formed] = []
    before: set[str] = set()
    for number, line in sorted(sealed.items()):
        nodes = {*line["nodes"], *(line.get("spares") or ())}
        formed.append(Formed(number=number, active=len(line["nodes"]), left=tuple(sorted(before - nodes))))
        before = nodes
    return formed


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # half a line, as after a crash
                if isinstance(line, dict):
                    yield line
