"""Heartbeat links between processes: who hears whom, and who is told what about it, and when.

What a real link does each 0.2 s is no event here. A byte from one process reaches another while one of the two dials
the other, both processes run, and the network lets it pass in that direction; only changes of that are looked at. A
process is told that it hears a neighbour a moment after bytes begin to pass, and that it does not when none passed for
`SILENCE` seconds of its own running - `FRESH` before the first - since its links do not count the time in which it was
stopped itself.

A refusal is a death where a neighbour that is asked is refused as well (`membership/driver/witness.py`).
"""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import Protocol

from chaos.simulation.loop import Loop
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.driver import witness
from elastic3d.membership.driver.links import FRESH, INTERVAL, SILENCE
from elastic3d.membership.driver.probing import SECONDS as PROBE


class State(StrEnum):
    """What a process is, as its neighbours see it."""

    RUNNING = "running"
    PAUSED = "paused"
    ENDED = "ended"  # its host answers, and refuses
    VANISHED = "vanished"  # nothing answers


class Process(Protocol):
    """What the network asks of a process."""

    @property
    def id(self) -> str: ...

    @property
    def host(self) -> int: ...

    @property
    def state(self) -> State: ...

    def tell(self, event: e.Event) -> None: ...


class _End:
    """What one process hears of another. told: what it was told last, None before the first time."""

    __slots__ = ("flows", "told", "turn")

    def __init__(self) -> None:
        self.flows: bool | None = None
        self.told: bool | None = None
        self.turn = 0


class Network:
    """All links of all processes. lone: who was refused last, and when, by one with nobody else to ask about it."""

    def __init__(self, loop: Loop, random: Random) -> None:
        self.loop, self.random = loop, random
        self._processes: dict[str, Process] = {}
        self._dials: dict[str, dict[str, None]] = {}
        self._ends: dict[str, dict[str, _End]] = {}
        self._watchers: dict[str, dict[str, None]] = {}
        self._refusing: dict[tuple[str, str], None] = {}
        self.blocked: dict[tuple[int, int], int] = {}
        self.lone: dict[str, float] = {}
        self._resets: dict[tuple[int, int], int] = {}

    def add(self, process: Process) -> None:
        """Let a process have links."""
        self._processes[process.id] = process
        self._ends[process.id] = {}
        self._dials[process.id] = {}

    def passes(self, sender: int, receiver: int) -> bool:
        """Return whether bytes pass from one host to another."""
        return not self.blocked or not self.blocked.get((sender, receiver))

    def watch(self, process: Process, action: acts.WatchPeers) -> None:
        """Hold the links the core asked for, and no others; those heard are told again."""
        me = process.id
        before = self._dials[me]
        self._dials[me] = dict.fromkeys(peer.id for peer in action.peers)
        wanted = dict.fromkeys([*self._dials[me], *action.expected])
        ends = self._ends[me]
        for other in [other for other in ends if other not in wanted]:
            del ends[other]
            self._watchers.get(other, {}).pop(me, None)
        for other in wanted:
            if other not in ends:
                ends[other] = _End()
                self._watchers.setdefault(other, {})[me] = None
            elif ends[other].told:
                process.tell(e.PeerHeard(id=other, alive=True))
            self._look(me, other)
            self._refuse(me, other)
        for other in dict.fromkeys([*before, *self._dials[me]]):
            self._look(other, me)

    def changed(self, process: Process) -> None:
        """Look again at all links of a process that was stopped, woke, or ended."""
        me = process.id
        if process.state is State.RUNNING:
            for end in self._ends[me].values():
                # Its own links did not run: what it does not hear has been silent from now on only.
                end.flows = None
        for other in list(self._ends[me]):
            self._look(me, other)
            self._refuse(me, other)
        for other in list(self._watchers.get(me, ())):
            self._look(other, me)
            self._refuse(other, me)

    def block(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> None:
        """Let nothing pass from some hosts to others."""
        for sender in senders:
            for receiver in receivers:
                if sender != receiver:
                    self.blocked[sender, receiver] = self.blocked.get((sender, receiver), 0) + 1
        self._look_at_all()

    def free(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> None:
        """Undo one `block` of the same hosts."""
        for sender in senders:
            for receiver in receivers:
                if sender != receiver:
                    left = self.blocked[sender, receiver] - 1
                    if left:
                        self.blocked[sender, receiver] = left
                    else:
                        del self.blocked[sender, receiver]
        self._look_at_all()

    def reset(self, dialler: int, dialled: int, by: int) -> None:
        """Let something refuse on a host's behalf what another dials there (`by` 1), or undo it once (-1)."""
        self._resets[dialler, dialled] = self._resets.get((dialler, dialled), 0) + by
        self._look_at_all()

    def probe(self, process: Process, peers: tuple[acts.RingPeer, ...]) -> None:
        """Let a process try to connect to others: it needs both ways, and a host that is there."""
        reached: list[str] = []
        failed: list[str] = []
        for peer in peers:
            there = self._processes.get(peer.id)
            answers = there is not None and there.state is not State.VANISHED
            both = there is not None and self.passes(process.host, there.host) and self.passes(there.host, process.host)
            (reached if answers and both else failed).append(peer.id)
        event = e.Probed(reached=tuple(reached), failed=tuple(failed))
        self.loop.later(PROBE if failed else 0.01, process.tell, event)

    def _look_at_all(self) -> None:
        for me, ends in self._ends.items():
            for other in list(ends):
                self._look(me, other)
                self._refuse(me, other)

    def _flows(self, sender: str, receiver: str) -> bool:
        there = self._processes.get(sender)
        here = self._processes[receiver]
        if there is None or there.state is not State.RUNNING or here.state is not State.RUNNING:
            return False
        if not (self._stands(receiver, sender) or self._stands(sender, receiver)):
            return False
        return self.passes(there.host, here.host)

    def _stands(self, dialler: str, dialled: str) -> bool:
        """Return whether one dials the other and nobody refuses in between."""
        hosts = self._processes[dialler].host, self._processes[dialled].host
        return dialled in self._dials[dialler] and not self._resets.get(hosts)

    def _look(self, me: str, other: str) -> None:
        end = self._ends[me].get(other) if me in self._ends else None
        if end is None:
            return
        flows = self._flows(other, me)
        if flows == end.flows:
            return
        end.flows = flows
        end.turn += 1
        if flows:
            delay = self.random.uniform(0.0005, 0.005 if end.told is None else INTERVAL)
        else:
            passed = self.random.uniform(0.0, INTERVAL) if end.told else 0.0
            delay = (FRESH if end.told is None else SILENCE) - passed
        self.loop.later(delay, self._tell, me, other, end, end.turn)

    def _tell(self, me: str, other: str, end: _End, turn: int) -> None:
        process = self._processes[me]
        if end.turn != turn or self._ends[me].get(other) is not end or process.state is not State.RUNNING:
            return
        if end.told != end.flows:
            end.told = bool(end.flows)
            process.tell(e.PeerHeard(id=other, alive=end.told))

    def _refuse(self, me: str, other: str) -> None:
        """Let the dialler of an ended process hear that it is refused, again and again while it dials."""
        if (me, other) not in self._refusing and self._refused(me, other):
            self._refusing[me, other] = None
            self.loop.later(self.random.uniform(0.001, 0.01), self._tell_refused, me, other)

    def _refused(self, me: str, other: str) -> bool:
        return other in self._dials[me] and self._tried(me, other) is witness.TryResult.REFUSED

    def _tried(self, me: str, other: str) -> witness.TryResult:
        """Return what comes of a try of one process to connect to another."""
        here, there = self._processes[me], self._processes.get(other)
        if there is None or here.state is not State.RUNNING:
            return witness.TryResult.UNKNOWN
        if there.state is State.VANISHED or not (
            self.passes(here.host, there.host) and self.passes(there.host, here.host)
        ):
            return witness.TryResult.UNKNOWN
        if there.state is State.ENDED or self._resets.get((here.host, there.host)):
            return witness.TryResult.REFUSED
        return witness.TryResult.REACHED if there.state is State.RUNNING else witness.TryResult.UNKNOWN

    def _tell_refused(self, me: str, other: str) -> None:
        if not self._refused(me, other):
            del self._refusing[me, other]
            return
        if self._dead(me, other):
            self._processes[me].tell(e.PeerRefused(id=other, evidence="the heartbeat connection was refused"))
        self.loop.later(SILENCE, self._tell_refused, me, other)

    def _dead(self, me: str, other: str) -> bool:
        """Return whether a refusal is a death, as `membership/driver/links.py` decides it."""
        neighbours = [id for id in self._ends[me] if id != other]
        if not neighbours:
            return self._alone(me, other)
        asked = [id for id in neighbours if self._flows(id, me) and self._flows(me, id)]
        verdicts = [
            self._tried(id, other) if other in self._ends[id] else witness.TryResult.UNKNOWN for id in sorted(asked)
        ]
        match witness.conclude(verdicts, over=True):
            case witness.Conclusion.DEAD:
                return True
            case witness.Conclusion.UNWITNESSED if not asked and all(self._refused(me, id) for id in neighbours):
                return self._alone(me, other)
            case _:
                return False

    def _alone(self, me: str, other: str) -> bool:
        """Return whether a refusal is a death where there is nobody to ask: not of one that is heard."""
        if self._ends[me][other].told and self._flows(other, me):
            return False
        self.lone[other] = self.loop.now
        return True
