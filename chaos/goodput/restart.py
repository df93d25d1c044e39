"""A job that only restarts from checkpoints: torchrun, with DCP's asynchronous saves.

Every loss, and every join that makes steps shorter, restarts all processes, which go on from the newest checkpoint that
was whole. Saves hold training up while they are staged, and come at the optimum of Young and Daly for the trace's own
mean time between interruptions, which no real job knows beforehand. The job is given more than torchrun has: the
planner's best layout for the nodes that are there, and checkpoints that load in any layout.
"""

from __future__ import annotations

import math

from chaos.goodput.costs import RecoveryCosts
from chaos.goodput.ledger import Spent
from chaos.goodput.lives import Crowd, mean_between
from chaos.goodput.playing import Play
from chaos.goodput.step_times import StepTimes
from chaos.goodput.young_daly import optimum
from chaos.simulation.loop import Loop


class Restart(Play):
    """The whole job."""

    def __init__(self, name: str, crowd: Crowd, times: StepTimes, costs: RecoveryCosts, *, enough: int) -> None:
        super().__init__(name, crowd, Loop(), enough=enough, start=costs.node_start)
        self._times, self._costs = times, costs
        self._ready: dict[int, None] = {}
        self._turn = 0
        self._seconds = math.inf
        self._nodes = 0
        self._whole = 0
        self._saved_at = 0.0
        self._whole_at = 0.0
        held = sum(until - since for since, until, nodes in crowd.counts() if nodes >= enough)
        self._between = mean_between((at for at, _, _ in crowd.changes()), held)

    def ready(self, host: int) -> None:
        """Restart with it, if that makes steps shorter."""
        self._ready[host] = None
        best = self._times.best(len(self._ready))
        if best is not None and best.seconds < self._seconds:
            self._restart(Spent.CHANGE)
        else:
            self._place()

    def lost(self, host: int, active: bool) -> None:
        """Restart without it, if it was used."""
        self._ready.pop(host, None)
        if active:
            self._restart(Spent.RECOVERY)

    def _place(self) -> None:
        hosts = list(self._ready)
        self.ledger.place_all(hosts[: self._nodes], hosts[self._nodes :], self.loop.now)

    def _restart(self, cause: Spent) -> None:
        costs, now = self._costs, self.loop.now
        self._turn += 1
        self.ledger.pause(Spent.REPEATED, cause, now)
        self.ledger.go_on_from(self._whole, now)
        best = self._times.best(len(self._ready)) if self._ready else None
        if best is None:
            self._seconds, self._nodes = math.inf, 0
            self._place()
            return
        self._seconds, self._nodes = best.seconds, best.nodes
        # Nodes that train stay in front: the others wait.
        self._place()
        delay = costs.restart_begin + costs.restart_first_step + costs.cold_context + costs.communicators
        if cause is Spent.RECOVERY:
            delay += costs.restart_notice
        if self._whole:
            delay += self._times.state_bytes / self._nodes / costs.restart_restore
        self.loop.later(delay, self._begin, self._turn)

    def _begin(self, turn: int) -> None:
        if turn == self._turn:
            self._saved_at = self.loop.now
            self._whole_at = 0.0
            self._go_on(turn)

    def _go_on(self, turn: int) -> None:
        if turn == self._turn:
            self.ledger.begin(self.loop.now)
            self.loop.later(self._seconds, self._step, turn)

    def _step(self, turn: int) -> None:
        if turn != self._turn:
            return
        now = self.loop.now
        self.ledger.stepped(now)
        stall = self._times.state_bytes / self._nodes / self._costs.restart_stall
        if now - self._saved_at < optimum(stall, self._between) or now < self._whole_at:
            self.loop.later(self._seconds, self._step, turn)
            return
        self.ledger.pause(Spent.SAVING, Spent.SAVING, now)
        self._saved_at = now + stall
        self._whole_at = now + stall + self._times.state_bytes / self._nodes / self._costs.restart_save
        self.loop.at(self._whole_at, self._is_whole, turn, self.ledger.steps)
        self.loop.later(stall, self._go_on, turn)

    def _is_whole(self, turn: int, step: int) -> None:
        if turn == self._turn:
            self._whole = step
