"""An island's part of the record, trained once more: its deltas have to come to the bits that were merged.

Nothing is written to the islands' store, and nobody is waited for: the deltas of the others are read there, so that one
process can prove what an island of any layout did. The run ends where the record of that island does.
"""

from __future__ import annotations

import torch

from elastic3d.errors import StateError, StateUnfit, UsageError
from elastic3d.islands import tensors
from elastic3d.islands.exchange import Exchange
from elastic3d.islands.member import IslandMember, Moved
from elastic3d.islands.record import Sealed, Setup
from elastic3d.log import process_log
from elastic3d.parallel.reduction.units import reshard
from elastic3d.parallel.state import local
from elastic3d.values import from_json, to_json


class ReplayedIsland(IslandMember):
    """The island `Islands(replay=)`, as the records have it."""

    def leave(self, why: str) -> None:
        """Do nothing: it is no member."""

    def _common(self, exchange: Exchange, mine: Setup) -> Setup:
        """Return what the islands have in common; UsageError where none has begun, and nothing is written there."""
        there = exchange.agreed()
        if there is None:
            raise UsageError(
                f"elastic3d.Islands(replay={self._islands.replay!r}): no island has begun in {exchange.place}; give "
                "the store that they share"
            )
        return there

    def _join(self, why: str) -> Moved:
        """Begin where the island did, from the outer parameters of then."""
        assert self._outer is not None
        outer = self._outer
        record = from_json(Sealed, outer.meeting.lead(lambda: to_json(self._admission(outer.exchange))))
        self.state.island = self._islands.replay
        moved = self._begin_at(record)
        self._go_on(record)
        return moved

    def _admission(self, exchange: Exchange) -> Sealed:
        """Return the record that admitted the island; UsageError where none did."""
        admitted: list[str] = []
        for record in exchange.records():
            if self._islands.replay in record.admitted:
                return record
            admitted += record.admitted
        raise UsageError(
            f"elastic3d.Islands(replay={self._islands.replay!r}): no outer step in {exchange.place} admitted it; those "
            f"that were are {', '.join(admitted) or 'none'}"
        )

    def _behind(self, exchange: Exchange) -> str:
        raise StateUnfit(
            "a replay begins where the island did, and a state was loaded that an island has made. Trying again does "
            "not help: give elastic3d.run no store=, and start the replay by hand or under a fresh rendezvous id"
        )

    def _begin_exchange(self) -> None:
        """Keep the delta until its outer step: nothing is sent."""
        assert self._outer is not None
        reshard(self._parts.model)
        self._outer.deltas(self.state.outer + 1)

    def _outer_step(self) -> Moved | None:
        """Compare the delta with the one that was merged, and take the outer step; end where there is none."""
        assert self._outer is not None
        parameters, parts, outer = self._outer, self._parts, self.state.outer + 1
        reshard(parts.model)
        record = parameters.record(outer)
        own = parameters.kept(outer) if self._islands.overlap else parameters.deltas(outer)
        merged = tensors.rooms_like(own.items())
        sent = next(one for one in record.merged if one.island == self.state.island)
        parameters.read(outer, sent, merged)
        unlike = next((name for name, one in own.items() if not torch.equal(local(one), local(merged[name]))), "")
        unlike = next(filter(None, parameters.meeting.all(lambda: unlike)), "")
        if unlike:
            raise StateError(
                f"the replay of island {self.state.island} came to other bits than were merged at outer step {outer}, "
                f"in parameter {unlike}. Trying again does not help: either this script, its data, the version of "
                "torch or the kind of device are not those of the run, or a device computed wrongly in one of the two"
            )
        parameters.take(record, own)
        self.state.give(parts.model, parameters.names(outer), own_share=self._islands.own_share)
        self._go_on(record)
        return None

    def _go_on(self, record: Sealed) -> None:
        """Take the chunk of the next round, or end where that was not merged."""
        assert self._outer is not None
        parameters, parts = self._outer, self._parts
        data = parameters.meeting.lead(lambda: to_json(parameters.exchange.sealed(record.outer + 1)))
        if data is not None and from_json(Sealed, data).merges(self.state.island):
            self._hand_out(record)
            return
        why = "it is the last one" if data is None else f"outer step {record.outer + 1} was sealed without it"
        parts.batches.stop(parts.batches.step)
        if not parts.mesh.rank:
            process_log().emit("island.replayed", island=self.state.island, outer=self.state.outer, detail=why)
