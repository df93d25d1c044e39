"""A job with data parallelism only: whole replicas of one fixed pp x tp come and go, as under torchft.

A replica has the fewest nodes that hold the model, in the pp x tp that the planner finds best for them. One that loses
a node is gone: the step under way is discarded, the others go on with it missing, and its other nodes wait until there
are enough for a whole replica again, which then takes its state from a living one. No step is lost while a replica
lives; where none does, the job goes on from the newest checkpoint, saved at the optimum of Young and Daly for the mean
time between such losses.

Unlike torchft, whose replicas keep their share of the batch while others are away, every step has the same samples
here, shared out anew: all policies train the same job, and their steps can be compared.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Self

from chaos.goodput.costs import RecoveryCosts
from chaos.goodput.ledger import Spent
from chaos.goodput.lives import Crowd, mean_between
from chaos.goodput.playing import Play
from chaos.goodput.step_times import StepTimes
from chaos.goodput.young_daly import optimum
from chaos.simulation.loop import Loop


class Replicas(Play):
    """The whole job. between: mean seconds from one loss of all state to the next, by which it saves."""

    def __init__(
        self, name: str, crowd: Crowd, times: StepTimes, costs: RecoveryCosts, *, enough: int, between: float = math.inf
    ) -> None:
        super().__init__(name, crowd, Loop(), enough=enough, start=costs.node_start)
        self._times, self._costs, self._size = times, costs, enough
        whole = times.best(enough)
        assert whole is not None
        self._request = replace(times.request, pp=whole.layout.pp, tp=whole.layout.tp)
        self._waiting: dict[int, None] = {}
        self._replicas: list[tuple[int, ...]] = []
        self._coming: list[tuple[int, ...]] = []
        self._prepared: list[tuple[int, ...]] = []
        self._turn = self._whole = 0
        self._saved_at = self._whole_at = 0.0
        self._between = between
        self._lost_all: list[float] = []

    @classmethod
    def saving(cls, name: str, crowd: Crowd, times: StepTimes, costs: RecoveryCosts, *, enough: int) -> Self:
        """Return one that saves at the optimum for this trace.

        When no replica is left is known from a play without saves, which put off what replicas do by seconds only.
        """
        dry = cls(name, crowd, times, costs, enough=enough)
        dry.play()
        held = sum(until - since for since, until, nodes in crowd.counts() if nodes >= enough)
        return cls(name, crowd, times, costs, enough=enough, between=mean_between(dry._lost_all, held))

    # Nodes.

    def ready(self, host: int) -> None:
        """Begin another replica, if there are enough nodes for it."""
        self._waiting[host] = None
        self._gather()

    def lost(self, host: int, active: bool) -> None:
        """Go on without its replica."""
        self._waiting.pop(host, None)
        for group in (self._coming, self._prepared):
            for one in [one for one in group if host in one]:
                group.remove(one)
                self._free(one, host)
        for one in [one for one in self._replicas if host in one]:
            self._replicas.remove(one)
            self._free(one, host)
            self._turn += 1
            self.ledger.pause(Spent.REPEATED, Spent.RECOVERY, self.loop.now)
            if self._layout_seconds() is None:
                self.ledger.go_on_from(self._whole, self.loop.now)
                self._waiting.update((node, None) for rest in self._replicas for node in rest)
                self._replicas.clear()
                self._lost_all.append(self.loop.now)
                self._start_anew()
            else:
                delay = self._costs.replica_recovery + self._costs.communicators
                self.loop.later(delay, self._go_on, self._turn)
        self._gather()

    def _start_anew(self) -> None:
        """Have replicas that were ready to join the ones that are gone begin by themselves, from the checkpoint."""
        for replica in self._prepared:
            self._coming.append(replica)
            self.loop.later(self._restore_seconds(), self._come, replica)
        self._prepared.clear()

    def _restore_seconds(self) -> float:
        """Return how long a replica loads the newest checkpoint, 0 where there is none."""
        part = self._times.state_bytes / self._size
        return part / self._costs.restart_restore if self._whole else 0.0

    def _free(self, replica: tuple[int, ...], lost: int) -> None:
        self._waiting.update((host, None) for host in replica if host != lost)

    def _gather(self) -> None:
        while len(self._waiting) >= self._size:
            replica = tuple(self._waiting)[: self._size]
            for host in replica:
                del self._waiting[host]
            self._coming.append(replica)
            costs = self._costs
            delay = costs.replica_join + costs.cold_context + costs.communicators
            if self._replicas:
                delay += self._times.state_bytes / self._size / costs.peer_bandwidth
            else:
                delay += self._restore_seconds()
            self.loop.later(delay, self._come, replica)
        self._place()

    def _come(self, replica: tuple[int, ...]) -> None:
        if replica not in self._coming:
            return
        self._coming.remove(replica)
        self._prepared.append(replica)
        if not self._replicas:
            # Together with those that are as far.
            self._turn += 1
            self.loop.later(0.0, self._begin, self._turn)

    def _begin(self, turn: int) -> None:
        if turn == self._turn and self._prepared:
            self._admit()
            self._saved_at = self.loop.now
            self._go_on(turn)

    def _admit(self) -> None:
        self._replicas += self._prepared
        self._prepared.clear()
        self._place()

    def _place(self) -> None:
        active = {host for replica in self._replicas for host in replica}
        self.ledger.place_all(active, self._waiting, self.loop.now)

    # Steps.

    def _layout_seconds(self) -> float | None:
        """Return the seconds of a step with the replicas that live, or with fewer of them if that is faster."""
        best = self._times.best(len(self._replicas) * self._size, self._request) if self._replicas else None
        return best.seconds if best is not None else None

    def _go_on(self, turn: int) -> None:
        if turn != self._turn:
            return
        seconds = self._layout_seconds()
        if seconds is None:
            # Replicas that are too few for any layout: more may come.
            self._waiting.update((host, None) for replica in self._replicas for host in replica)
            self._replicas.clear()
            return
        self.ledger.begin(self.loop.now)
        self.loop.later(seconds, self._step, turn)

    def _step(self, turn: int) -> None:
        if turn != self._turn:
            return
        now = self.loop.now
        self.ledger.stepped(now)
        nodes = len(self._replicas) * self._size
        stall = self._times.state_bytes / nodes / self._costs.restart_stall
        if now - self._saved_at >= optimum(stall, self._between) and now >= self._whole_at:
            self.ledger.pause(Spent.SAVING, Spent.SAVING, now)
            self._saved_at = now + stall
            self._whole_at = now + stall + self._times.state_bytes / nodes / self._costs.restart_save
            self.loop.at(self._whole_at, self._is_whole, self.ledger.steps)
            self.loop.later(stall, self._pass, turn)
        else:
            self._pass(turn)

    def _pass(self, turn: int) -> None:
        """Let prepared replicas in at the boundary, and go on."""
        if turn != self._turn:
            return
        if self._prepared:
            self.ledger.pause(Spent.CHANGE, Spent.CHANGE, self.loop.now)
            self._admit()
            self.loop.later(self._costs.replica_pause + self._costs.communicators, self._go_on, turn)
        else:
            self._go_on(turn)

    def _is_whole(self, step: int) -> None:
        if self._replicas and step <= self.ledger.steps:
            self._whole = max(self._whole, step)
