"""`elastic3d status` and `elastic3d events`: how a live job stands, and why each generation came to be."""

from __future__ import annotations

import json
import queue
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from elastic3d import etcd_keys as keys
from elastic3d.cli import render
from elastic3d.cli.job import JobOptions
from elastic3d.clock import SYSTEM
from elastic3d.etcd import Changes, Delivery, Disconnected, Ended, Snapshot, Watch
from elastic3d.membership.inspection.database import fullness
from elastic3d.membership.inspection.jobs import read_status
from elastic3d.membership.inspection.keys import history
from elastic3d.membership.inspection.status import Status
from elastic3d.membership.records import GenerationHistory
from elastic3d.values import to_json

SCHEMA = 1

_Json = Annotated[bool, typer.Option("--json", help="Print JSON: one document, or one per line while following.")]


def status(
    options: JobOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the state of a live job: its generation, nodes and spares, and which nodes are kept out and why.

    Everything is read from etcd at one revision; the nodes are not asked. Step, snapshot and checkpoint are as each
    node last reported, every 5 s or more; `elastic3d top` goes on showing it. Exit codes: 0, 2 for a wrong call, 3 if
    there is no such job, 1 for the rest.

    Examples:

        elastic3d status --endpoint e1:2379,e2:2379 --id gpt-1b

        elastic3d status --json
    """
    with options.connect() as (client, job):
        seen = read_status(client, job)
        if as_json:
            print(json.dumps(document(seen), indent=2))
        else:
            console = Console()
            console.print(render.picture(seen, console.width))
        _complain(fullness(client.database_size()))


def events(
    options: JobOptions,
    number: Annotated[int, typer.Option("-n", min=1, help="At most this many, the newest.")] = 20,
    as_json: _Json = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones, until Ctrl-C.")] = False,
) -> None:
    """Show why each generation of a job came to be, newest last.

    Times are by the leader's clock. etcd keeps the last 200 generations, even after the job's end.

    Examples:

        elastic3d events --id gpt-1b

        elastic3d events -n 5 --json

        elastic3d events --follow
    """
    if follow:
        try:
            _follow(options, number, as_json)
        except KeyboardInterrupt:
            return
        return
    with options.connect() as (client, job):
        histories, problems = history(job.root, client.range(job.root + keys.HISTORY)[0])
    histories = histories[-number:]
    if as_json:
        print(json.dumps({"schema": SCHEMA, "run_id": job.run_id, "generations": to_json(histories)}, indent=2))
    elif not histories:
        print(f"{job.run_id}: no generation was sealed yet")
    else:
        console = Console()
        console.print(render.generations(histories, SYSTEM.wall(), console.width))
    _complain(problems)


def document(status: Status) -> dict[str, Any]:
    """Return a status as `--json` prints it: the fields of `Status`, with the version of this format."""
    data: dict[str, Any] = {"schema": SCHEMA, **to_json(status)}
    return data


def _follow(options: JobOptions, number: int, as_json: bool) -> None:
    console = Console(soft_wrap=True)
    deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    with options.connect() as (client, job):
        watch = Watch(client, job.root + keys.HISTORY, deliveries.put)
        try:
            newest = 0
            while True:
                match deliveries.get():
                    case Snapshot() as listing:
                        items, revision = listing.kvs, listing.revision
                        if listing.rolled_back:
                            newest = 0
                            print(
                                "elastic3d: etcd came back empty or from a backup; this is what it holds",
                                file=sys.stderr,
                            )
                    case Changes() as changes:
                        items = tuple(change.kv for change in changes.changes if change.kv is not None)
                        revision = changes.revision
                    case Disconnected() as lost:
                        print(
                            f"elastic3d: etcd does not answer ({lost.reason}); going on when it does", file=sys.stderr
                        )
                        continue
                    case Ended() as ended:
                        raise ended.error
                    case _:
                        continue
                histories, problems = history(job.root, [item for item in items if item.mod_revision > newest])
                for each in histories[-number:] if not newest else histories:
                    _tell(each, console, as_json)
                _complain(problems)
                newest = revision
        finally:
            watch.close()


def _tell(each: GenerationHistory, console: Console, as_json: bool) -> None:
    if as_json:
        print(json.dumps(to_json(each)), flush=True)
    else:
        console.print(render.line(each, SYSTEM.wall()))


def _complain(problems: list[str]) -> None:
    for problem in problems:
        print(f"elastic3d: {render.clean(problem)}", file=sys.stderr)
