"""What a keeper writes to its event file: the one place that maps what happens to event names and fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic3d import output, threads
from elastic3d.clock import SYSTEM
from elastic3d.distrust import Distrust
from elastic3d.health.trouble import KNOWN
from elastic3d.log import LIMIT, EventLog, Level
from elastic3d.membership import events as m
from elastic3d.membership.stalls import Stall, Verdict, VerdictKind, suspected
from elastic3d.port import Audited, AuditReport
from elastic3d.values import Generation
from elastic3d.worker.processes import events as w

BLAMING = (Audited.LYING, Audited.UNFIT, Audited.SPLIT, Audited.MISCALCULATED)

WELL = (w.ExitKind.DONE, w.ExitKind.LEFT, w.ExitKind.MEASURED, w.ExitKind.STOPPED)


class Journal:
    """One node's event file, none where `folder` is None; events that people should know of go to stderr too.

    observe: called with each event and all its fields; must not raise or block.
    """

    def __init__(
        self,
        folder: str | None,
        run_id: str,
        node: str,
        *,
        limit: int = LIMIT,
        observe: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        path = Path(folder) / f"{node}-0.jsonl" if folder else None
        self._log = EventLog(path, limit=limit, observe=observe, run=run_id, node=node, slot=0)
        self._sealed = self._proposed = ""
        self._node = node
        self._distrusted: tuple[Distrust, ...] = ()
        self._etcd_lost_at: float | None = None
        self._failing = False
        self._unreachable: tuple[str, ...] = ()
        self._suspected: dict[int, None] = {}
        self._stalled = ""

    def emit(self, name: str, **fields: Any) -> None:
        """Write an event; of several checkpoints that fail in a row, only the first is shown."""
        self.emit_at(None, name, **fields)

    def emit_at(self, level: Level | None, name: str, **fields: Any) -> None:
        """Write an event at another level than the list of events gives it; None for that level."""
        again = self._failing and name == "checkpoint.failed"
        self._failing = (self._failing or name == "checkpoint.failed") and name != "checkpoint.mended"
        if again:
            level = Level.DEBUG
        self._log.emit_at(level, name, **fields)

    def said(self, event: w.EventSaid) -> None:
        """Write what a process of this node has shown, as of when it happened."""
        self._log.record(event.name, event.at, event.fields)

    def thread_failed(self, failure: threads.ThreadFailure) -> None:
        """Write the exception that ended a thread's work, with its traceback; flush it if the process ends too."""
        self._log.emit("thread.failed", **threads.fields(failure))
        if failure.edge is threads.Edge.PROCESS:
            self._log.flush(1.0)
            output.flush(1.0)

    def unreachable(self, ids: tuple[str, ...]) -> None:
        """Write which nodes this one can no longer connect to, and which it can again. ids: all out of reach now."""
        before, self._unreachable = self._unreachable, ids
        for id in ids:
            if id not in before:
                detail = "the trainers stand still, and its port does not answer: a firewall, a route, a cable?"
                self.emit("peer.unreachable", peer=id.partition("@")[0], detail=detail)
        for id in before:
            if id not in ids:
                self.emit("peer.reachable", peer=id.partition("@")[0])

    def concluded(self, verdict: Verdict) -> None:
        """Write why nothing moves, or what was done about slow nodes or memory, as this node found while it leads."""
        if verdict.kind is VerdictKind.SLOW:
            self._rebalanced(verdict)
            return
        if verdict.kind is VerdictKind.MEMORY:
            self._short(verdict)
            return
        about = {
            "fault": verdict.fault,
            "step": verdict.step,
            "confidence": verdict.confidence,
            "detail": verdict.detail,
            "waits": list(verdict.waits),
            "silent": [round(seconds, 3) for seconds in verdict.silent],
            "generation": int(verdict.key.partition(".")[0]),
        }
        if verdict.act or verdict.culprits:
            names = [id.partition("@")[0] for id in verdict.culprits]
            self.emit("rank.stuck", ranks=list(verdict.ranks), nodes=names, act=verdict.act, **about)
        else:
            self.emit("training.stalled", **about)

    def _short(self, verdict: Verdict) -> None:
        self.emit(
            "memory.short",
            rung=verdict.fault,
            ranks=list(verdict.ranks),
            nodes=[id.partition("@")[0] for id in verdict.culprits],
            step=verdict.step,
            act=verdict.act,
            detail=verdict.detail,
            generation=int(verdict.key.partition(".")[0]),
        )

    def _rebalanced(self, verdict: Verdict) -> None:
        self.emit(
            "layout.rebalanced",
            remedy=verdict.fault,
            step=verdict.step,
            nodes=[id.partition("@")[0] for id in verdict.culprits],
            ranks=list(verdict.ranks),
            act=verdict.act,
            before=verdict.before,
            after=verdict.after,
            rungs=list(verdict.rungs),
            detail=verdict.detail,
            generation=int(verdict.key.partition(".")[0]),
        )

    def _silent(self, stall: Stall) -> None:
        """Write which ranks of this node may hold the others up, each once."""
        if stall.key != self._stalled:
            self._stalled, self._suspected = stall.key, {}
        for rank in stall.ranks:
            if rank.rank not in self._suspected and suspected(rank):
                self._suspected[rank.rank] = None
                self.emit(
                    "rank.suspected",
                    step=rank.step,
                    phase=rank.phase,
                    seconds=rank.silent / 1000,
                    state=str(rank.state),
                    odd=rank.odd or None,
                    detail=rank.where or None,
                    generation=int(stall.key.partition(".")[0]),
                    rank=rank.rank,
                )

    def _moving(self, key: str) -> None:
        if key == self._stalled:
            # Of a generation that is over, nobody moves again: its stall is only taken back.
            for rank in self._suspected if key == self._sealed else ():
                self.emit("rank.recovered", generation=int(key.partition(".")[0]), rank=rank)
            self._suspected = {}

    def flush(self, patience: float) -> bool:
        """Wait until all events are written, at most `patience` seconds; return whether they are."""
        return self._log.flush(patience)

    def close(self) -> None:
        """Close the file."""
        self._log.close()

    def noted(self, event: m.Event) -> None:
        """Write what the watch says of generations, each once, and whether etcd works."""
        if isinstance(event, m.Listed) and event.rolled_back and event.tier is m.Tier.BOARD:
            self.emit("etcd.rolled_back", revision=event.revision)
        for item in event.items if isinstance(event, m.Listed) else (event,):
            match item:
                case m.GenerationPut() if item.generation.key != self._sealed and item.generation.nodes:
                    self._sealed = item.generation.key
                    self.emit("generation.sealed", **_shown(item.generation), leader=item.generation.leader)
                    self._distrust(item.generation)
                case m.ProposalPut() if item.proposal.generation.key != self._proposed:
                    formed = item.proposal.generation
                    self._proposed = formed.key
                    self.emit("generation.proposed", **_shown(formed), attempt=formed.attempt)
                case m.EtcdLost():
                    self._etcd_lost_at = SYSTEM.monotonic()
                    self.emit("etcd.lost", error=item.reason)
                case m.EtcdBack() if self._etcd_lost_at is not None:
                    self.emit("etcd.back", seconds=SYSTEM.monotonic() - self._etcd_lost_at)
                    self._etcd_lost_at = None
                case m.EtcdImpaired():
                    if item.reason:
                        self.emit("etcd.impaired", error=item.reason)
                    else:
                        self.emit("etcd.mended")
                case m.RanksSilent():
                    self._silent(item.stall)
                case m.RanksMoving():
                    self._moving(item.key)
                case m.CompactionRefused():
                    if item.reason:
                        self.emit("compaction.refused", error=item.reason)
                    else:
                        self.emit("compaction.resumed")
                case _:
                    pass

    def _distrust(self, generation: Generation) -> None:
        """Write which states are not gone on from, if this node has sealed a generation that is the first to know."""
        before, self._distrusted = self._distrusted, generation.distrusted
        spikes = {one.before: one.spike for one in generation.rollbacks}
        for rule in generation.distrusted if generation.leader == self._node else ():
            if rule not in before:
                why = "a device that computes wrongly took part in them, and nobody compared what it did"
                if rule.before in spikes:
                    why = f"they led to the spike of the loss in step {spikes[rule.before]}"
                detail = (
                    f"states of more than {rule.step} updates that were made in generations before {rule.before} are "
                    f"passed over, in memory and in the store: {why}; `restore=` may still name one"
                )
                self.emit(
                    "state.distrusted",
                    step=rule.step,
                    before=rule.before,
                    detail=detail,
                    generation=generation.number,
                )

    def trainer(
        self,
        event: w.Started | w.Restored | w.StepFinished | w.AuditHeard | w.TrainerExited,
        generation: int,
        rank: int,
    ) -> None:
        """Write what one of the node's trainers did; steps of rank 0 only, since all ranks make the same ones."""
        log = self._log.bind(generation=generation, slot=event.slot, rank=rank)
        match event:
            case w.Started():
                log.emit("trainer.started", pid=event.pid)
            case w.Restored(state=state):
                detail = state.detail or None
                level = Level.WARNING if detail and rank == 0 else None
                log.emit_at(
                    level,
                    "state.restored",
                    source=state.source,
                    step=state.step,
                    detail=detail,
                    parts=[[part.name, part.seconds, part.processor] for part in state.parts],
                    **({"loss": state.loss} if state.loss else {}),
                )
            case w.StepFinished() if rank == 0:
                record = event.record
                excluded = [list(part) for part in record.excluded]
                log.emit(
                    "step.committed",
                    step=record.step,
                    loss=record.loss.hex(),
                    gradient_norm=record.gradient_norm,
                    seconds=record.seconds,
                    safe_step=record.safe_step,
                    samples=list(record.samples),
                    sample_sum=record.sample_sum,
                    processor=record.processor,
                    data=record.data,
                    copy=record.copy,
                    **({"read": record.read} if record.read else {}),
                    **({"tokens": record.tokens} if record.tokens else {}),
                    **({"excluded": excluded} if excluded else {}),
                    **({"logged": record.logged} if record.logged else {}),
                    **({"noise_scale": record.noise_scale} if record.noise_scale is not None else {}),
                )
                if record.resized:
                    log.emit("batch.resized", step=record.step, detail=record.resized)
                if record.stopped:
                    log.emit("run.stopped", step=record.step, detail=record.stopped)
                if record.usual is not None:
                    # That it was to be done something about, and was not, is not to be overlooked.
                    level, detail = Level.ERROR if record.why_kept else None, record.why_kept or None
                    log.emit_at(
                        level, "loss.spiked", step=record.step, loss=record.loss, usual=record.usual, detail=detail
                    )
                if excluded:
                    known = "" if record.why_excluded else KNOWN
                    log.emit_at(
                        Level.DEBUG if known else None,
                        "batch.excluded",
                        step=record.step - 1,
                        samples=excluded,
                        detail=record.why_excluded or known,
                    )
            # All ranks tell the same: what rank 0 does is kept, and on the node of a device that computes wrongly.
            case w.AuditHeard() if rank == 0 or _its_own(event.report, rank):
                _audited(log, event.report)
            case w.TrainerExited():
                error = None if event.kind in WELL else event.detail or None
                raised = event.exception
                if event.kind is w.ExitKind.PEER_LOST and raised is not None:
                    # The only record of it: when a peer really was lost, it is not reported to anybody else.
                    error = f"{error}: {raised.kind}: {raised.message}\n\n{raised.traceback}"
                log.emit("trainer.exited", kind=str(event.kind), step=event.step, error=error)
            case _:
                pass


def _its_own(report: AuditReport, rank: int) -> bool:
    """Return whether a rank other than 0 is to be heard: what it alone tells, or what is told of it."""
    alone = report.kind is Audited.ALTERED or (report.kind is Audited.UNCHECKED and bool(report.ranks))
    return alone or (rank in report.ranks and report.kind in BLAMING)


def _audited(log: EventLog, report: AuditReport) -> None:
    """Write what an audit found."""
    said = {
        "step": report.step,
        "micro_batch": report.micro_batch,
        "compared": report.compared,
        "where": report.where,
        "detail": report.detail,
    }
    ranks, nodes = list(report.ranks), list(report.nodes)
    took = {"seconds": round(report.seconds, 6), "parts": [round(one, 6) for one in report.parts]}
    about = {"step": report.step, "ranks": ranks, "nodes": nodes, "detail": report.detail, "acted": report.acted}
    match report.kind:
        case Audited.OFF:
            log.emit("audit.off", detail=report.detail)
        case Audited.PLANNED:
            assert report.coverage is not None
            log.emit("audit.planned", step=report.step, every=report.coverage.every, detail=report.detail)
        case Audited.FAILED:
            log.emit("audit.failed", **said, **took, finding=report.finding, ranks=ranks, nodes=nodes)
        case Audited.INCONCLUSIVE:
            log.emit("audit.inconclusive", **said, **took, finding=report.finding)
        case Audited.REDONE:
            log.emit("step.redone", step=report.step, nodes=nodes, detail=report.detail)
        case Audited.EXAMINED:
            log.emit("node.examined", step=report.step, nodes=nodes, detail=report.detail)
        case Audited.UNEXAMINED:
            log.emit("node.unexamined", step=report.step, nodes=nodes, detail=report.detail)
        case Audited.SPIKED:
            assert report.rollback is not None
            positions = [[report.rollback.first, report.rollback.stop]]
            log.emit("run.rolled_back", step=report.step, clean=report.clean, samples=positions, detail=report.detail)
        case Audited.UNFIT:
            log.emit("exam.failed", **said, **took, finding=report.finding, ranks=ranks, nodes=nodes)
        case Audited.LYING:
            log.emit("node.lying", **said, ranks=ranks, nodes=nodes, clean=report.clean)
        case Audited.ALTERED:
            log.emit("state.altered", **about, where=report.where)
        case Audited.SPLIT:
            log.emit("vote.split", **about)
        case Audited.MISCALCULATED:
            log.emit("update.wrong", **about, finding=report.finding)
        case Audited.UNCHECKED:
            log.emit("check.off", where=report.where, detail=report.detail)


def _shown(generation: Generation) -> dict[str, object]:
    layout = generation.layout
    return {
        "number": generation.number,
        "cause": str(generation.cause),
        "nodes": [node.name for node in generation.nodes],
        "spares": [node.name for node in generation.spares],
        "layout": {axis: getattr(layout, axis) for axis in ("pp", "dp", "cp", "tp", "zero")} if layout else None,
        "detail": generation.detail,
    }
