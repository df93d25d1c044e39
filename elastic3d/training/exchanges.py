"""What ranks exchange in an audited step, looked at before its update: pieces of gradients, sums of them, and weights.

| what | how | by |
|---|---|---|
| a piece on its way | both ends digest all that goes from one rank to the other | `reduction/transit` |
| a gathered weight | owners digest their shards, and who has gathered them what it lets go of | `reduction/gathers` |
| a sum | a rank of another node adds up again a part of it, drawn anew each time | `reduction/fold_sample` |

What differs on its way between two ranks names neither of them at first (`health/links`); about a sum all ranks are
heard, as about a micro-batch. The step's passes are made again in any case, so that no update is made of it.

Costs, in audited steps alone: gradients and gathered weights are read once more where they leave and where they arrive,
and 1 MiB goes to another node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from elastic3d.clock import Clock
from elastic3d.data.permutation import key
from elastic3d.health import recheck
from elastic3d.health.digest import digest_of
from elastic3d.health.hearing import Compared, Hearing, Statement, hear
from elastic3d.health.links import FailedLinks, RankLink
from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.parallel.assembly import Assembly
from elastic3d.parallel.reduction.fold import Fold
from elastic3d.parallel.reduction.fold_sample import FoldSample, width_of
from elastic3d.parallel.reduction.transit import Transit
from elastic3d.port import Audited, AuditReport, Port
from elastic3d.training.findings import AuditedRank, nodes_of

BYTES = 1 << 20
"""Bytes of pieces of which a part of a sum is added up again."""

ITEM = 4
"""Bytes of a number that is sent, at most."""

_HEADER = 1 << 10
_HEARING, _PUBLISHED = 13, 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Accusation:
    """What follows from something that differs. now: rank 0's clock, which is everybody's."""

    hearing: Hearing
    report: AuditReport
    now: float


@dataclass(frozen=True, slots=True)
class _Said:
    """What one rank says of a step. sent: by whom pieces were sent that arrived otherwise. gathered: (owner, unit) of
    weights that it held otherwise. sum: what it adds up of another rank's is something else. took: seconds in which it
    found that out.
    """

    sent: list[int]
    gathered: list[tuple[int, str]]
    sum: bool
    now: float
    took: float


class Exchanges:
    """Looks at the exchanges of one rank in audited steps."""

    def __init__(
        self, assembly: Assembly, *, peers: Sequence[AuditedRank], seed: int, port: Port, clock: Clock
    ) -> None:
        self._assembly, self._peers, self._seed, self._port, self._clock = assembly, peers, seed, port, clock
        self._mesh = assembly.mesh
        self._links = FailedLinks([peer.node for peer in peers])
        self._shifts = recheck.shifts_of([peer.node for peer in peers], [peer.device for peer in peers])
        self._weights = True
        self._transit: Transit | None = None
        self._fold: Fold | None = None
        self._shift = 0
        self._room = torch.empty(0, dtype=torch.uint8)
        self._mine = self._theirs = 0

    @property
    def adds_again(self) -> bool:
        """Whether parts of sums are added up again: there are two nodes with devices of one kind."""
        return bool(self._shifts)

    def begin(self, step: int) -> None:
        """Look at what is exchanged from here on."""
        group = self._mesh.groups["dp"]
        self._transit = Transit(group.size(), self._mesh.device)
        for reduction in self._assembly.ordered:
            reduction.inspect(self._transit)
        self._fold = None
        if self._shifts:
            self._shift = self._shifts[int(key("fold shift", self._seed, step)) % len(self._shifts)]
            folds = [fold for reduction in self._assembly.ordered for fold in reduction.folds if fold.flat.chunk]
            draw = int(key("fold sample", self._seed, step, self._mesh.rank))
            self._fold = folds[draw % len(folds)]
            self._fold.sample = FoldSample(draw=draw // len(folds), most=BYTES)

    def end(self) -> None:
        """Look at no more."""
        for reduction in self._assembly.ordered:
            reduction.inspect(None)

    def accused(self, step: int, clean: int) -> Accusation | None:
        """Return what all ranks together find of what was exchanged since `begin`, None if nothing; a collective.

        To be asked when all sums are complete. clean: the newest step that audits vouch for.
        """
        assert self._transit is not None
        began = self._clock.monotonic()
        group = self._mesh.groups["dp"]
        ranks = dist.get_process_group_ranks(group)
        sent = [ranks[one] for one in self._transit.unlike(group, self._mesh.progress)]
        gathered = self._gathered() if self._weights else []
        differs = self._added_again() if self._shifts else False
        now = self._clock.monotonic()
        mine = json.dumps([sent, gathered, differs, now, now - began])
        rows = [_Said(*json.loads(data)) for data in self._mesh.gather(mine.encode())]
        weights = {
            RankLink(sender=owner, receiver=rank): unit
            for rank, said in enumerate(rows)
            for owner, unit in said.gathered
        }
        if all(RankLink(sender=rank, receiver=rank) in weights for rank in range(len(rows))):
            self._written()
            weights = {}
        pieces = {RankLink(sender=one, receiver=rank): "" for rank, said in enumerate(rows) for one in said.sent}
        parts = tuple(one.took for one in rows)
        report = AuditReport(kind=Audited.FAILED, step=step, clean=clean, detail="", seconds=max(parts), parts=parts)
        now = rows[0].now
        if weights or pieces:
            return self._of_links(weights, pieces, report, now)
        disputed = [rank for rank, said in enumerate(rows) if said.sum]
        return self._of_sum(min(disputed), report, now) if disputed else None

    def _gathered(self) -> list[tuple[int, str]]:
        """Return the owners and units of the weights that this rank held otherwise; a collective of its shards.

        A rank that has a copy of the state for itself gathers from itself alone.
        """
        gathers = [one for reduction in self._assembly.ordered for one in reduction.gathers]
        own = torch.stack([one.own() for one in gathers])
        ranks, published = [self._mesh.rank], [own]
        if self._mesh.layout.shards > 1:
            group = self._mesh.groups["shard" if self._mesh.layout.replicas > 1 else "dp"]
            ranks, published = dist.get_process_group_ranks(group), [torch.empty_like(own) for _ in range(group.size())]
            number = self._mesh.progress.enter(Axis.SHARD, fingerprint(_PUBLISHED, len(own)))
            dist.all_gather(published, own, group=group)
            self._mesh.progress.leave(Axis.SHARD, number)
        by_unit = zip(gathers, torch.stack(published).T, strict=True)
        return [(ranks[shard], one.flat.name) for one, numbers in by_unit for shard in one.unlike(numbers)]

    def _added_again(self) -> bool:
        """Have another rank add up a part of this rank's sum again, and do so for one; return whether that differs."""
        self._room = torch.zeros(_HEADER + BYTES, dtype=torch.uint8)
        fold, self._mine = self._fold, 0
        assert fold is not None
        assert fold.sample is not None
        pieces, total = fold.sample.pieces, fold.sample.part_of(fold.total)
        fold.sample = None
        if pieces is not None:
            self._mine = digest_of(total)
            header = [*pieces.shape, *(str(one.dtype).removeprefix("torch.") for one in (pieces, total)), self._mine]
            _put(self._room, json.dumps(header).encode())
            self._room[_HEADER : _HEADER + pieces.nbytes] = pieces.reshape(-1).view(torch.uint8).cpu()
        received = self._mesh.shifted(self._room, self._shift)
        said, self._theirs = self._sum_of(received)
        return said != self._theirs

    def _sum_of(self, room: torch.Tensor) -> tuple[int, int]:
        """Return what a rank said of the part of its sum, and what it comes to here; zeros for none."""
        header = room[:_HEADER].numpy().tobytes().rstrip(b"\0")
        if not header:
            return 0, 0
        count, numbers, rows, of, said = json.loads(header)
        dtype, size = getattr(torch, rows), count * numbers * getattr(torch, rows).itemsize
        pieces = room[_HEADER : _HEADER + size].clone().view(dtype).view(count, numbers).to(self._mesh.device)
        total = torch.empty(numbers, dtype=getattr(torch, of), device=self._mesh.device)
        self._mesh.computes_on.add_rows(total, pieces, True)
        return said, digest_of(total)

    def _of_links(
        self, weights: Mapping[RankLink, str], pieces: Mapping[RankLink, str], report: AuditReport, now: float
    ) -> Accusation:
        """Say which links failed; a link that has failed before with others may tell which of its ends it was."""
        hearing = self._links.hear({**pieces, **weights}.keys(), now)
        ranks = hearing.culprits or (self._holders(weights) if weights else _ends(pieces))
        if weights:
            link = min(weights)
            where = f"the weights of {weights[link]} that rank {link.receiver} has gathered from rank {link.sender}"
        else:
            where = f"a piece of a gradient {min(pieces)}"
        report = replace(report, compared=str(Compared.WEIGHTS if weights else Compared.TRANSIT))
        return Accusation(hearing=hearing, report=self._reported(report, hearing, ranks, where), now=now)

    def _holders(self, weights: Mapping[RankLink, str]) -> tuple[int, ...]:
        """Return whose gathered weights are wrong: of an owner with whom others agree, who does not; else also it."""
        named: set[int] = set()
        for owner in {link.sender for link in weights}:
            unlike = {link.receiver for link in weights if link.sender == owner}
            alone = len(unlike) == self._mesh.layout.shards
            named |= {owner} if alone else unlike
            if not alone and len(unlike - {owner}) >= self._mesh.layout.shards - 1:
                named.add(owner)
        return tuple(sorted(named))

    def _of_sum(self, witness: int, report: AuditReport, now: float) -> Accusation:
        """Have all ranks add up what two differ over; a collective."""
        world = self._mesh.layout.world
        owner = (witness - self._shift) % world
        self._port.progress.begin_step(fingerprint(_HEARING))
        said, again = self._sum_of(self._mesh.from_rank(self._room, owner))
        rows = [json.loads(data) for data in self._mesh.gather(json.dumps([self._theirs, again]).encode())]
        alike = [rank for rank in range(world) if self._peers[rank].device == self._peers[owner].device]
        hearing = hear(
            [
                self._statement(owner, said),
                self._statement(witness, rows[witness][0]),
                *(self._statement(rank, rows[rank][1], repeated=True) for rank in alike),
            ]
        )
        where = f"the sum of gradients that rank {owner} has added up"
        report = replace(report, compared=str(Compared.SUM))
        return Accusation(hearing=hearing, report=self._reported(report, hearing, hearing.culprits, where), now=now)

    def _reported(self, report: AuditReport, hearing: Hearing, ranks: Sequence[int], where: str) -> AuditReport:
        return replace(
            report,
            where=where,
            finding=str(hearing.finding),
            ranks=tuple(ranks),
            nodes=nodes_of(ranks, self._peers),
            detail=hearing.detail,
        )

    def _statement(self, rank: int, digest: int, *, repeated: bool = False) -> Statement:
        peer = self._peers[rank]
        return Statement(rank=rank, node=peer.node, device=peer.device, digest=digest, repeated=repeated)

    def _written(self) -> None:
        """Say that gathered weights are looked at no more: no rank has its own as they were."""
        self._weights = False
        detail = (
            "every rank's own weights changed while they were computed with, which the script does itself: gathered "
            "weights are not compared any more in this generation; write to parameters between steps only"
        )
        self._port.audited(AuditReport(kind=Audited.UNCHECKED, where="gathered weights", detail=detail))


def sums_again(assembly: Assembly, counts: Sequence[int]) -> float:
    """Return which share of this rank's sums another one adds up again in an audited step, 0.0 where it has none.

    On average over steps. counts: every number of micro-batches that a step may have.
    """
    sizes = [
        fold.flat.chunk // assembly.mesh.layout.replicas
        for reduction in assembly.ordered
        for fold in reduction.folds
        if fold.flat.chunk
    ]
    width = width_of(max(counts) // assembly.plan.leaf, ITEM, BYTES)
    return sum(min(size, width) for size in sizes) / len(sizes) / max(1, sum(sizes)) if sizes else 0.0


def _ends(links: Mapping[RankLink, str]) -> tuple[int, ...]:
    return tuple(sorted({end for link in links for end in (link.sender, link.receiver)}))


def _put(room: torch.Tensor, data: bytes) -> None:
    room[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
