"""`elastic3d drain`, `quarantine` and `release`: a person's orders about a live job's nodes."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from elastic3d.cli.durations import spell
from elastic3d.cli.job import JobOptions, asker
from elastic3d.clock import SYSTEM
from elastic3d.errors import MembershipError
from elastic3d.etcd import EtcdClient
from elastic3d.membership.inspection.jobs import Job, read_status
from elastic3d.membership.inspection.status import JobState, NodeRole, NodeState, NodeStatus, Status
from elastic3d.membership.orders import order_drain, order_quarantine
from elastic3d.membership.orders import release as take_back
from elastic3d.quantities import some_seconds

POLL = 0.3
# Seconds after the deadline in which the next generation is sealed.
LATE = 60.0

_Node = Annotated[str, typer.Argument(metavar="NODE", help="As `elastic3d status` names it.", show_default=False)]
_Reason = Annotated[str, typer.Option(help="Why; shown in status.", show_default=False)]


def drain(
    options: JobOptions,
    node: _Node,
    deadline: Annotated[str, typer.Option(metavar="DURATION", help="How long it may take: 30s, 10m, 1h.")] = "5m",
    reason: _Reason = "",
    wait: Annotated[bool, typer.Option("--wait", help="Return when the node has left.")] = False,
) -> None:
    """Let a node leave at a step boundary, with no step repeated.

    The next generation is prepared beside the running one; a spare fills the hole if there is one. If time runs short
    the node leaves before that is done. Its place is free again at once: a newly started process joins.

    Examples:

        elastic3d drain node-17 --deadline 30s

        elastic3d drain node-17 --deadline 10m --reason "new kernel" --wait

        elastic3d release node-17      # takes the order back, until it is carried out
    """
    seconds = some_seconds(deadline, "--deadline")
    with options.connect() as (client, job):
        before = read_status(client, job)
        ordered = order_drain(client, job.root, node, seconds=seconds, by=asker(), reason=reason)
        print(_leaving(before, node, seconds))
        if wait:
            print(_until_gone(client, job, node, ordered.incarnation, seconds))


def quarantine(
    options: JobOptions,
    node: _Node,
    for_: Annotated[str, typer.Option("--for", metavar="DURATION", help="How long: 10m, 1h.")] = "10m",
    reason: _Reason = "",
) -> None:
    """Keep a node's machine out of the job for a time.

    If it trains, a planned change takes it out, with no step repeated. It stays registered, and is a candidate again
    when the time is over, or after `elastic3d release`. The order holds for every process that the machine starts.

    Examples:

        elastic3d quarantine node-17 --for 1h --reason "ECC errors"

        elastic3d release node-17
    """
    seconds = some_seconds(for_, "--for")
    with options.connect() as (client, job):
        before = read_status(client, job)
        machine = order_quarantine(client, job.root, node, seconds=seconds, by=asker(), reason=reason)
        rows = [row for row in before.nodes if row.machine == machine and row.role is not NodeRole.NONE]
        print(f"machine {machine} is kept out for {spell(seconds)}; `elastic3d release {node}` lets it back earlier")
        for row in rows:
            if row.role is NodeRole.ACTIVE and before.generation is not None:
                print(f"node {row.name} leaves generation {before.generation.number} in a planned change")
        print(_shortage(before, sum(row.role is NodeRole.ACTIVE for row in rows)), end="")


def release(options: JobOptions, node: _Node) -> None:
    """Take back what keeps a node out: its quarantine, a drain not carried out yet, and its count of losses.

    A notice from the cloud or the scheduler cannot be taken back: the machine will go.

    Examples:

        elastic3d release node-17
    """
    with options.connect() as (client, job):
        before = read_status(client, job)
        done = take_back(client, job.root, node)
        print(f"taken back: {', '.join(done)}")
        row = next((row for row in before.nodes if row.name == node), None)
        if row is None:
            print(f"{node} is not registered now; when it comes, it is a candidate")
        elif row.role is NodeRole.ACTIVE:
            print(f"node {node} stays, unless its trainers were asked to leave already")
        else:
            print(f"node {node} is a candidate for the next generation")


def _leaving(before: Status, node: str, seconds: float) -> str:
    row = next((row for row in before.nodes if row.name == node), None)
    if row is None or row.role is not NodeRole.ACTIVE or before.generation is None:
        return f"node {node} trains in no generation: it leaves within {spell(seconds)}, and nothing else changes"
    said = f"node {node} leaves generation {before.generation.number} at a step boundary within {spell(seconds)}"
    return f"{said}\n{_shortage(before, 1)}".rstrip()


def _shortage(before: Status, leaving: int) -> str:
    """Return a line that says so if the job will have too few nodes, else ""."""
    usable = (NodeState.ACTIVE, NodeState.SPARE, NodeState.JOINING, NodeState.PREPARING, NodeState.PREPARED)
    able = sum(row.state in usable for row in before.nodes) - leaving
    if leaving and able < before.minimum:
        return f"the job then waits for more nodes: {able} of at least {before.minimum} are left\n"
    return ""


def _until_gone(client: EtcdClient, job: Job, node: str, incarnation: str, seconds: float) -> str:
    """Return what became of the drain; MembershipError if it was taken back, or nobody carries it out."""
    begun = SYSTEM.monotonic()
    with Console(stderr=True).status(f"node {node} is leaving") as shown:
        while True:
            now = read_status(client, job)
            passed = SYSTEM.monotonic() - begun
            row = next((row for row in now.nodes if (row.name, row.incarnation) == (node, incarnation)), None)
            number = now.generation.number if now.generation is not None else 0
            if now.state in (JobState.ENDED, JobState.FAILED):
                return f"the job is over: {now.detail or now.state}"
            if row is None or row.state is NodeState.OUT:
                return f"node {node} left after {spell(passed)}; the job is in generation {number}, {now.state}"
            if row.state in _STAYING:
                raise MembershipError(f"node {node} is not leaving any more: the order was taken back")
            if passed > seconds + LATE:
                raise MembershipError(
                    f"node {node} is still there {spell(passed)} after the order: see `elastic3d status`, and whether "
                    "the job has a leader"
                )
            shown.update(_progress(now, row, seconds - passed))
            SYSTEM.sleep(POLL)


_STAYING = (NodeState.ACTIVE, NodeState.FINISHED, NodeState.SPARE, NodeState.JOINING)


def _progress(now: Status, row: NodeStatus, left: float) -> str:
    what = "waiting for the leader"
    if now.preparing is not None:
        what = f"generation {now.preparing.number} is being prepared"
        if now.preparing.switching:
            what = f"trainers are switching to generation {now.preparing.number}"
    until = f"{spell(left)} left" if left > 0 else "its time is over"
    return f"node {row.name} is leaving: {what}; {until}"
