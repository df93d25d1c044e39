"""Steps whose loss or gradient is not finite: what of, whose fault that is, and the same step made without it.

The vote says that a step is not finite, before its update. Its passes are then made again, each leaf of micro-batches
(mostly one) looked at by itself. All of it is the same on every rank, because all of them judge the same statements.

| what comes out | what follows |
|---|---|
| the numbers are finite now | whatever went wrong did so once: the step is made of the new passes |
| leaves are not finite again, and on other nodes they are | a device computes wrongly: it is named as audits name it |
| they are not finite wherever they are computed | the data: they are excluded, and the passes made without them |
| no leaf is, but their sum | nothing can be excluded: the update is skipped |

Others repeat a leaf where there are other data-parallel ranks, and the data set can be read a second time; else that a
rank comes to the same twice has to do. What is excluded is a hole in the run's order (`data/holes`), part of the state,
and part of the account of samples. A run that knows the holes from its beginning ends with the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from elastic3d.clock import SYSTEM
from elastic3d.data import Batch, Batches
from elastic3d.errors import NotFinite, UsageError
from elastic3d.health import audit
from elastic3d.health.hearing import Finding, Hearing, Statement, hear
from elastic3d.health.numerics import MOST_EMPTY, NonFinite, empty_before, leaves_of, members
from elastic3d.health.record import fingerprint
from elastic3d.parallel.assembly import Assembly
from elastic3d.parallel.vote import Outcome
from elastic3d.parallel.witness import ChainLink, Witness, all_finite
from elastic3d.planner import place_of
from elastic3d.port import Audited, AuditReport, Port
from elastic3d.training.findings import AuditedRank, Convicted
from elastic3d.training.loss import Loss

if TYPE_CHECKING:
    from elastic3d.parallel.pipeline.passes import LossFunction

HEARD = 4
"""Leaves of one step that others repeat: if all of these are the data's fault, so are the rest."""

Said = dict[ChainLink, int]
"""By link of the chain: 1 if it is finite, else 0."""


class Redoing:
    """Makes the steps of one generation again whose numbers are not finite.

    hearing: the fewest rounds in which all columns can run one leaf, 0 where nobody else can. why_not: what keeps them.
    """

    def __init__(
        self,
        policy: NonFinite,
        assembly: Assembly,
        batches: Batches,
        *,
        peers: Sequence[AuditedRank],
        port: Port,
        hearing: int,
        why_not: str,
    ) -> None:
        self._policy, self._assembly, self._batches, self._peers = policy, assembly, batches, peers
        self._port, self._hearing, self._why_not = port, hearing, why_not
        self._mesh, self._leaf = assembly.mesh, assembly.plan.leaf

    def settle(
        self, outcome: Outcome, loss: Loss, vote: Callable[[], Outcome], *, scaled: bool, clean: int
    ) -> tuple[Outcome, str]:
        """Return the outcome with which the step is made, and which samples were excluded and why, "" if none were.

        A collective where the step is not finite, and nothing elsewhere. `loss` takes the results of the new passes.
        vote: votes on the step once more. scaled: the compute dtype may overflow without anybody's fault, which only
        the gradients show. clean: the newest step that audits vouch for.

        NotFinite with the diagnosis, where the run is to stop; Convicted if a device computes wrongly.
        """
        if outcome.finite or outcome.empty or (scaled and not outcome.broken):
            return outcome, ""
        batch, passed = loss.batch, loss.passed
        assert passed is not None
        suspects = leaves_of(outcome.broken, self._leaf)
        loss.remade(*self._again(batch, passed, watched=True))
        outcome, said = vote(), self._said_by_all()
        leaves = self._unsound(said, scaled=scaled)
        if not leaves:
            if outcome.finite:
                self._once(batch, suspects)
            return outcome, ""
        leaves, why = self._heard(leaves, said, batch, passed, clean)
        if leaves:
            self._look_at_weights(batch, leaves)
            if self._policy is NonFinite.STOP:
                raise NotFinite(f"{self._named(batch, leaves)}: {why}. {_STOP}")
            self._batches.exclude(batch.step, members(leaves, self._leaf))
        loss.remade(*self._again(self._batches.counted_anew(batch), passed))
        return vote(), f"{self._named(batch, leaves)}: {why}" if leaves else ""

    def _again(
        self, batch: Batch, passed: LossFunction, *, watched: bool = False
    ) -> tuple[dict[int, torch.Tensor], Batch]:
        """Make a step's passes again; `self._witness` has what comes out of each leaf if they are watched."""
        self._assembly.begin_again()
        if batch.empty:
            return {}, batch
        self._port.progress.begin_step(fingerprint(len(batch.micro_batches), batch.count))
        if not watched:
            return self._assembly.passes.run(batch, passed), batch
        turns = range(len(batch.micro_batches) // self._leaf)
        return self._watched(turns, batch, passed), batch

    def _watched(self, turns: Sequence[int], batch: Batch, passed: LossFunction) -> dict[int, torch.Tensor]:
        self._witness = Witness(turns, leaf=self._leaf, stages=self._mesh.layout.stages, digest=all_finite)
        self._assembly.watch(self._witness)
        try:
            return self._assembly.passes.run(batch, passed)
        finally:
            self._assembly.watch(None)

    def _said_by_all(self) -> list[dict[int, Said]]:
        """Return by rank what was said of those of its leaves, by turn, that are not all finite; a collective."""
        mine = {
            turn: [[*link, sound] for link, sound in chain.items()]
            for turn, chain in self._witness.said.items()
            if not all(chain.values())
        }
        rows = [json.loads(data) for data in self._mesh.gather(json.dumps(mine).encode())]
        return [{int(turn): _chain(links) for turn, links in row.items()} for row in rows]

    def _unsound(self, said: Sequence[dict[int, Said]], *, scaled: bool) -> tuple[int, ...]:
        """Return the leaves of the step that are not finite, by what all ranks said of theirs."""
        share, excluded = self._batches.share, leaves_of(self._batches.order.excluded(self._batches.step), self._leaf)
        count = self._batches.order.micro_batches_at(self._batches.step) // self._leaf
        leaves = set()
        for rank, turns in enumerate(said):
            own = replace(share, index=self._column(rank)).leaves(count * self._leaf)
            for turn, chain in turns.items():
                # Whatever comes after its own belongs to others, or fills.
                leaf = own[turn] if turn < len(own) else count
                bad = [link for link, sound in chain.items() if not sound and (not scaled or self._is_loss(link))]
                if bad and leaf < count and leaf not in excluded:
                    leaves.add(leaf)
        return tuple(sorted(leaves))

    def _is_loss(self, link: ChainLink) -> bool:
        return link.back == 0 and link.place == self._mesh.layout.stages - 1

    def _heard(
        self,
        leaves: tuple[int, ...],
        said: Sequence[dict[int, Said]],
        batch: Batch,
        passed: LossFunction,
        clean: int,
    ) -> tuple[tuple[int, ...], str]:
        """Return the leaves that are not finite wherever they are computed, and how that is known; a collective."""
        if not self._hearing:
            return leaves, f"it came to the same when it was computed again ({self._why_not})"
        dp = self._mesh.layout.dp
        for leaf in leaves[:HEARD]:
            owner = self._batches.share.owners.owner(leaf)
            own = [self._column(rank) == owner.column for rank in range(len(said))]
            first = [chains.get(owner.number, {}) if one else {} for one, chains in zip(own, said, strict=True)]
            hearing, where = self._hear(leaf, first, batch, passed)
            if hearing.finding in (Finding.NOT_FINITE, Finding.AGREED):
                continue
            report = AuditReport(
                kind=Audited.FAILED,
                step=batch.step,
                micro_batch=leaf * self._leaf,
                where=where,
                finding=str(hearing.finding),
                ranks=hearing.culprits,
                nodes=self._nodes(hearing.culprits),
                detail=f"numbers that are not finite: {hearing.detail}",
                clean=clean,
                seconds=max(hearing.parts, default=0.0),
                parts=hearing.parts,
            )
            self._port.audited(report)
            if hearing.finding is Finding.PERSISTENT and self._port.assignment.audit_acts:
                raise Convicted(replace(report, kind=Audited.LYING))
            if hearing.finding is Finding.TRANSIENT:
                self._port.audited(replace(report, kind=Audited.REDONE))
                leaves = tuple(one for one in leaves if one != leaf)
            else:
                self._port.audited(replace(report, kind=Audited.INCONCLUSIVE))
        return leaves, f"ranks of {dp} columns, each by itself, came to the same"

    def _hear(self, leaf: int, first: Sequence[Said], batch: Batch, passed: LossFunction) -> tuple[Hearing, str]:
        """Have all columns repeat a leaf; return what follows, and the first link of the chain that ranks part at."""
        began = SYSTEM.monotonic()
        numbers = [leaf * self._leaf + inner for inner in range(self._leaf)] * (self._hearing // self._leaf)
        self._assembly.begin_again()
        self._port.progress.begin_step(fingerprint(self._hearing, batch.count, 1))
        self._watched([0], self._batches.again(batch.step, numbers), passed)
        mine = [[*link, sound] for link, sound in self._witness.said[0].items()]
        took = SYSTEM.monotonic() - began
        said = [json.loads(data) for data in self._mesh.gather(json.dumps([took, mine]).encode())]
        repeated, parts = [_chain(one[1]) for one in said], tuple(float(one[0]) for one in said)
        for link in sorted({link for chain in (*first, *repeated) for link in chain}):
            given = [self._statement(rank, chain[link]) for rank, chain in enumerate(first) if link in chain]
            given += [
                self._statement(rank, chain[link], repeated=True)
                for rank, chain in enumerate(repeated)
                if link in chain
            ]
            if len({one.digest for one in given}) > 1:
                return replace(hear(given), parts=parts), link.name
        return Hearing(finding=Finding.NOT_FINITE), ""

    def _statement(self, rank: int, sound: int, *, repeated: bool = False) -> Statement:
        peer = self._peers[rank]
        return Statement(
            rank=rank, node=peer.node, device=peer.device, digest=sound, finite=bool(sound), repeated=repeated
        )

    def _once(self, batch: Batch, leaves: tuple[int, ...]) -> None:
        """Report that the same passes came to finite numbers when they were made again."""
        columns = {self._batches.share.owners.owner(leaf).column for leaf in leaves}
        ranks = [rank for rank in range(self._mesh.layout.world) if self._column(rank) in columns]
        where = f"of micro-batches {list(members(leaves, self._leaf))}" if leaves else "of a gradient"
        detail = f"the numbers {where} were not finite, and are where the same passes were made again"
        self._port.audited(AuditReport(kind=Audited.REDONE, step=batch.step, nodes=self._nodes(ranks), detail=detail))

    def _look_at_weights(self, batch: Batch, leaves: tuple[int, ...]) -> None:
        """Raise NotFinite where it is no micro-batch's fault: a collective where all of a step are at fault."""
        order = self._batches.order
        dropped = len(leaves) * self._leaf + len(order.excluded(batch.step))
        if dropped < batch.count:
            return
        sound = [data == b"1" for data in self._mesh.gather(b"1" if self._assembly.weights_finite() else b"0")]
        if not all(sound):
            nodes = self._nodes([rank for rank, one in enumerate(sound) if not one])
            raise NotFinite(
                f"step {batch.step}: weights are not finite before it, on {', '.join(nodes)}, so that no micro-batch "
                f"can be. {_OLDER}"
            )
        if empty_before(order, batch.step, known=self._batches.untried) >= MOST_EMPTY:
            raise NotFinite(
                f"step {batch.step}: no micro-batch has come out finite for more than {MOST_EMPTY} steps in a row, "
                f"though the weights are: this is not single samples. {_OLDER}"
            )

    def _named(self, batch: Batch, leaves: tuple[int, ...]) -> str:
        numbers = members(leaves, self._leaf)
        order = self._batches.order
        samples = [sample for number in numbers for sample in order.micro_batch_samples(batch.step, number)]
        more = f" and {len(samples) - SHOWN} more" if len(samples) > SHOWN else ""
        return (
            f"step {batch.step}: the loss or the gradient of micro-batch {', '.join(map(str, numbers))} is not finite, "
            f"of {self._batches.called(samples[:SHOWN])}{more}"
        )

    def _column(self, rank: int) -> int:
        return place_of(rank, self._mesh.layout).dp

    def _nodes(self, ranks: Sequence[int]) -> tuple[str, ...]:
        return tuple(sorted({self._peers[rank].node for rank in ranks}))


SHOWN = 16
"""Samples that are named."""

_STOP = (
    "No update was made of it, and the state before it is kept. Trying again does not help: mend these samples, leave "
    'them out by run.batches(exclude=), or let Health(numerics="skip") do so'
)
_OLDER = (
    "Trying again does not help: go back to an older checkpoint with restore=, and look at the learning rate, the loss "
    "function and the data"
)


def begin(assembly: Assembly, batches: Batches, policy: NonFinite, *, port: Port) -> Redoing | None:
    """Return what makes a generation's steps again that are not finite; None where that is not asked for.

    A collective where it is. UsageError for a run of which nothing can be left out.
    """
    if policy not in (NonFinite.SKIP, NonFinite.STOP):
        return None
    mesh, layout = assembly.mesh, assembly.mesh.layout
    if why := assembly.unexcluded():
        raise UsageError(
            f'elastic3d.Health(numerics="{policy}") looks at each micro-batch by itself, but {why}; '
            'numerics="step" skips the whole update'
        )
    mine = json.dumps([port.assignment.node, port.device.described()]).encode()
    peers = [AuditedRank(node=node, device=name) for node, name in map(json.loads, mesh.gather(mine))]
    hearing, why_not = 0, ""
    if layout.dp == 1:
        why_not = "with dp=1 no other rank can repeat it"
    elif not batches.rereads:
        why_not = "a stream cannot be read a second time by others"
    else:
        blocks = max(1, len(assembly.parts[0].blocks))
        hearing = audit.hearing_rounds(layout, blocks=blocks, leaf=assembly.plan.leaf) or 0
        why_not = "" if hearing else f"the schedule of {layout} cannot run one leaf on every rank"
    return Redoing(policy, assembly, batches, peers=peers, port=port, hearing=hearing, why_not=why_not)


def _chain(rows: Sequence[Sequence[int | str]]) -> Said:
    return {ChainLink(int(one[0]), int(one[1]), int(one[2]), str(one[3])): int(one[4]) for one in rows}
