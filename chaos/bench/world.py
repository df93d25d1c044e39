"""One world of agents, formed once: `python -m chaos.bench.world SYSTEM AGENTS ...` prints one JSON line, a `Formed`.

An agent is a process that asks its rendezvous for a world as torchrun's does. All are forked from this one, which has
imported what they need and opened no connection yet; then all but one join and wait, and the last one joins. Times
are of the monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import sys
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from chaos.bench.systems import SYSTEMS, Elastic3d, Membership, System
from chaos.machine.processes import wait_until
from elastic3d.clock import SYSTEM
from elastic3d.worker.processes.process import die_with_parent

QUIET = 1.0
"""Seconds between the last but one being seen to wait, and the last one's join."""

PACE = 0.15
"""Seconds between two of the others' joins: c10d and etcd-v2, whose agents all write one record, need them apart, and
two cores do not start more at once."""

AGENT_POLL = 0.1
"""torchrun's own interval between two questions for news."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """What one world cost. failed: why there is none, then nothing else counts.

    seconds: from the last join to the slowest agent's rank. cpu: seconds of CPU per second and idle agent. server_cpu:
    of the etcd server, for all of them. writes: etcd's revisions from before the first join until all was quiet.
    record: bytes of the largest record.
    """

    seconds: float | None = None
    cpu: float | None = None
    server_cpu: float | None = None
    writes: int | None = None
    record: int | None = None
    failed: str = ""


class NotFormed(Exception):
    """The world did not form, or is inconsistent."""


class _Agents:
    """The agents' ends of the pipes: one message to each, one answer from each."""

    def __init__(self, pipes: list[Connection], patience: float) -> None:
        self._pipes, self._end = pipes, SYSTEM.monotonic() + patience

    def tell(self, message: float, numbers: range) -> None:
        for number in numbers:
            self._pipes[number].send(message)

    def all_well(self) -> bool:
        """Return True while no agent has sent anything: before it is asked, that can only be a failure."""
        for number, pipe in enumerate(self._pipes):
            if pipe.poll():
                try:
                    said = pipe.recv()
                except EOFError:
                    said = "died"
                raise NotFormed(f"agent {number}: {said}")
        return True

    def answers(self, what: str) -> list[Any]:
        """Return everybody's next answer, in order; NotFormed for what an agent failed with, and after the patience."""
        answers: dict[int, Any] = {}
        numbers: dict[Any, int] = {pipe: number for number, pipe in enumerate(self._pipes)}
        while numbers:
            ready = wait(list(numbers), timeout=max(0.0, self._end - SYSTEM.monotonic()))
            if not ready:
                raise NotFormed(f"{what}: {len(numbers)} of {len(self._pipes)} agents not in time")
            for pipe in ready:
                number = numbers.pop(pipe)
                try:
                    answers[number] = self._pipes[number].recv()
                except EOFError:
                    raise NotFormed(f"{what}: agent {number} died") from None
                if isinstance(answers[number], NotFormed):
                    raise NotFormed(f"{what}: agent {number}: {answers[number]}")
        return [answers[number] for number in range(len(self._pipes))]


def form(system: System, agents: int, endpoint: str, server: int | None, idle: float, patience: float) -> Formed:
    """Form a world once. The agents live until this process ends."""
    context = multiprocessing.get_context("fork")
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    mine, theirs = context.Pipe()
    context.Process(target=_serve, args=(system, theirs, parent), daemon=True).start()
    endpoint = mine.recv() or endpoint
    pipes = []
    for number in range(agents):
        mine, theirs = context.Pipe()
        context.Process(target=_agent, args=(system, number, endpoint, theirs, parent), daemon=True).start()
        theirs.close()
        pipes.append(mine)
    # No fork comes after this line, connections may be opened.
    crew = _Agents(pipes, patience)
    crew.answers("preparing")
    etcd = system.etcd(endpoint) if isinstance(system, Elastic3d) else None
    before = etcd.range("/")[1] if etcd else 0
    for number in range(agents - 1):
        crew.tell(0, range(number, number + 1))
        SYSTEM.sleep(PACE)
    if not wait_until(lambda: crew.all_well() and system.waiting(endpoint) >= agents - 1, patience, interval=0.25):
        raise NotFormed(f"only {system.waiting(endpoint)} of {agents - 1} agents joined within {patience:g} s")
    SYSTEM.sleep(QUIET)
    began = SYSTEM.monotonic()
    crew.tell(0, range(agents - 1, agents))
    places = crew.answers("joining")
    if sorted(rank for _, rank, _ in places) != list(range(agents)) or {world for *_, world in places} != {agents}:
        raise NotFormed(f"ranks and worlds are {sorted((rank, world) for _, rank, world in places)[:8]}")
    crew.tell(0, range(agents))
    if not all(crew.answers("meeting in the store")):
        raise NotFormed("the agents do not meet in one store")
    cpu = server_cpu = None
    if idle:
        server_before = _cpu(server) if server else 0.0
        crew.tell(idle, range(agents))
        cpu = sum(crew.answers("idling")) / agents / idle
        server_cpu = (_cpu(server) - server_before) / idle if server else None
    items, after = etcd.range("/") if etcd else ((), 0)
    return Formed(
        seconds=max(at for at, _, _ in places) - began,
        cpu=cpu,
        server_cpu=server_cpu,
        writes=after - before if etcd else None,
        record=max(len(item.value) for item in items) if items else None,
    )


def _serve(system: System, pipe: Connection, parent: int) -> None:
    die_with_parent(parent)
    pipe.send(system.serve())
    pipe.recv()


def _agent(system: System, number: int, endpoint: str, pipe: Connection, parent: int) -> None:
    die_with_parent(parent)
    try:
        _take_part(system.member(number, endpoint), pipe)
    except Exception as error:  # noqa: BLE001  # the process's edge: a peer may fail with anything, and it is told
        pipe.send(NotFormed(f"{type(error).__name__}: {error}".splitlines()[0][:200]))


def _take_part(member: Membership, pipe: Connection) -> None:
    pipe.send(None)
    pipe.recv()
    place = member.join()
    pipe.send((SYSTEM.monotonic(), place.rank, place.world))
    pipe.recv()
    met = True
    if place.store is not None:
        place.store.set(f"met/{place.rank}", str(place.rank))
        next_one = (place.rank + 1) % place.world
        met = place.store.get(f"met/{next_one}") == str(next_one).encode()
    pipe.send(met)
    idle = pipe.recv()
    before, end = _own_cpu(), SYSTEM.monotonic() + idle
    while SYSTEM.monotonic() < end:
        if member.changed():
            raise NotFormed("the world changed though nobody came or went")
        SYSTEM.sleep(AGENT_POLL)
    pipe.send(_own_cpu() - before)
    pipe.recv()


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _cpu(pid: int) -> float:
    """Return the seconds of CPU a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Form what the command line says; a world that fails is a result too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("agents", type=int)
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--server", type=int, help="pid of the etcd server")
    parser.add_argument("--idle", type=float, default=0.0)
    parser.add_argument("--patience", type=float, default=120.0)
    o = parser.parse_args()
    try:
        formed = form(SYSTEMS[o.system](o.agents), o.agents, o.endpoint, o.server, o.idle, o.patience)
    except NotFormed as error:
        formed = Formed(failed=str(error))
    print(json.dumps(asdict(formed)), flush=True)
    # The caller ends the agents; waiting for them here would let them leave one by one.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
