"""Pieces of this rank's updates that a rank of another node computes again, and those of others that this one does.

Every tenth step each rank keeps a piece of its state before the update (`health/recheck`), and sends it afterwards to
a rank of another node, which repeats the update of that piece. Whether it came to the same bits is said in the next
vote. If not, all ranks repeat it, and `health/hearing` finds who was wrong, before the next update.

Costs at most 1 MiB sent and 1.6 ms of one core (AdamW), each tenth step; 20 ms for the proof, once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.optim import Optimizer

from elastic3d.clock import Clock
from elastic3d.data.permutation import key
from elastic3d.health import recheck
from elastic3d.health.custody import Rotation
from elastic3d.health.hearing import Compared, Finding, Hearing, Statement, hear
from elastic3d.health.links import HOUR
from elastic3d.health.recheck import CannotRepeat, Piece
from elastic3d.health.record import fingerprint
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.state import local
from elastic3d.port import Audited, AuditReport, Port
from elastic3d.training.findings import AuditedRank, end, nodes_of

_EXCHANGE, _HEARING = 11, 12
"""Kinds of steps, for their fingerprints: those that end with an exchange of pieces, and the hearing over one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A piece that was kept before an update. step: the number of updates before it."""

    step: int
    shift: int
    parameter: torch.Tensor | None
    start: int
    stop: int
    piece: Piece | None


class Updates:
    """Has pieces of this rank's updates repeated by others, and repeats theirs."""

    def __init__(
        self,
        mesh: Mesh,
        optimizer: Optimizer,
        *,
        peers: Sequence[AuditedRank],
        seed: int,
        start: int,
        port: Port,
        clock: Clock,
    ) -> None:
        self._mesh, self._optimizer, self._peers = mesh, optimizer, peers
        self._port, self._clock, self._seed = port, clock, seed
        self._shifts = recheck.shifts_of([peer.node for peer in peers], [peer.device for peer in peers])
        self._parameters = [
            (number, parameter) for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        ]
        self._rotation: Rotation | None = None
        self._kept: _Kept | None = None
        self._room: torch.Tensor | None = None
        self._shift = 0
        self._accidents: dict[int, float] = {}
        self._proved = self._unfit_told = False
        self.differs = False
        self._mine = self._theirs = 0
        self._compared: int | None = None
        if not self._shifts:
            self._off("there is no other node with a device of the same kind")
        # The newest state from which an update was computed of which all pieces came to the same bits again.
        self._clean = start

    def keep(self, step: int) -> None:
        """Keep a piece of what is to be updated, if it is time."""
        shift = recheck.shift_at(step, self._shifts, seed=self._seed)
        if shift is None:
            return
        if not self._proved and not self._prove():
            return
        assert self._rotation is not None
        self._kept = _Kept(step=step, shift=shift, parameter=None, start=0, stop=0, piece=None)
        stretch = self._rotation.next(recheck.numbers_in(self._optimizer))
        if stretch is None:
            return
        group, parameter = self._parameters[stretch.index]
        try:
            piece = recheck.cut(self._optimizer, group, parameter, stretch.start, stretch.stop)
        except CannotRepeat as error:
            self._unfit(error)
            return
        self._kept = replace(self._kept, parameter=parameter, start=stretch.start, stop=stretch.stop, piece=piece)

    def exchange(self) -> None:
        """Send the piece that was kept, receive another rank's, and repeat that; a collective where one was kept."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        size = recheck.HEADER + recheck.BYTES
        room = torch.zeros(size, dtype=torch.uint8)
        self._mine = 0
        if kept.piece is not None and kept.parameter is not None:
            after = recheck.digests_after(self._optimizer, kept.parameter, kept.start, kept.stop)
            self._mine = recheck.one_digest(after)
            try:
                room = recheck.pack(kept.piece, after, size)
            except CannotRepeat as error:
                self._unfit(error)
        self._port.progress.begin_step(fingerprint(_EXCHANGE))
        self._room, self._shift, self._compared = room, kept.shift, kept.step
        received = recheck.unpack(self._mesh.shifted(room, kept.shift), self._mesh.device)
        if received is not None:
            piece, said = received
            self._theirs = recheck.one_digest(recheck.recomputed(self._optimizer, piece))
            self.differs = self._theirs != recheck.one_digest(said)

    def agreed(self) -> None:
        """Note that no rank disputes the last exchange, if there was one."""
        if self._compared is not None:
            self._clean, self._compared = self._compared, None

    def hear(self, disputed: Sequence[int], step: int) -> None:
        """Have all ranks repeat the piece over which two differ; Convicted if the state that was made of it is wrong.

        disputed: ranks that came to another result than those whose piece they repeated. step: the number of updates
        made, of which the last is the one in question. A collective.
        """
        assert self._room is not None
        self.differs, self._compared = False, None
        witness = min(disputed)
        world = self._mesh.layout.world
        owner = (witness - self._shift) % world
        self._port.progress.begin_step(fingerprint(_HEARING))
        received = recheck.unpack(self._mesh.from_rank(self._room, owner), self._mesh.device)
        again = 0
        if received is not None:
            again = recheck.one_digest(recheck.recomputed(self._optimizer, received[0]))
        now = self._clock.monotonic()
        mine = json.dumps([self._mine, self._theirs, again, now]).encode()
        said = [json.loads(data) for data in self._mesh.gather(mine)]
        statements = [
            self._statement(owner, said[owner][0]),
            self._statement(witness, said[witness][1]),
            *(
                self._statement(rank, said[rank][2], repeated=True)
                for rank in range(world)
                if self._peers[rank].device == self._peers[owner].device
            ),
        ]
        self._judge(hear(statements), owner, step, float(said[0][3]))

    def _judge(self, hearing: Hearing, owner: int, step: int, now: float) -> None:
        """Report what a hearing found, and end what is to end."""
        culprits = hearing.culprits
        again = any(now - self._accidents.get(rank, -HOUR) < HOUR for rank in culprits)
        self._accidents.update(dict.fromkeys(culprits, now))
        persistent = hearing.finding is Finding.PERSISTENT or (hearing.finding is Finding.TRANSIENT and again)
        report = AuditReport(
            kind=Audited.LYING if persistent else Audited.MISCALCULATED,
            step=step - 1,
            compared=str(Compared.UPDATE),
            where="the optimizer's update",
            finding=str(hearing.finding),
            ranks=culprits,
            nodes=nodes_of(culprits, self._peers),
            detail=f"a piece of rank {owner}'s update was computed again: {hearing.detail}",
            clean=self._clean if persistent else step - 1,
        )
        if hearing.finding is Finding.NONDETERMINISTIC:
            self._shifts = ()
        if culprits and owner not in culprits and not persistent:
            # It was the one that repeated it: no state is wrong.
            self._port.audited(replace(report, acted=False))
            return
        end(self._port, report, certain=bool(culprits))

    def _statement(self, rank: int, digest: int, *, repeated: bool = False) -> Statement:
        peer = self._peers[rank]
        return Statement(rank=rank, node=peer.node, device=peer.device, digest=digest, repeated=repeated)

    def _unfit(self, why: CannotRepeat) -> None:
        """Say once that a piece of this rank's updates cannot be repeated."""
        if not self._unfit_told:
            self._unfit_told = True
            mine = (self._port.assignment.rank,)
            detail = f"a piece of this rank's updates is computed by nobody a second time: {why}"
            self._port.audited(AuditReport(kind=Audited.UNCHECKED, where="updates", ranks=mine, detail=detail))

    def _off(self, why: str) -> None:
        """Say that no updates of any rank are checked; every rank says it."""
        detail = f"what a rank makes of its gradients is computed by nobody a second time: {why}"
        self._port.audited(AuditReport(kind=Audited.UNCHECKED, where="updates", detail=detail))

    def _prove(self) -> bool:
        """Prove once that pieces come to the bits of the whole, on every rank; else say why nothing is checked."""
        why = ""
        try:
            recheck.proved(self._optimizer, self._mesh.device)
        except CannotRepeat as unfit:
            why = str(unfit)
        self._port.progress.begin_step(fingerprint(_EXCHANGE, 1))
        reasons = [text.decode() for text in self._mesh.gather(why.encode())]
        why = next(filter(None, reasons), "")
        self._proved = True
        if why:
            self._shifts = ()
            self._off(why)
            return False
        sizes = [local(parameter).numel() for _, parameter in self._parameters]
        self._rotation = Rotation(sizes, int(key("recheck", self._seed, self._port.assignment.rank) % (1 << 48)))
        return True
