"""Orders of faults, as the node's first keeper takes them: refused, or answered, written down and carried out.

What is done is done by signals, to processes of this node alone, as anybody could send them who is logged in there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic3d import output, threads
from elastic3d.errors import EtcdError
from elastic3d.etcd import EtcdClient
from elastic3d.health.processes import stat_fields
from elastic3d.membership import events as m
from elastic3d.membership.fault_orders import GivenOrder, take
from elastic3d.membership.injection import OPTION, FaultAnswer, FaultOrder, refusal
from elastic3d.rendezvous import agent
from elastic3d.worker.journal import Journal
from elastic3d.worker.processes import stopping

FLUSH_PATIENCE = 1.0
"""Seconds for the event to be written before the process that writes it may die."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcesses:
    """A node's processes by what they are. agent: its `agent.identity`, "" where it is not known.

    keepers, trainers: by slot; of trainers those of the running generation that live.
    """

    agent: str
    keepers: Sequence[int]
    trainers: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What to do for an order. number: of the signal. pids: whom it is sent to; in `whole`, the root of all.

    refused: why nothing can be done, "" where something can.
    """

    number: signal.Signals = signal.SIGKILL
    pids: tuple[int, ...] = ()
    whole: bool = False
    refused: str = ""


def work(order: FaultOrder, there: NodeProcesses, parent_of: Callable[[int], int]) -> Work:
    """Return what an order that was found good means for the processes that are there. parent_of: of a pid, 0 if gone.

    Pure but for that question.
    """
    match order.fault:
        case "kill" | "stop":
            if not there.agent:
                return Work(refused="this node's agent is not known")
            number, pid = (signal.SIGKILL if order.fault == "kill" else signal.SIGSTOP), agent.pid_of(there.agent)
            return Work(number=number, pids=(pid,), whole=order.fault == "stop")
        case "kill-keeper":
            return Work(pids=(there.keepers[0],))
        case "kill-companion":
            return Work(pids=(there.keepers[order.slot],))
    trainer = there.trainers.get(order.slot)
    template = 0 if trainer is None else parent_of(trainer)
    # A trainer whose end was not heard of yet may have left its number to somebody else.
    if trainer is None or not {template, parent_of(template)} & {*there.keepers}:
        return Work(refused=f"no trainer runs on slot {order.slot} now")
    if order.fault == "kill-template":
        if template in there.keepers:
            return Work(refused=f"the template of slot {order.slot} is gone")
        return Work(pids=(template,))
    return Work(number=signal.SIGKILL if order.fault == "kill-trainer" else signal.SIGSTOP, pids=(trainer,))


def parent_of(pid: int) -> int:
    """Return the parent's pid, 0 if the process is gone."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


class InjectedFaults:
    """Takes the orders of this node's incarnations, each once. `heard` is called on the keeper's main thread.

    allowed: whether they are carried out. processes: what there is now.
    """

    def __init__(
        self,
        client: EtcdClient,
        *,
        allowed: bool,
        slots: int,
        journal: Journal,
        processes: Callable[[], NodeProcesses],
    ) -> None:
        self._client, self._allowed, self._slots = client, allowed, slots
        self._journal, self._processes = journal, processes
        self._heard: set[str] = set()
        self._refused = False

    def heard(self, event: m.FaultOrdered, me: str) -> None:
        """Take an order if it is for `me`, this node's id, and new. What waits for etcd is done on another thread."""
        if event.id != me or event.order.answer is not None or event.key in self._heard:
            return
        self._heard.add(event.key)
        order = event.order
        if not self._allowed:
            if not self._refused:
                self._refused = True
                self._refuse(order, f"this node was not started with {OPTION}; said once")
            return
        problem = refusal(order, slots=self._slots, lease=event.lease)
        todo = Work(refused=problem) if problem else work(order, self._processes(), parent_of)
        given = GivenOrder(node=me, key=event.key, revision=event.revision, lease=event.lease, order=order)
        threads.start(self._carry_out, given, todo, name="elastic3d-fault", edge=threads.Edge.ALONE)

    def _refuse(self, order: FaultOrder, why: str) -> None:
        self._journal.emit("fault.refused", fault=order.fault, by=order.by or None, detail=why)

    def _carry_out(self, given: GivenOrder, todo: Work) -> None:
        order = given.order
        try:
            handles = _held(todo.pids)
        except ProcessLookupError:
            todo, handles = Work(refused="the process that is meant has just ended"), []
        try:
            if not take(self._client, given, FaultAnswer(refused=todo.refused)):
                self._refuse(order, "the order does not stand any more: it was withdrawn, or its time was over")
                return
            if todo.refused:
                self._refuse(order, todo.refused)
                return
            self._journal.emit(
                "fault.injected",
                fault=order.fault,
                seconds=order.seconds or None,
                pids=list(todo.pids),
                by=order.by or None,
                **({"slot": order.slot} if order.slot >= 0 else {}),
            )
            self._journal.flush(FLUSH_PATIENCE)
            output.flush(FLUSH_PATIENCE)
            if order.seconds:
                _stop_for(order.seconds, todo)
            else:
                for handle in handles:
                    signal.pidfd_send_signal(handle, todo.number)
        except EtcdError as error:
            self._refuse(order, f"etcd did not take the answer: {error}")
        except ProcessLookupError:
            pass  # it ended by itself meanwhile
        finally:
            for handle in handles:
                os.close(handle)


def _held(pids: Sequence[int]) -> list[int]:
    """Return handles on these processes; ProcessLookupError if one is gone."""
    handles: list[int] = []
    try:
        for pid in pids:
            handles.append(os.pidfd_open(pid))
    except ProcessLookupError:
        for handle in handles:
            os.close(handle)
        raise
    return handles


def _stop_for(seconds: float, todo: Work) -> None:
    """Start what stops and wakes them, and wait for its end: it is no part of this node, and outlives this process."""
    named = [*(["--below"] if todo.whole else []), *map(str, todo.pids)]
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(stopping.__file__)), f"{seconds:g}", *named],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    helper.wait()
