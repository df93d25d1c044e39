"""`elastic3d chaos inject`: one fault, ordered of a node of a live job that allows it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import typer

from elastic3d.cli.job import JobOptions, asker
from elastic3d.log import process_log
from elastic3d.membership.fault_orders import order_fault, wait_for_answer
from elastic3d.membership.injection import INJECTABLE, ordered
from elastic3d.values import to_json

SCHEMA = 1
WORDS = "; ".join(f"{word}: {kind.does}" for word, kind in INJECTABLE.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionDocument:
    """What `--json` prints once the node does it. slot, seconds: null where they mean nothing. by: who asked."""

    run_id: str
    node: str
    incarnation: str
    fault: str
    slot: int | None
    seconds: float | None
    by: str


def inject(
    options: JobOptions,
    fault: Annotated[str, typer.Argument(metavar="FAULT", help=f"{WORDS}.", show_default=False)],
    node: Annotated[
        str, typer.Option("--node", metavar="NODE", help="As `elastic3d status` names it.", show_default=False)
    ],
    slot: Annotated[
        int | None,
        typer.Option(metavar="SLOT", help="Which slot of the node. Default: 0, or 1 for kill-companion.", min=0),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="For how long, of stop and pause. Default: 5.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Have a node of a live job bring about a fault of its own processes, to see the job live through it.

    Only nodes that were started with `--rdzv-conf=chaos=allow` do so; `elastic3d status` shows whether any was. The
    node's keeper answers, writes event `fault.injected`, and acts. Exit codes: 0 if it does, 2 for a wrong call and
    where the node does not allow it or refuses, 3 if there is no such job, 1 for the rest: without an answer in 15 s
    the order is withdrawn.

    Examples:

        elastic3d chaos inject kill-trainer --node node3 --endpoint e1:2379 --id gpt-1b

        elastic3d chaos inject stop --node node3 --seconds 20
    """
    order = ordered(fault, slot=slot, seconds=seconds, by=asker())
    with options.connect() as (client, job):
        given = order_fault(client, job.root, node, order)
        named = {"run": job.run_id, "node": node, **({"slot": order.slot} if order.slot >= 0 else {})}
        process_log().bind(**named).emit("fault.ordered", fault=fault, seconds=order.seconds or None, by=order.by)
        wait_for_answer(client, job.root, given)
    said = InjectionDocument(
        run_id=job.run_id,
        node=node,
        incarnation=given.node.rpartition("@")[2],
        fault=fault,
        slot=order.slot if order.slot >= 0 else None,
        seconds=order.seconds or None,
        by=order.by,
    )
    if as_json:
        print(json.dumps({"schema": SCHEMA, **to_json(said)}))
    else:
        of = f" of slot {order.slot}" if order.slot >= 0 else ""
        lasting = f" for {order.seconds:g} s" if order.seconds else ""
        print(f"{node} does it: {fault}{of}{lasting}; what becomes of it: `elastic3d events --follow`")
