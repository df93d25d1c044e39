"""The outer parameters of one island: brought forward by what records name, and put into the store for newcomers."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch

from elastic3d.errors import StateError
from elastic3d.islands import tensors
from elastic3d.islands.exchange import Exchange
from elastic3d.islands.fragments import turn_of
from elastic3d.islands.meeting import Deleted, IslandMeeting
from elastic3d.islands.options import Islands
from elastic3d.islands.outer import add_up, outer_step
from elastic3d.islands.parts import IslandParts
from elastic3d.islands.record import Sealed, SentDelta
from elastic3d.islands.state import IslandState
from elastic3d.parallel.state import local
from elastic3d.values import from_json, to_json

_ANCHOR, _MOMENTUM = "anchor/", "momentum/"


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterParameters:
    """Moves `state` from one outer step to the next. homes: the fragment of each parameter.

    All methods are collectives.
    """

    parts: IslandParts
    islands: Islands
    state: IslandState
    homes: dict[str, int]
    exchange: Exchange
    meeting: IslandMeeting

    def names(self, outer: int) -> list[str]:
        """Return the parameters of this rank that an outer step merges, in order."""
        turn = turn_of(outer, self.islands.fragments)
        return [name for name in self.state.anchors if self.homes[name] == turn]

    def deltas(self, outer: int) -> dict[str, torch.Tensor]:
        """Return how far this rank's parameters have moved since the last outer step that merged them: minus that.

        Where deltas are exchanged in the background, those that the state keeps.
        """
        parameters = dict(self.parts.model.named_parameters())
        anchors = {name: self.state.anchors[name] for name in self.names(outer)}
        moved = self.kept(outer) if self.state.sent else tensors.rooms_like(anchors.items())
        for name, room in moved.items():
            torch.sub(local(anchors[name]), local(parameters[name]), out=local(room))
        return moved

    def kept(self, outer: int) -> dict[str, torch.Tensor]:
        """Return the deltas of an outer step that the state has kept since they were computed."""
        return {name: self.state.sent[name] for name in self.names(outer)}

    def send(self, outer: int, deltas: dict[str, torch.Tensor]) -> tuple[SentDelta, bool]:
        """Write a delta, unless it is there; return what is there of it, and whether it is this one."""
        island, mesh = self.state.island, self.parts.mesh

        def place() -> str:
            there = self.exchange.sent_by(outer, island) is not None
            return "" if there else self.exchange.delta_folder(outer, island, secrets.token_hex(4))

        folder = self.meeting.lead(place)
        written = 0
        if folder:
            store = self.exchange.folder(folder)
            written = sum(self.meeting.all(lambda: tensors.write(store, mesh, deltas, outer=outer)))

        def say() -> object:
            if not folder:
                return to_json(self.exchange.sent_by(outer, island))
            whole = tensors.complete(self.exchange.folder(folder), mesh, outer=outer)
            sent = SentDelta(island=island, folder=folder, checkpoint=whole.checkpoint, root=whole.root, bytes=written)
            return to_json(self.exchange.send(outer, sent))

        sent = from_json(SentDelta, self.meeting.lead(say))
        return sent, sent.folder == folder

    def take(self, record: Sealed, own: dict[str, torch.Tensor] | None = None) -> int:
        """Take the outer step of a record; return the bytes that this rank read.

        own: this island's own delta, None where the store's is to be read. Deleted where the deltas are not there any
        more; StateError where one is damaged.
        """
        names, nbytes = self.names(record.outer), 0
        totals: dict[str, torch.Tensor] = {}
        for sent in record.merged:
            deltas = own
            if own is None or sent.island != self.state.island:
                deltas = tensors.rooms_like((name, self.state.anchors[name]) for name in names)
                nbytes += self.read(record.outer, sent, deltas)
            assert deltas is not None
            for name in names:
                totals[name] = add_up(totals.get(name), local(deltas[name]))
        self.move(record, totals)
        return nbytes

    def move(self, record: Sealed, totals: dict[str, torch.Tensor]) -> None:
        """Move this rank's outer parameters by the sums of all deltas of a record, which are overwritten."""
        assert record.outer == self.state.outer + 1, (record.outer, self.state.outer)
        lr, mu = self.islands.rates
        for name, total in totals.items():
            momentum = self.state.momenta.get(name)
            outer_step(
                local(self.state.anchors[name]),
                None if momentum is None else local(momentum),
                total,
                len(record.merged),
                lr=lr,
                mu=mu,
            )
        self.state.outer = record.outer

    def read(self, outer: int, sent: SentDelta, into: dict[str, torch.Tensor]) -> int:
        """Read this rank's part of a delta; return its bytes. Deleted and StateError as `take`."""
        store, device = self.exchange.folder(sent.folder), self.parts.mesh.computes_on
        try:
            return int(
                self.meeting.all(lambda: tensors.read(store, sent.checkpoint, into, device))[self.parts.mesh.rank]
            )
        except Deleted as error:
            self.check_deleted(outer, error)
            raise

    def check_deleted(self, outer: int, error: Deleted) -> None:
        """Raise StateError where a delta could not be read although those of its outer step were not deleted.

        Whoever deletes them has put newer outer parameters there before, and may not be through yet.
        """

        def kept() -> bool:
            if not self.exchange.deltas_from(outer):
                return False
            base = self.exchange.base()
            return base is None or base[0] < outer

        if self.meeting.lead(kept):
            raise self.meeting.damaged(error) from error

    def give_base(self) -> None:
        """Put the outer parameters into the store, and delete what nobody needs any more."""
        mesh, outer = self.parts.mesh, self.state.outer
        folder = self.meeting.lead(lambda: self.exchange.base_folder(outer, secrets.token_hex(4)))
        store = self.exchange.folder(folder)
        self.meeting.all(lambda: tensors.write(store, mesh, self._kept(), outer=outer))

        def say() -> None:
            whole = tensors.complete(store, mesh, outer=outer)
            base = SentDelta(island=self.state.island, folder=folder, checkpoint=whole.checkpoint, root=whole.root)
            self.exchange.give_base(outer, base)
            if self.islands.keep is not None:
                self.exchange.forget(outer, self.islands.keep)

        self.meeting.lead(say)

    def reach(self, outer: int) -> None:
        """Have the outer parameters after an outer step: from what this rank has, or a base, and the deltas since.

        StateError where neither leads there.
        """
        gone: int | None = None
        while self.state.outer < outer:
            newest = self.meeting.lead(lambda: to_json(self.exchange.base(outer)))
            at = -1 if newest is None else int(newest[0])
            try:
                if at > self.state.outer:
                    self._take_base(at, from_json(SentDelta, newest[1]))
                while self.state.outer < outer:
                    self.take(self.record(self.state.outer + 1))
            except Deleted:
                # Somebody has just deleted it, who has written newer ones before.
                if gone == at:
                    raise StateError(
                        f"the outer parameters after outer step {outer} are not in {self.exchange.place}: their deltas "
                        "were deleted, and no newer parameters are there yet. Trying again helps once another island "
                        "has written them"
                    ) from None
                gone = at

    def _take_base(self, outer: int, base: SentDelta) -> None:
        store, kept, device = self.exchange.folder(base.folder), self._kept(), self.parts.mesh.computes_on
        self.meeting.all(lambda: tensors.read(store, base.checkpoint, kept, device))
        self.state.outer = outer

    def record(self, outer: int) -> Sealed:
        """Return the record of an outer step that is sealed."""
        data = self.meeting.lead(lambda: to_json(self.exchange.sealed(outer)))
        if data is None:
            raise StateError(
                f"outer step {outer} has no record in {self.exchange.place}, and later ones have: objects were removed "
                "there. Trying again does not help: restore them, or give the islands another store"
            )
        return from_json(Sealed, data)

    def _kept(self) -> dict[str, torch.Tensor]:
        anchors = {_ANCHOR + name: one for name, one in self.state.anchors.items()}
        return anchors | {_MOMENTUM + name: one for name, one in self.state.momenta.items()}
