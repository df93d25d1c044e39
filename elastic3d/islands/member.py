"""One island of several, on one rank: how it begins, takes outer steps, and is left behind.

All methods are collectives of the island's ranks. Rank 0 alone looks into the store for the others; the rest follow.
With `overlap` deltas are computed so many steps before the outer step, and each rank exchanges its part of them in the
background until then: what is merged, and when, does not depend on how long that takes.

What an island does is a function of its state and of the records: one that dies in the middle, and goes on from a
snapshot, makes the same steps again, finds its delta in the store, and takes the same outer step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from checkpointing.stores.address import redacted
from elastic3d.clock import Clock
from elastic3d.errors import NotFinite, StateUnfit
from elastic3d.islands.admission import Admission, new_token
from elastic3d.islands.background import BackgroundExchange
from elastic3d.islands.exchange import Exchange, open_exchange
from elastic3d.islands.fragments import fragments_of
from elastic3d.islands.meeting import Deleted, IslandMeeting
from elastic3d.islands.options import Islands
from elastic3d.islands.outer_parameters import OuterParameters
from elastic3d.islands.parts import IslandParts
from elastic3d.islands.record import Sealed, Setup, name_and_number
from elastic3d.islands.sealing import SealedStep
from elastic3d.islands.setup import check_same, check_script, setup_of, trained_specs
from elastic3d.islands.state import IslandState
from elastic3d.log import process_log
from elastic3d.parallel import facts
from elastic3d.parallel.reduction.units import reshard
from elastic3d.parallel.state import local
from elastic3d.quantities import seconds
from elastic3d.values import from_json, to_json

BASES = 10
"""Outer steps of each fragment after which all outer parameters are put into the store, where no newcomer needs them
before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """An island begins a round from the outer parameters alone: at step `step`, those from `left_at` on left out."""

    left_at: int
    step: int


class IslandMember:
    """See the module. To be made before the state is loaded, whose `state` is part of it."""

    def __init__(self, islands: Islands, parts: IslandParts, clock: Clock) -> None:
        self._islands, self._parts, self._clock = islands, parts, clock
        check_script(parts, islands)
        self._name = islands.named(parts.assignment.run_id)
        self.state = IslandState(
            parts.model, momentum=islands.rates[1] > 0, sends=islands.overlap > 0, device=parts.mesh.device
        )
        # What a newcomer's optimizer and schedule begin with, before any state is loaded into them.
        self._groups = facts.optimizer_groups(parts.optimizer)
        self._schedule = facts.schedule_state(parts.schedule)
        self._outer: OuterParameters | None = None
        self._background: BackgroundExchange | None = None
        parts.batches.rounds = islands.period

    @property
    def longest(self) -> float:
        """Seconds for which the island may wait."""
        return seconds(self._islands.longest, "longest")

    def begin(self) -> Moved | None:
        """Find out what the other islands have done, and go on from there; return where to, None from where it is.

        To be called when the state was loaded, or the model has its initial values where there is none. UsageError
        where the islands train something else, or one of this name is alive.
        """
        parts = self._parts
        meeting = IslandMeeting(parts.mesh, self._clock, longest=self.longest, place=redacted(self._islands.url))
        specs = trained_specs(parts)
        homes = fragments_of(specs, self._islands.fragments)
        exchange = self._open(meeting)
        fresh = not self.state.island
        if fresh and parts.batches.step:
            raise StateUnfit(
                f"the state of step {parts.batches.step} was not made by an island, and islands begin alike, at step "
                "0. Trying again does not help: start a new run; to begin from its weights, import them into a new "
                "store (`elastic3d ckpt export`, `elastic3d ckpt import`)"
            )
        mine = setup_of(parts, self._islands, specs, initial=fresh)
        meeting.lead(lambda: check_same(mine, self._common(exchange, mine), exchange.place))
        self._outer = OuterParameters(
            parts=parts, islands=self._islands, state=self.state, homes=homes, exchange=exchange, meeting=meeting
        )
        if fresh:
            self.state.begin(parts.model)
            self.state.token = meeting.lead(new_token)
            return self._join("")
        behind = meeting.lead(lambda: self._behind(exchange))
        if behind:
            return self._join(behind)
        meeting.lead(lambda: exchange.come_back(self.state.island))
        left = (self.state.outer + 1) * self._islands.period - parts.batches.step
        if left < self._islands.overlap:
            # The parameters are not those any more of which the delta was made.
            self._send_beside(self._outer.kept(self.state.outer + 1))
        elif left and left == self._islands.overlap:
            self._begin_exchange()
        if left == 0:
            return self._outer_step()
        parts.batches.reach = (self.state.outer + 1) * self._islands.period
        return None

    def due(self, step: int) -> bool:
        """Return whether an exchange or an outer step follows an inner step; no collective."""
        period = self._islands.period
        return step % period in (0, period - self._islands.overlap)

    def made(self) -> Moved | None:
        """Begin the exchange, or take the outer step that is due; return where to go on, None from there."""
        if self._parts.batches.step % self._islands.period == 0:
            return self._outer_step()
        self._begin_exchange()
        return None

    def _common(self, exchange: Exchange, mine: Setup) -> Setup:
        """Return what all islands have in common, which is this one's if it is the first."""
        return exchange.setup(mine)

    def leave(self, why: str) -> None:
        """Have the others wait for this island no longer."""
        if self._background is not None:
            self._background.stop()
        if self._outer is not None and self.state.island:
            exchange, island = self._outer.exchange, self.state.island
            self._outer.meeting.lead(lambda: exchange.leave(island, why))

    def _open(self, meeting: IslandMeeting) -> Exchange:
        """Return the exchange; rank 0 tries the store out, and makes it, before the others come."""
        opened: list[Exchange] = []
        ranks = self._parts.mesh.layout.world
        for turn in (True, False):
            if turn == (self._parts.mesh.rank == 0):
                meeting.all(lambda: opened.append(open_exchange(self._islands, ranks=ranks)))
            else:
                meeting.all(lambda: None)
        return opened[0]

    def _behind(self, exchange: Exchange) -> str:
        """Return in words why this island's state is not gone on from, "" where it is: all records merge its work."""
        island, outer = self.state.island, self.state.outer
        newest = exchange.newest()
        if newest is None or newest.outer < outer:
            there = "no outer step" if newest is None else f"outer step {newest.outer}"
            raise StateUnfit(
                f"this island's state is of outer step {outer}, and {exchange.place} holds {there}: it is not the "
                "store that it was made with. Trying again does not help: give it that one, or start a new run"
            )
        for number in range(outer, newest.outer + 1):
            record = exchange.sealed(number)
            if record is None:
                return f"the record of outer step {number} is gone"
            if number > outer and not record.merges(island):
                return f"outer step {number} was sealed without it"
            if number > outer and not exchange.deltas_from(number):
                return f"the deltas of outer step {number} were deleted"
            if island not in record.members:
                return f"it is no member since outer step {number}"
        return ""

    def _join(self, why: str) -> Moved:
        """Be admitted, and begin a round from the outer parameters. why: it is behind, "" for one that is new."""
        assert self._outer is not None
        outer, mesh = self._outer, self._parts.mesh
        if why and not mesh.rank:
            process_log().emit("island.behind", island=self.state.island, outer=self.state.outer, detail=why)
        asking = Admission(exchange=outer.exchange, islands=self._islands, name=self._name, token=self.state.token)
        outer.meeting.lead(lambda: self._ask(asking, why))

        def look(waited: float) -> Any | None:
            record = asking.look(waited)
            return None if record is None else [asking.island, to_json(record)]

        self.state.island, data = outer.meeting.first(look)
        record = from_json(Sealed, data)
        moved = self._begin_at(record)
        self._hand_out(record)
        detail = f"it was behind: {why}" if why else "it is new"
        if not mesh.rank:
            process_log().emit(
                "island.joined", island=self.state.island, outer=record.outer, step=moved.step, detail=detail
            )
        return moved

    def _begin_at(self, record: Sealed) -> Moved:
        """Begin a round with the outer parameters of a record alone."""
        assert self._outer is not None
        model, left_at = self._parts.model, self._parts.batches.step
        self._outer.reach(record.outer)
        reshard(model)
        self.state.give(model)
        step = record.outer * self._islands.period
        self._begin_anew(step)
        return Moved(left_at=left_at, step=step)

    def _ask(self, asking: Admission, why: str) -> None:
        """Ask to be admitted; nobody waits any more for the island that this one was before."""
        if self.state.island:
            asking.exchange.leave(self.state.island, why)
        asking.ask(after=name_and_number(self.state.island)[1] if self.state.island else 0)

    def _begin_anew(self, step: int) -> None:
        """Have the inner optimizer begin anew, and the schedule be where it is after so many steps."""
        parts = self._parts
        parts.optimizer.state.clear()
        facts.set_optimizer_groups(parts.optimizer, self._groups)
        facts.set_schedule_state(parts.schedule, self._schedule)
        if parts.schedule is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that no optimizer step came before
                for _ in range(step):
                    parts.schedule.step()
        parts.batches.step = step

    def _hand_out(self, record: Sealed) -> None:
        """Take the chunk of the next round."""
        batches, period = self._parts.batches, self._islands.period
        order = batches.order
        here, size = order.positions(batches.step)[0], period * order.global_batch
        batches.order = order.slicing(here, record.members[self.state.island] * size)
        batches.take(batches.share)
        batches.reach = batches.step + period

    def _begin_exchange(self) -> None:
        """Compute this island's delta, and have it exchanged while inner steps go on."""
        assert self._outer is not None
        reshard(self._parts.model)
        outer = self.state.outer + 1
        own = self._outer.deltas(outer)
        self._check_finite(own, outer)
        self._send_beside(own)

    def _send_beside(self, own: Mapping[str, torch.Tensor]) -> None:
        """Exchange a delta in the background."""
        assert self._outer is not None
        token = self._outer.meeting.lead(new_token)
        self._background = BackgroundExchange(self._outer, own, token=token, clock=self._clock)
        self._background.start()

    def _outer_step(self) -> Moved | None:
        """Take the outer step that is due, whose deltas were exchanged since `overlap` steps, or are now."""
        assert self._outer is not None
        parameters, parts, mesh = self._outer, self._parts, self._parts.mesh
        begun, outer = self._clock.monotonic(), self.state.outer + 1
        reshard(parts.model)
        try:
            record, sent, read = self._exchanged(outer) if self._islands.overlap else self._exchange(outer)
        except Deleted:
            return self._join(f"the deltas of outer step {outer} were deleted")
        if not record.merges(self.state.island):
            return self._join(f"outer step {outer} was sealed without it")
        self.state.give(parts.model, parameters.names(outer), own_share=self._islands.own_share)
        if self.state.island not in record.members:
            return self._join(f"it was given up before outer step {outer}")
        self._hand_out(record)
        if self._writes_base(record):
            parameters.give_base()
        if mesh.rank == 0:
            process_log().emit(
                "island.merged",
                island=self.state.island,
                outer=outer,
                step=outer * self._islands.period,
                islands=[one.island for one in record.merged],
                lost=list(record.lost),
                sent=sent,
                read=read,
                seconds=round(self._clock.monotonic() - begun, 3),
            )
        return None

    def _exchange(self, outer: int) -> tuple[Sealed, int, int]:
        """Write this island's delta, seal the outer step or read how it was, and take it where it merges that delta.

        Return the record, and how many bytes were written by all ranks and read by this one. Deleted as `take`.
        """
        assert self._outer is not None
        parameters = self._outer
        own, sent, mine = None, None, False
        if not parameters.meeting.lead(lambda: parameters.exchange.sealed(outer) is not None):
            own = parameters.deltas(outer)
            self._check_finite(own, outer)
            sent, mine = parameters.send(outer, own)
        waiting = SealedStep(self._islands, parameters.exchange, outer, self.state.island)
        record = from_json(Sealed, parameters.meeting.first(waiting.look))
        merges = record.merges(self.state.island)
        read = parameters.take(record, own if mine else None) if merges else 0
        return record, sent.bytes if sent is not None and mine else 0, read

    def _exchanged(self, outer: int) -> tuple[Sealed, int, int]:
        """Wait until the exchange in the background is over, and take the outer step; return as `_exchange` does."""
        assert self._outer is not None
        assert self._background is not None
        background, self._background = self._background, None
        try:
            self._outer.meeting.over(background.over)
        except Deleted as error:
            self._outer.check_deleted(outer, error)
            raise
        finally:
            background.stop()
        assert background.record is not None
        if background.record.merges(self.state.island):
            self._outer.move(background.record, background.totals)
        return background.record, background.sent, background.read

    def _check_finite(self, deltas: Mapping[str, torch.Tensor], outer: int) -> None:
        """Raise NotFinite where this island would spoil the outer parameters of all."""
        assert self._outer is not None
        wrong = next((name for name, one in deltas.items() if not bool(local(one).isfinite().all())), "")
        wrong = next(filter(None, self._outer.meeting.all(lambda: wrong)), "")
        if wrong:
            raise NotFinite(
                f"parameter {wrong} of island {self.state.island} is not finite before outer step {outer}, and is not "
                "merged: the other islands go on without it. Trying again does not help unless the step that made it "
                'so is skipped (Health(numerics="skip")); a job without this state joins anew'
            )

    def _writes_base(self, record: Sealed) -> bool:
        """Return whether it is this island that puts the outer parameters into the store."""
        if not record.admitted and record.outer % (BASES * self._islands.fragments):
            return False
        return record.merged[record.outer % len(record.merged)].island == self.state.island
