"""Audits on one rank: steps in which other columns repeat micro-batches, and what follows where two do not agree.

In an audited step every column also runs micro-batches of another one (`health/audit`), whose gradients are dropped.
When the passes are over, all ranks compare what they came to. Where two ranks of one place differ, the step is not
made yet: every column loads the micro-batch itself and repeats it, and `health/hearing` finds who computed wrongly. All
of it is the same on every rank, because all of them judge the same statements.

| finding | what follows |
|---|---|
| transient | the step's sums are dropped and its passes made again |
| persistent, or the same rank a second time within an hour | no update: the rank is reported, and its port ends it |
| undecided | the passes are made again, once; if that does not help, training goes on, and says so |
| not deterministic | the run is audited no more under this script, and says so; training goes on |

The first step of a generation with newcomers begins with their exam (`health/exam`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from elastic3d.admission.check import Unfit
from elastic3d.admission.devices import product
from elastic3d.clock import Clock
from elastic3d.coverage import AuditCoverage
from elastic3d.data import Batch, Batches
from elastic3d.data.sources import nothing_more
from elastic3d.health import audit, exam
from elastic3d.health.audit import Audit
from elastic3d.health.audit_schedule import AuditTimes, AuditTurns, begun
from elastic3d.health.hearing import Compared, Finding, Hearing, Statement, decided, hear
from elastic3d.health.links import HOUR
from elastic3d.health.record import fingerprint
from elastic3d.parallel.assembly import Assembly
from elastic3d.parallel.witness import ChainLink, Witness
from elastic3d.planner import place_of, schedules
from elastic3d.port import Assignment, Audited, AuditReport, Port
from elastic3d.training import identity
from elastic3d.training.exchanges import Accusation, Exchanges, sums_again
from elastic3d.training.findings import AuditedRank, Convicted
from elastic3d.training.state_facts import Nondeterminism

if TYPE_CHECKING:
    from elastic3d.parallel.pipeline.passes import LossFunction

MOST_REDONE = 3
"""How often a step is made again at most for what looks like accidents."""

TESTS = 2
"""How often a product whose result is known has to be wrong: once may be an accident, of an honest device too."""

Losses = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispute:
    """Ranks of one place differ over one leaf. link: the first of the chain at which they do. said: by rank.

    elsewhere: ranks that differ from others at this very link at other places. Ranks which compute a layer together
    share its sums, so that whatever goes wrong in one's part shows on all of them at once, and cannot be told apart.
    """

    leaf: int
    link: ChainLink
    said: dict[int, int]
    elsewhere: tuple[int, ...] = ()


class Auditor:
    """Makes the passes of all steps of one generation, and audits some.

    peers: every rank. accidents: when a rank's device erred once in a generation before, by rank and rank 0's clock.
    clean: the newest step that audits vouch for: one in which all compared digests were equal at once vouches for the
    state from which it was computed, that of as many updates. What was computed a second time does not count, since
    whatever went wrong may have done so before. clean_nodes: the same by node.
    nondeterminism: that equal inputs do not give equal bits here, once that was seen; None before.
    """

    def __init__(
        self,
        turns: AuditTurns,
        assembly: Assembly,
        batches: Batches,
        *,
        peers: Sequence[AuditedRank],
        accidents: Mapping[int, float],
        exchanges: Exchanges,
        coverage: AuditCoverage,
        port: Port,
        clock: Clock,
    ) -> None:
        self._exchanges = exchanges
        self._turns, self._plan = turns, turns.schedule.newest
        self._assembly, self._batches, self._peers = assembly, batches, peers
        self._port, self._report, self._clock = port, port.audited, clock
        self._mesh = assembly.mesh
        self._accidents = dict(accidents)
        self._newcomers = tuple(rank for rank, peer in enumerate(peers) if peer.newcomer)
        self._examined = not self._newcomers
        self._coverage = coverage
        self._times = AuditTimes()
        self._agreed: float | None = None
        # When the step began, and whether it is audited; None while none is measured.
        self._step: tuple[float, bool] | None = None
        self.clean = 0
        self.clean_nodes: dict[str, int] = {}
        self.nondeterminism: Nondeterminism | None = None

    @property
    def coverage(self) -> AuditCoverage:
        """What is audited from now on."""
        return self._coverage if self.nondeterminism is None else AuditCoverage(off=str(self.nondeterminism))

    @property
    def cost(self) -> float | None:
        """What an audit costs in proportion to its rounds, None where that is not known; alike on all ranks."""
        return self._turns.schedule.known

    def resume(
        self,
        clean: int | None,
        clean_nodes: dict[str, int] | None,
        nondeterminism: Nondeterminism | None,
        cost: float | None,
    ) -> None:
        """Go on from what the state says: how far audits vouch, in all and by node, whether equal inputs gave unequal
        bits, and what audits cost. A collective; before the first step.

        That holds for the script with which it was seen: another one is audited again.
        """
        self.clean, self.clean_nodes = self.clean if clean is None else clean, clean_nodes or {}
        budget = self._turns.schedule.budget
        self._turns.schedule = begun(self._plan, budget=budget, step=self._batches.step, known=cost)
        self._coverage = replace(self._coverage, every=self._turns.schedule.newest.every)
        same = nondeterminism is not None and nondeterminism.script == identity.script_digest()
        # A script that is not the same file on every node must not have some ranks audit and others not.
        if self._mesh.highest(same) > 0:
            self.nondeterminism = nondeterminism
            self._batches.take(replace(self._batches.share, extra=nothing_more, heard=nothing_more))
            self._report(AuditReport(kind=Audited.OFF, detail=str(nondeterminism)))

    def run(self, batch: Batch, loss_fn: LossFunction) -> Losses:
        """Run a step's passes and return this rank's losses; Convicted if no update may be made of them.

        A collective of all ranks on audited steps.
        """
        if not self._examined and self.nondeterminism is None:
            self._examine(batch, loss_fn)
        self._examined = True
        share, seed = self._batches.share, self._batches.order.seed
        plan = self._turns.schedule.at(batch.step)
        audited = audit.audit_at(plan, batch.step, seed=seed, owners=share.owners, micro_batches=batch.count)
        self._step = self._clock.monotonic(), audited is not None
        if audited is None:
            return self._assembly.passes.run(batch, loss_fn)
        if self.nondeterminism is not None:
            # What others repeat was loaded already where it was seen in this generation.
            own, turns = batch.micro_batches[: share.rounds(batch.count)], share.turns(batch.step, batch.count)
            return self._assembly.passes.run(replace(batch, micro_batches=own, turns=turns), loss_fn)
        redone = 0
        while True:
            losses, accusation = self._audited(audited, batch, loss_fn)
            if accusation is None:
                if not redone:
                    self._vouch(batch.step)
                    self._follow(batch.step)
                return losses
            # What else follows takes its time, which is not that of an audit.
            self._step = None
            hearing, report, now = accusation.hearing, accusation.report, accusation.now
            self._report(report)
            match hearing.finding:
                case Finding.PERSISTENT:
                    self._convict(report)
                    return losses
                case Finding.TRANSIENT if redone < MOST_REDONE:
                    if any(now - self._accidents.get(rank, -HOUR) < HOUR for rank in hearing.culprits):
                        self._convict(replace(report, detail=f"{hearing.detail}; so it did within the last hour"))
                        return losses
                    self._accidents.update(dict.fromkeys(hearing.culprits, now))
                case Finding.NONDETERMINISTIC:
                    self._nondeterministic(hearing, batch)
                    self._report(replace(report, kind=Audited.INCONCLUSIVE))
                    return losses
                case _ if redone:
                    self._report(replace(report, kind=Audited.INCONCLUSIVE))
                    return losses
            self._report(replace(report, kind=Audited.REDONE))
            self._port.progress.begin_step(fingerprint(len(batch.micro_batches), batch.count))
            self._assembly.begin_again()
            redone += 1

    def made(self) -> None:
        """Take in that the step which began with `run` is made."""
        if self._step is not None:
            began, audited = self._step
            self._times.made(self._clock.monotonic() - began, audited=audited)
            self._step = None

    def _follow(self, step: int) -> None:
        """Have later audits follow what one costs, as all ranks know since this one.

        A stream that is loaded in another process cannot be asked for other micro-batches any more: the next generation
        begins with what is known.
        """
        before, cost = self._turns.schedule, self._agreed
        schedule = before.after(step, cost)
        if schedule.plans == before.plans or not self._batches.rereads:
            self._turns.schedule = replace(schedule, plans=before.plans)
            return
        (first, plan), self._turns.schedule = schedule.plans[-1], schedule
        if self._turns.asked >= first:
            self._batches.load_anew()
        self._coverage = replace(self._coverage, every=plan.every)
        detail = (
            f"an audited step takes {cost:.0%} longer than others: one in {plan.every} is from step {plan.since} on"
        )
        self._report(AuditReport(kind=Audited.PLANNED, step=step, detail=detail, coverage=self._coverage))

    def _vouch(self, step: int) -> None:
        self.clean, self.clean_nodes = step, dict.fromkeys(self.clean_nodes, step)

    def _examine(self, batch: Batch, loss_fn: LossFunction) -> None:
        """Have all columns compute one leaf of the step before it is made; Convicted if a rank is not let in."""
        new = tuple(sorted({self._peers[rank].node for rank in self._newcomers}))
        if not self._batches.rereads:
            detail = "a stream is read once, so that nobody can be asked to compute the same"
            self._report(AuditReport(kind=Audited.UNEXAMINED, step=batch.step, nodes=new, detail=detail))
            return
        leaf = exam.leaf_of(self._batches.order.seed, batch.step, batch.count // self._plan.leaf)
        dispute = self._compared({leaf: self._repeated(leaf, batch, loss_fn)})
        if dispute is None:
            self._vouch(batch.step)
            detail = f"every rank came to the same as all others of its place, in micro-batch {leaf * self._plan.leaf}"
            self._report(AuditReport(kind=Audited.EXAMINED, step=batch.step, nodes=new, detail=detail))
        else:
            hearing, _ = self._hear(dispute, batch, loss_fn)
            self._judge(hearing, dispute, batch)
        self._port.progress.begin_step(fingerprint(len(batch.micro_batches), batch.count))

    def _nondeterministic(self, hearing: Hearing, batch: Batch) -> None:
        self.nondeterminism = Nondeterminism(step=batch.step, script=identity.script_digest(), detail=hearing.detail)

    def _judge(self, hearing: Hearing, dispute: Dispute, batch: Batch) -> None:
        """Report who did not pass the exam, and end the generation for it; or say that nobody can be blamed."""
        refused = exam.refused_ranks(hearing, dispute.said, self._newcomers)
        report = self._reported(replace(hearing, culprits=refused or hearing.culprits), dispute, batch)
        self._report(replace(report, kind=Audited.UNFIT))
        if refused:
            # Nothing of a newcomer is in any state yet.
            old = set(refused) - set(self._newcomers)
            detail = f"before the first step of this generation, {report.detail}"
            self._convict(replace(report, detail=detail, clean=self.clean if old else -1))
        elif hearing.finding is not Finding.TRANSIENT:
            if hearing.finding is Finding.NONDETERMINISTIC:
                self._nondeterministic(hearing, batch)
            self._report(replace(report, kind=Audited.INCONCLUSIVE))

    def _convict(self, report: AuditReport) -> None:
        """Raise Convicted, unless nothing may be done about it: then training goes on, and says so."""
        if self._port.assignment.audit_acts:
            raise Convicted(replace(report, kind=Audited.LYING))
        detail = f"{report.detail}. act='log' has training go on with it"
        self._report(replace(report, kind=Audited.INCONCLUSIVE, detail=detail))

    def _audited(self, audited: Audit, batch: Batch, loss_fn: LossFunction) -> tuple[Losses, Accusation | None]:
        """Run the passes and complete the sums; return what follows from what all ranks together disagree on first.

        What was exchanged comes first: where that is wrong, passes are too.
        """
        owners, column = self._batches.share.owners, self._mesh.place.dp
        leaf, leaves = self._plan.leaf, batch.count // self._plan.leaf
        own = audited.audited(column, owners, leaves)
        others = audited.replays(column, owners, leaves)
        turns = (len(batch.micro_batches) - self._plan.extra) // leaf
        # (turn of this rank's passes, leaf that was computed in it)
        heard = [(owners.owner(one).number, one) for one in own]
        heard += [(turns + number, one) for number, one in enumerate(others)]
        witness = self._watched([turn for turn, _ in heard])
        self._exchanges.begin(batch.step)
        try:
            losses = self._passes(batch, loss_fn, witness)
            self._assembly.reduction.finish()
        finally:
            self._exchanges.end()
        accusation = self._exchanges.accused(batch.step, self.clean)
        if accusation is None:
            dispute = self._compared({one: witness.said[turn] for turn, one in heard})
            if dispute is not None:
                hearing, now = self._hear(dispute, batch, loss_fn)
                accusation = Accusation(hearing=hearing, report=self._reported(hearing, dispute, batch), now=now)
        return losses, accusation

    def _compared(self, chains: dict[int, dict[ChainLink, int]]) -> Dispute | None:
        """Return the first link of the lowest leaf over which two ranks of one place differ; a collective.

        A few bytes a leaf are exchanged where all agree, and everything that was said about the leaf where not.
        """
        short = {leaf: _summary(chain) for leaf, chain in chains.items()}
        rows = [json.loads(data) for data in self._mesh.gather(json.dumps([short, self._times.cost]).encode())]
        said, self._agreed = [row[0] for row in rows], rows[0][1]
        differ = [
            int(leaf)
            for ranks in self._places()
            for leaf in {leaf for rank in ranks for leaf in said[rank]}
            if len({said[rank][leaf] for rank in ranks if leaf in said[rank]}) > 1
        ]
        if not differ:
            return None
        leaf = min(differ)
        mine = [[*link, digest] for link, digest in chains.get(leaf, {}).items()]
        rows = [json.loads(data) for data in self._mesh.gather(json.dumps(mine).encode())]
        chains_of = [{ChainLink(*row[:4]): int(row[4]) for row in those} for those in rows]
        links: list[tuple[ChainLink, dict[int, int]]] = []
        for ranks in self._places():
            for link in {link for rank in ranks for link in chains_of[rank]}:
                digests = {rank: chains_of[rank][link] for rank in ranks if link in chains_of[rank]}
                if len(set(digests.values())) > 1:
                    links.append((link, digests))
        link, digests = min(links, key=lambda one: (one[0], min(one[1])))
        elsewhere = {rank for other, ranks in links if other == link for rank in ranks} - digests.keys()
        return Dispute(leaf=leaf, link=link, said=digests, elsewhere=tuple(sorted(elsewhere)))

    def _hear(self, dispute: Dispute, batch: Batch, loss_fn: LossFunction) -> tuple[Hearing, float]:
        """Have all columns repeat the leaf; return what follows, and rank 0's clock, which is everybody's."""
        began = self._clock.monotonic()
        digest = self._repeated(dispute.leaf, batch, loss_fn).get(dispute.link)
        now = self._clock.monotonic()
        said = [json.loads(data) for data in self._mesh.gather(json.dumps([digest, now, now - began]).encode())]
        place = self._place(min(dispute.said))
        statements = [self._statement(rank, digest) for rank, digest in dispute.said.items()]
        statements += [
            self._statement(rank, said[rank][0], repeated=True)
            for rank in range(len(said))
            if self._place(rank) == place and said[rank][0] is not None
        ]
        hearing = hear(statements)
        if hearing.finding is Finding.UNDECIDED:
            hearing = decided(hearing, statements, self._failed(dispute))
        parts = tuple(float(one[2]) for one in said)
        return self._together(replace(hearing, parts=parts), dispute), float(said[0][1])

    def _repeated(self, leaf: int, batch: Batch, loss_fn: LossFunction) -> dict[ChainLink, int]:
        """Compute a leaf of the step on every column, and return what this rank came to; its gradients do not count."""
        size = self._plan.leaf
        numbers = [leaf * size + number for number in range(size)] * (self._plan.hearing // size)
        witness = self._watched([0])
        self._port.progress.begin_step(fingerprint(self._plan.hearing, batch.count, 1))
        self._passes(self._batches.again(batch.step, numbers), loss_fn, witness)
        return witness.said[0]

    def _failed(self, dispute: Dispute) -> set[int]:
        """Have those that differ make a product whose result is known; return who errs in it each time."""
        mine, wrong = self._mesh.rank in dispute.said, True
        for _ in range(TESTS if mine else 0):
            try:
                product(str(self._port.device.torch_device))
                wrong = False
            except Unfit:
                pass
        said = [json.loads(data) for data in self._mesh.gather(json.dumps(mine and wrong).encode())]
        return {rank for rank, failed in enumerate(said) if failed}

    def _together(self, hearing: Hearing, dispute: Dispute) -> Hearing:
        """Return the hearing with all ranks whose sums the culprits share: any one of them may be at fault.

        They are on one node, which is what is set aside.
        """
        places = [self._column(rank) for rank in hearing.culprits]
        more = tuple(rank for rank in dispute.elsewhere if self._column(rank) in places)
        if not more:
            return hearing
        detail = f"{hearing.detail}; what ranks {', '.join(map(str, more))} add to the same sums cannot be told apart"
        return replace(hearing, culprits=tuple(sorted({*hearing.culprits, *more})), detail=detail)

    def _watched(self, turns: Sequence[int]) -> Witness:
        return Witness(turns, leaf=self._plan.leaf, stages=self._mesh.layout.stages)

    def _passes(self, batch: Batch, loss_fn: LossFunction, witness: Witness) -> Losses:
        self._assembly.watch(witness)
        try:
            return self._assembly.passes.run(batch, loss_fn)
        finally:
            self._assembly.watch(None)

    def _statement(self, rank: int, digest: int, *, repeated: bool = False) -> Statement:
        peer = self._peers[rank]
        return Statement(rank=rank, node=peer.node, device=peer.device, digest=digest, repeated=repeated)

    def _reported(self, hearing: Hearing, dispute: Dispute, batch: Batch) -> AuditReport:
        return AuditReport(
            kind=Audited.FAILED,
            step=batch.step,
            micro_batch=dispute.leaf * self._plan.leaf,
            compared=str(Compared.PASSES),
            where=dispute.link.name,
            finding=str(hearing.finding),
            ranks=hearing.culprits,
            nodes=tuple(sorted({self._peers[rank].node for rank in hearing.culprits})),
            detail=hearing.detail,
            clean=self.clean,
            seconds=max(hearing.parts, default=0.0),
            parts=hearing.parts,
        )

    def _column(self, rank: int) -> tuple[int, int]:
        place = place_of(rank, self._mesh.layout)
        return place.pp, place.dp

    def _place(self, rank: int) -> tuple[int, int]:
        place = place_of(rank, self._mesh.layout)
        return place.pp, place.tp

    def _places(self) -> list[list[int]]:
        """Return the ranks that compute the same part of the model, for each part."""
        places: dict[tuple[int, int], list[int]] = {}
        for rank in range(self._mesh.layout.world):
            places.setdefault(self._place(rank), []).append(rank)
        return list(places.values())


def clean_at(saved: int | None, step: int, assignment: Assignment) -> int | None:
    """Return the newest step that audits vouch for where a generation begins; None in a run without audits.

    saved: what the state says. One that says nothing was made without audits: nobody can doubt it for what they find
    later, so that it counts as vouched for at its own `step`. A generation that happens to be unfit for audits vouches
    for nothing, and passes on what was said before it.
    """
    if saved is None and assignment.audit:
        return step
    return saved


def begin(
    assembly: Assembly, batches: Batches, *, port: Port, clock: Clock
) -> tuple[Auditor | None, AuditCoverage | None]:
    """Return the auditor of a generation, None if it has none, and what is audited, None where nobody asks for audits.

    `batches` load what the audits need from here on.

    A collective where the run is to be audited; why it cannot be is reported.
    """
    mesh, order, budget = assembly.mesh, batches.order, port.assignment.audit
    if not budget:
        return None, None
    layout, device = mesh.layout, port.device
    again = sums_again(assembly, order.counts)
    own = port.assignment
    mine = json.dumps([own.node, device.described(), own.newcomer, own.accident, again, clock.monotonic()]).encode()
    said = [json.loads(data) for data in mesh.gather(mine)]
    peers = [AuditedRank(node=node, device=name, newcomer=new) for node, name, new, *_ in said]
    (*_, now), ages = said[0], [age for _, _, _, age, *_ in said]
    accidents = {rank: now - age for rank, age in enumerate(ages) if age is not None}
    names = sorted({peer.node for peer in peers})
    nodes = [names.index(peer.node) for peer in peers]
    plan = audit.plan(
        layout,
        budget=budget,
        blocks=max(1, len(assembly.parts[0].blocks)),
        counts=schedules.every_count(layout, order.counts, order.multiple),
        nodes=nodes,
        leaf=assembly.plan.leaf,
    )
    if why := assembly.unaudited() or plan.why:
        port.audited(AuditReport(kind=Audited.OFF, detail=why))
        return None, AuditCoverage(off=why)

    owners, turns = batches.share.owners, AuditTurns(begun(plan, budget=budget, step=batches.step))

    def extra(step: int, micro_batches: int) -> Sequence[int]:
        column, plan = mesh.place.dp, turns.ask(step)
        return audit.replayed(plan, step, seed=order.seed, owners=owners, column=column, micro_batches=micro_batches)

    def heard(step: int, micro_batches: int) -> Sequence[int]:
        return audit.heard(turns.schedule.at(step), step, seed=order.seed, owners=owners, micro_batches=micro_batches)

    batches.take(replace(batches.share, extra=extra, heard=heard))
    seen = audit.coverage(plan, layout, counts=order.counts, nodes=nodes)
    exchanges = Exchanges(assembly, peers=peers, seed=order.seed, port=port, clock=clock)
    seen = replace(seen, sums=min(share for *_, share, _ in said) if exchanges.adds_again else 0.0)
    made = Auditor(
        turns,
        assembly,
        batches,
        peers=peers,
        accidents=accidents,
        exchanges=exchanges,
        coverage=seen,
        port=port,
        clock=clock,
    )
    return made, seen


def _summary(chain: dict[ChainLink, int]) -> str:
    """Return a digest of all links of a chain, in 16 characters."""
    return blake3(repr(sorted(chain.items())).encode()).hexdigest(length=8)
